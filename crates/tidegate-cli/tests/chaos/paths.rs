//! No spelling of a path reaches a handler without matching the rule of that handler.
//!
//! The requests go to real servers: Node, Python and PHP, directly and behind nginx, which forwards either its
//! normalized `$uri` or the original `$request_uri`. The long form adds Go, if it is installed. Every handler prints
//! the paths by which programs on that server commonly route. If one of them is a protected path, the rule for that
//! path must match the request as it was sent.
//!
//! The lines `reached` of the long form are the source of `crates/tidegate/src/rules/tests/corpus.tsv`, which a unit
//! test replays without servers.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};

use serde_json::Value;
use tidegate::config::{Config, Format};
use tidegate::rules::{RequestView, RuleSet};
use tidegate_testkit::conformance::Random;
use tidegate_testkit::poll::eventually;

use crate::campaign::{is_long, random, record, scale};
use tidegate_testkit::program::PATIENCE;

const SCENARIO: &str = "paths";
const PROTECTED: [&str; 3] = ["/login", "/api/v1/items", "/account/reset"];
/// Texts that are inserted into a path.
const PIECES: [&str; 44] = [
    "/",
    "//",
    "/.",
    "/./",
    "/x/..",
    "/..",
    "%2f",
    "%2F",
    "\\",
    "%5c",
    ";",
    ";x=1",
    ";x%2Fy",
    "%3b",
    "?x",
    "%3f",
    "%3Fx",
    "%23",
    "%23x",
    "%00",
    "%00x",
    "%20",
    "%20x",
    "%09",
    "%0a",
    "%0d",
    "%0d%0a",
    "%0b",
    "%0c",
    ".",
    "..",
    "%2e",
    "%2e%2e",
    "%25",
    "%252f",
    "%253f",
    "%2500",
    "%c0%af",
    "+",
    "%7f",
    "%01",
    "//host",
    "/\\host",
    "%2f%2fhost",
];

/// Finds a program in `.tools/bin` or in the PATH.
fn program(name: &str) -> Option<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(tools).chain(std::env::split_paths(&path)).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// Returns the command of a program. Panics if it is not installed.
fn required(name: &str) -> Command {
    Command::new(program(name).unwrap_or_else(|| panic!("no {name} in .tools/bin or in the PATH: run `make setup`")))
}

/// Compiles a Go program.
fn built(source: &Path, dir: &Path) -> PathBuf {
    let binary = dir.join("server");
    let status = required("go").arg("build").arg("-o").arg(&binary).arg(source).status().unwrap();
    assert!(status.success(), "go build");
    binary
}

/// A child process that is killed when the test ends, even if the test itself is killed.
struct TestProcess {
    child: Child,
    /// A shell that kills the child when its standard input is closed.
    watchdog: Child,
}

impl TestProcess {
    fn start(command: &mut Command) -> TestProcess {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
        let mut watchdog = Command::new("sh");
        watchdog.args(["-c", r#"read -r _; kill -9 "$1""#, "watchdog"]).arg(child.id().to_string()).process_group(0);
        let watchdog = watchdog.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        TestProcess { child, watchdog }
    }

    fn stdout(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.child.stdout.take().unwrap())
    }

    fn stderr(&mut self) -> BufReader<ChildStderr> {
        BufReader::new(self.child.stderr.take().unwrap())
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        for child in [&mut self.watchdog, &mut self.child] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A server whose handler prints the paths of every request that reaches it.
struct PathServer {
    name: &'static str,
    port: u16,
    lines: mpsc::Receiver<String>,
    /// The output of the server on standard error.
    log: Arc<Mutex<String>>,
    sentinels: u32,
    _process: TestProcess,
    _dir: tempfile::TempDir,
}

impl PathServer {
    fn start(name: &'static str) -> PathServer {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/chaos/paths");
        let dir = tempfile::tempdir().unwrap();
        let mut command = match name {
            "node" => required("node"),
            "python" => required("python3"),
            "php" => required("php"),
            _ => Command::new(built(&scripts.join("server.go"), dir.path())),
        };
        match name {
            "node" => command.arg(scripts.join("server.mjs")),
            "python" => command.arg(scripts.join("server.py")),
            "php" => command.args(["-S", "127.0.0.1:0"]).arg(scripts.join("server.php")),
            _ => command.args(PROTECTED),
        };
        let mut process = TestProcess::start(&mut command);
        let mut stdout = process.stdout();
        let mut stderr = process.stderr();
        // PHP prints its port in a sentence on standard error, the others print the number on standard output.
        let mut announced = String::new();
        let port = match name {
            "php" => {
                stderr.read_line(&mut announced).unwrap();
                announced.split("127.0.0.1:").nth(1).and_then(|rest| rest.split(')').next()).map(str::to_owned)
            }
            _ => stdout.read_line(&mut announced).ok().map(|_| announced.trim().to_owned()),
        };
        let port = port.and_then(|port| port.parse().ok()).unwrap_or_else(|| {
            let mut log = String::new();
            let _ = stderr.read_to_string(&mut log);
            panic!("{name} does not start: {announced}{log}")
        });
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        let log = Arc::<Mutex<String>>::default();
        let written = log.clone();
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).for_each(|line| *written.lock().unwrap() += &(line + "\n"));
        });
        PathServer { name, port, lines, log, sentinels: 0, _process: process, _dir: dir }
    }

