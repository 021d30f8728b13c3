//! The newcomer's shell: one `bash`, so that `cd` and background jobs work as on a terminal.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tidegate_testkit::server::{Server, free_port};

use super::repository;
use crate::console::{Step, is_as_shown};

/// The ports on the pages: the listeners of `tidegate serve`, another one for its admin listener, two services, and the
/// gateway.
const PORTS: [&str; 7] = ["8080", "6380", "9180", "9191", "3000", "3001", "8000"];
/// The port of Redis on the pages.
const REDIS_PORT: &str = "6379";
/// What connects to Redis in the programs of the pages, and what is used instead: with the default timeouts, the result
/// would depend on the other load of the machine.
pub(super) const PATIENT: [(&str, &str); 2] = [
    (
        "Limiter::builder().url(url)?",
        "Limiter::builder().deadline(std::time::Duration::from_secs(60)).store(std::sync::Arc::new(\
         tidegate::RedisStore::builder(url).call_timeout(std::time::Duration::from_secs(60)).build()?))",
    ),
    (
        "RedisStore::builder(\"redis://127.0.0.1:6379\")",
        "RedisStore::builder(\"redis://127.0.0.1:6379\").call_timeout(std::time::Duration::from_secs(60))",
    ),
];
/// Maximum time of a command. The first `cargo run` compiles all dependencies.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(1_200);
const PAUSE: Duration = Duration::from_millis(20);
const END: &str = "end of the command, status";

/// A shell in a directory that contains `tidegate`, a link to this repository. Dropping it kills all its processes.
pub(super) struct Shell {
    bash: Child,
    commands: ChildStdin,
    lines: mpsc::Receiver<String>,
    /// The port on the pages, and the one that is used instead.
    ports: Vec<(String, String)>,
    locked: BTreeMap<String, String>,
    directory: PathBuf,
    jobs: usize,
    _redis: Server,
}

impl Shell {
    pub(super) fn start(directory: &Path) -> Shell {
        symlink(repository(), directory.join("tidegate")).unwrap();
        let redis = Server::redis();
        let mut ports = PORTS.map(|port| (port.to_owned(), free_port().to_string())).to_vec();
        ports.push((REDIS_PORT.to_owned(), redis.port().to_string()));
        let programs = directory.join("programs");
        fs::create_dir(&programs).unwrap();
        write_programs(&programs, &ports);

        let path = std::env::var("PATH").unwrap();
        let tools = repository().join(".tools/bin");
        let mut bash = Command::new("bash");
        for variable in ["TIDEGATE_ADMIN_TOKEN", "TIDEGATE_HTTP_TOKEN", "TIDEGATE_STORE", "REDIS_URL", "TIDEGATE_LOG"] {
            bash.env_remove(variable);
        }
        bash.args(["--noprofile", "--norc"]).current_dir(directory).process_group(0);
        bash.env("PATH", format!("{}:{}:{path}", programs.display(), tools.display()));
        // The service of page 5.
        bash.env("PORT", &ports[5].1);
        // A directory of its own: the newcomer's project has other features and another profile than this workspace.
        bash.env("CARGO_TARGET_DIR", repository().join("target/newcomer"));
        bash.env("CARGO_NET_OFFLINE", "true").env("CARGO_PROFILE_DEV_DEBUG", "0");
        bash.env("CARGO_TERM_COLOR", "never").env("NO_COLOR", "1");
        let [package, installed] = ["clients/python/src", ".tools/python"].map(|path| repository().join(path));
        bash.env("PYTHONPATH", format!("{}:{}", package.display(), installed.display()));
        bash.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut bash = bash.spawn().expect("bash");
        let commands = bash.stdin.take().unwrap();
        let output = BufReader::new(bash.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            output
                .split(b'\n')
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(String::from_utf8_lossy(&line).into_owned()))
        });
        let locked = locked_versions();
        Shell { bash, commands, lines, ports, locked, directory: directory.to_owned(), jobs: 0, _redis: redis }
    }

    /// Runs a command of a page.
    ///
    /// # Panics
    /// If it prints something else than the page shows, or shows nothing and fails.
    pub(super) fn run(&mut self, page: &str, step: &Step) {
        self.try_run(step).unwrap_or_else(|problem| panic!("{page}: `{}` {problem}", step.command));
    }

    pub(super) fn try_run(&mut self, step: &Step) -> Result<(), String> {
        let command = pinned(&self.with_free_ports(&step.command), &self.locked);
        if let Some(command) = command.strip_suffix(" &") {
            return self.start_job(command, &step.output);
        }
        let (output, status) = self.execute(&command);
        let output = self.with_printed_ports(&output);
        match step.output.is_empty() {
            true if status == "0" => self.after(&command),
            true => return Err(format!("failed with status {status}:\n{output}")),
            false if is_as_shown(&step.output, &output) => {}
            false => return Err(format!("printed:\n{output}\nThe page shows:\n{}", step.output)),
        }
        Ok(())
    }

    /// Starts a background job and waits until its standard output is as shown.
    fn start_job(&mut self, command: &str, shown: &str) -> Result<(), String> {
        self.jobs += 1;
        let file = |stream: &str| self.directory.join(format!("job{}.{stream}", self.jobs));
        let (printed, logged) = (file("out"), file("err"));
        self.execute(&format!("{command} >{} 2>{} &", printed.display(), logged.display()));
        for _ in 0..COMMAND_TIMEOUT.as_millis() / PAUSE.as_millis() {
            let has_ended = self.execute("kill -0 $!").1 != "0";
            let output = self.with_printed_ports(&fs::read_to_string(&printed).unwrap_or_default());
            // A job that shows nothing cannot be waited for, and a reader would not know either when it is ready.
            if !shown.is_empty() && is_as_shown(shown, &output) {
                return Ok(());
            }
            if has_ended {
                let log = fs::read_to_string(&logged).unwrap_or_default();
                return Err(format!("ended and printed:\n{output}{log}\nThe page shows:\n{shown}"));
            }
            // Not `poll` of the testkit: a job such as `cargo run` compiles first, which takes longer than that waits.
            std::thread::sleep(PAUSE);
        }
        Err(format!("does not print what the page shows:\n{shown}"))
    }

    /// Writes a file below the current directory of the shell.
    pub(super) fn write(&mut self, name: &str, text: &str) {
        let text = PATIENT.iter().fold(text.to_owned(), |text, (shown, used)| text.replace(shown, used));
        let text = self.with_free_ports(&text);
        let command =
            format!("mkdir -p \"$(dirname '{name}')\" && cat > '{name}' <<'end of the file'\n{text}end of the file");
        let (output, status) = self.execute(&command);
        assert_eq!(status, "0", "{name}: {output}");
    }

    /// Ends the background jobs and waits for them, as closing the terminal does.
    pub(super) fn stop_jobs(&mut self) {
        self.execute("kill $(jobs -p); wait");
    }

    /// Copies the lock file of this workspace into a new project, so that it gets the same crates, offline.
    fn after(&mut self, command: &str) {
        if command.starts_with("cargo new ") {
            let (_, status) = self.execute(&format!("cp '{}' .", repository().join("Cargo.lock").display()));
            assert_eq!(status, "0");
        }
    }

    /// Returns what the command printed, and its status.
    fn execute(&mut self, command: &str) -> (String, String) {
        write!(self.commands, "{{ {command}\n}} </dev/null 2>&1\necho \"\n{END} $?\"\n").unwrap();
        let mut output = String::new();
        loop {
            let line = self.lines.recv_timeout(COMMAND_TIMEOUT);
            let line = line.unwrap_or_else(|error| panic!("`{command}` {error}; it has printed:\n{output}"));
            if let Some(status) = line.strip_prefix(END) {
                // The line end before the marker belongs to the marker.
                output.pop();
                return (output, status.trim().to_owned());
            }
            output = output + &line + "\n";
        }
    }

    fn with_free_ports(&self, text: &str) -> String {
        self.ports.iter().fold(text.to_owned(), |text, (printed, free)| with_number(&text, printed, free))
    }

    fn with_printed_ports(&self, text: &str) -> String {
        self.ports.iter().fold(text.to_owned(), |text, (printed, free)| with_number(&text, free, printed))
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let group = Pid::from_child(&self.bash);
        // Fails if all processes have ended.
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.bash.wait();
    }
}