    /// Returns the paths of all requests that have reached the handler since the last call.
    fn reached(&mut self) -> BTreeSet<String> {
        self.sentinels += 1;
        let sentinel = format!("/sentinel-{}", self.sentinels);
        let answer = exchange(TcpStream::connect(("127.0.0.1", self.port)).unwrap(), &sentinel);
        let mut reached = BTreeSet::new();
        loop {
            let line = self.lines.recv_timeout(PATIENCE).unwrap_or_else(|_| {
                let (answer, log) = (String::from_utf8_lossy(&answer), self.log.lock().unwrap());
                panic!("{} did not handle {sentinel} ({reached:?}), answered {answer:?} and wrote:\n{log}", self.name)
            });
            let paths: Vec<String> = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"));
            if paths.contains(&sentinel) {
                return reached;
            }
            reached.extend(paths);
        }
    }
}

/// Sends one request and returns everything received until the connection ends.
fn exchange(mut stream: impl Read + Write, path: &str) -> Vec<u8> {
    // In one write: PHP rejects a request line that arrives in several pieces.
    let request = format!("GET {path} HTTP/1.1\r\nHost: host\r\nConnection: close\r\n\r\n");
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

/// An nginx with a Unix socket for each server and way of forwarding.
struct Nginx {
    dir: tempfile::TempDir,
    _process: TestProcess,
}

impl Nginx {
    fn start(backends: &[PathServer]) -> Nginx {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display();
        let locations: String =
            PROTECTED.iter().map(|path| format!("location = {path} {{ return 200 '[\"{path}\"]'; }}\n")).collect();
        let mut servers = format!("server {{ listen unix:{at}/itself;\n{locations}location / {{ return 404; }} }}\n");
        for PathServer { name, port, .. } in backends {
            for variable in ["uri", "request_uri"] {
                servers += &format!(
                    "server {{ listen unix:{at}/{name}-{variable};\n\
                     location / {{ proxy_pass http://127.0.0.1:{port}${variable}; }} }}\n"
                );
            }
        }
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|what| format!("{what}_temp_path {at}/{what};\n"))
            .concat();
        let config = format!(
            "daemon off; master_process off; pid {at}/pid; error_log {at}/error.log crit;\n\
             events {{ worker_connections 64; }}\n\
             http {{ access_log off;\n{temporary}{servers} }}\n"
        );
        fs::write(dir.path().join("nginx.conf"), config).unwrap();
        let mut nginx = required("nginx");
        nginx.arg("-p").arg(dir.path()).arg("-c").arg(dir.path().join("nginx.conf"));
        nginx.arg("-e").arg(dir.path().join("error.log"));
        let process = TestProcess::start(&mut nginx);
        let nginx = Nginx { dir, _process: process };
        eventually("nginx listens", || UnixStream::connect(nginx.dir.path().join("itself")).is_ok(), |is_up| *is_up);
        nginx
    }

    fn connect(&self, name: &str) -> UnixStream {
        let stream = UnixStream::connect(self.dir.path().join(name)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Returns the protected location that nginx itself serves for this path, or `None` for any other response.
    fn location(&self, path: &str) -> Option<String> {
        let answer = String::from_utf8_lossy(&exchange(self.connect("itself"), path)).into_owned();
        let body = answer.split("\r\n\r\n").nth(1)?;
        let Ok(Value::Array(paths)) = serde_json::from_str(body) else { return None };
        paths.first()?.as_str().map(str::to_owned)
    }
}

/// Returns a rule set with one rule for each protected path.
fn rules() -> RuleSet {
    let rule = |path: &&str| {
        format!(
            "[[rules]]\nname = '{}'\nmatch = {{ path = '{path}' }}\nby = ['ip']\nlimits = ['5/min']\n",
            path.replace('/', ".")
        )
    };
    let text: String = PROTECTED.iter().map(rule).collect();
    Config::from_text(&text, Format::Toml).unwrap_or_else(|report| panic!("{report:?}")).rules
}

/// Returns the protected paths whose rules match a request.
fn guarded(rules: &RuleSet, path: &str) -> Vec<&'static str> {
    let headers = http::HeaderMap::new();
    let matched = rules.matching(&RequestView::new(&http::Method::GET, path, &headers));
    matched.indices().iter().map(|index| PROTECTED[*index as usize]).collect()
}

/// Returns a random variation of a protected path, which may or may not be another spelling of it.
fn spelling(random: &mut Random) -> String {
    let below = |random: &mut Random, bound: usize| random.below(bound as u64) as usize;
    let mut path = PROTECTED[below(random, PROTECTED.len())].to_owned();
    for _ in 0..=random.below(3) {
        let at = match random.below(4) {
            0 => 0,
            1 | 2 => path.len(),
            _ => below(random, path.len()),
        };
        match random.below(4) {
            // Escapes a character, once or twice.
            0 => {
                let at = at.min(path.len() - 1);
                let percent = if random.below(4) == 0 { "%25" } else { "%" };
                let escape = format!("{percent}{:02x}", path.as_bytes()[at]);
                path.replace_range(at..=at, &escape);
            }
            _ => path.insert_str(at, PIECES[below(random, PIECES.len())]),
        }
    }
    if path.starts_with('/') { path } else { format!("/{path}") }
}

#[test]
fn request_that_reaches_a_handler_matches_its_rule() {
    let mut random = random(SCENARIO);
    let rules = rules();
    // Each piece alone after each path, then random variations.
    let mut paths: Vec<String> =
        PROTECTED[..scale(1, 3)].iter().flat_map(|path| PIECES.map(|piece| format!("{path}{piece}"))).collect();
    paths.extend((0..scale(150, 5_000)).map(|_| spelling(&mut random)));
    let mut backends: Vec<PathServer> = ["node", "python", "php"].map(PathServer::start).into_iter().collect();
    if is_long() && program("go").is_some() {
        backends.push(PathServer::start("go"));
    }
    let nginx = Nginx::start(&backends);

    let (mut asked, mut reached) = (0, 0);
    let mut escaped = BTreeSet::new();
    let mut judge = |path: &str, server: &str, seen: BTreeSet<String>| {
        asked += 1;
        let is_seen = |protected: &&&str| seen.iter().any(|path| path.strip_suffix('/').unwrap_or(path) == **protected);
        for protected in PROTECTED.iter().filter(is_seen) {
            reached += 1;
            if is_long() && path != *protected {
                record(SCENARIO, "reached", format_args!("{protected}\t{path}\t{server}"));
            }
            if !guarded(&rules, path).contains(protected) {
                escaped.insert(format!("{path} reaches {protected} on {server}"));
            }
        }
    };
    for path in &paths {
        judge(path, "nginx", nginx.location(path).into_iter().collect());
        for backend in &mut backends {
            let direct = TcpStream::connect(("127.0.0.1", backend.port)).unwrap();
            direct.set_read_timeout(Some(PATIENCE)).unwrap();
            exchange(direct, path);
            judge(path, backend.name, backend.reached());
            for variable in ["uri", "request_uri"] {
                exchange(nginx.connect(&format!("{}-{variable}", backend.name)), path);
                judge(path, &format!("{} behind nginx ${variable}", backend.name), backend.reached());
            }
        }
    }
    record(SCENARIO, "asked", asked);
    record(SCENARIO, "reached a protected handler", reached);
    assert!(escaped.is_empty(), "{} of {reached} evade their rule: {escaped:#?}", escaped.len());
    assert!(reached > paths.len() / 2, "too few spellings reach a handler: {reached} of {asked}");
}