/// Builds an example of this workspace, with the features of the tests, so that nothing else is compiled again.
pub(crate) fn build_example(name: &str) {
    let profile = Path::new(env!("CARGO_BIN_EXE_tidegate")).parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    // Cargo includes the features of dev-dependencies only with `--examples`.
    cargo.args([
        "build",
        "--workspace",
        "--all-features",
        "--locked",
        "--offline",
        "--quiet",
        "--examples",
        "--bin",
        name,
    ]);
    cargo.args(profile.ends_with("release").then_some("--release")).env("CARGO_TARGET_DIR", profile.parent().unwrap());
    let output = cargo.current_dir(repository()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Writes `tidegate`, which runs the binary under test with free ports instead of the default ones, and `cargo`, which
/// runs an example of this workspace without compiling it with other features.
fn write_programs(directory: &Path, ports: &[(String, String)]) {
    let tidegate = env!("CARGO_BIN_EXE_tidegate");
    let mut script = String::from("#!/usr/bin/env bash\n");
    let listeners = [("serve", "--http", 0), ("serve", "--resp", 1), ("*", "--admin", 2), ("gateway", "--listen", 6)];
    script += &format!("[[ \"$1\" = serve || \"$1\" = gateway ]] || exec {tidegate} \"$@\"\n");
    for (command, listener, port) in listeners {
        let port = &ports[port].1;
        let is_meant = format!("[[ \"$1\" = {command} && \" $* \" != *\" {listener} \"* ]]");
        script += &format!("{is_meant} && set -- \"$@\" {listener} 127.0.0.1:{port}\n");
    }
    script += &format!("exec {tidegate} \"$@\"\n");
    let cargo = env!("CARGO");
    let example = format!(
        "#!/usr/bin/env bash\n[[ \"$*\" = 'run --quiet -p '* ]] && exec '{}'/\"${{@: -1}}\"\nexec '{cargo}' \"$@\"\n",
        Path::new(tidegate).parent().unwrap().display()
    );
    let mut programs = vec![("tidegate", script), ("cargo", example)];
    // Python finds the packages by PYTHONPATH.
    programs.push(("pip", "#!/usr/bin/env bash\n[ \"$1\" = install ]\n".to_owned()));
    programs.push(("npm", NPM.replace("REPOSITORY", &repository().display().to_string())));
    programs.extend(go().map(|go| ("go", GO.replace("PROGRAM", &go.display().to_string()))));
    for (name, text) in programs {
        let path = directory.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

/// `npm install PACKAGES` with links to the installed packages. Node's package of this repository is built if it changed.
const NPM: &str = r#"#!/usr/bin/env bash
set -e
[ "$1" = install ]
shift
mkdir -p node_modules
for package in "$@"; do
    case $package in
        */clients/node)
            cd REPOSITORY/clients/node
            [ -e dist/cjs/package.json ] && [ -z "$(find src lua -newer dist/cjs/package.json)" ] || node scripts/build.mjs
            cd "$OLDPWD"
            ln -sfn REPOSITORY/clients/node node_modules/tidegate ;;
        *) ln -sfn "REPOSITORY/.tools/node_modules/$package" "node_modules/$package" ;;
    esac
done
"#;

/// `go` without a network. `go mod tidy` would also need the modules of the tests of all modules, so the other commands
/// complete `go.mod` themselves.
const GO: &str = r#"#!/usr/bin/env bash
[[ " $* " = *" mod tidy "* ]] && exit
export GOFLAGS=-mod=mod GOPROXY=off GOSUMDB=off GOTOOLCHAIN=local GOWORK=off
exec PROGRAM "$@"
"#;

/// Returns the path of `go`, or `None` if it is not installed.
pub(super) fn go() -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|path| path.join("go")).find(|go| go.is_file())
}

/// Replaces a number that is not part of a longer one.
fn with_number(text: &str, number: &str, other: &str) -> String {
    let mut result = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(number) {
        let (before, after) = (&rest[..at], &rest[at + number.len()..]);
        let is_part = before.ends_with(|letter: char| letter.is_ascii_digit() || letter == '.')
            || after.starts_with(|letter: char| letter.is_ascii_digit());
        result = result + before + if is_part { number } else { other };
        rest = after;
    }
    result + rest
}

/// Returns the version of each package in the lock file of this workspace.
pub(super) fn locked_versions() -> BTreeMap<String, String> {
    let lock = fs::read_to_string(repository().join("Cargo.lock")).unwrap();
    let packages = lock.split("[[package]]").skip(1).map(|package| {
        let field =
            |name: &str| package.split(&format!("\n{name} = \"")).nth(1).and_then(|rest| rest.split('"').next());
        (field("name").unwrap().to_owned(), field("version").unwrap().to_owned())
    });
    packages.collect()
}

/// Returns the crates that a `cargo add` command adds.
pub(super) fn added_crates(command: &str) -> Vec<String> {
    let Some(arguments) = command.strip_prefix("cargo add ") else { return Vec::new() };
    let words: Vec<&str> = arguments.split_whitespace().collect();
    if let ["--path", path, ..] = words[..] {
        return vec![path.rsplit('/').next().unwrap().to_owned()];
    }
    words.into_iter().take_while(|word| !word.starts_with("--")).map(str::to_owned).collect()
}

/// Adds the locked versions to a `cargo add` command. Without them cargo would look for the newest ones.
fn pinned(command: &str, locked: &BTreeMap<String, String>) -> String {
    if !command.starts_with("cargo add ") || command.contains(" --path ") {
        return command.to_owned();
    }
    added_crates(command).into_iter().fold(command.to_owned(), |command, name| {
        let version = locked.get(&name).unwrap_or_else(|| panic!("{name} is not in Cargo.lock"));
        command.replacen(&format!(" {name}"), &format!(" {name}@{version}"), 1)
    })
}
