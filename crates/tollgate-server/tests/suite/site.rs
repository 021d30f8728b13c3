//! A service that goes by a file, whole: its doors on free ports, its files watched, and an operator who asks.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tollgate::Limiter;
use tollgate::config::Loader;
use tollgate::engine::Engine;
use tollgate_server::{BoundListeners, Bounds, Listeners, Origin, Readiness, Reloader, Token, run};
use tollgate_testkit::poll::eventually;

/// Nothing that a test waits for takes this long, unless it never comes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
pub(crate) const TOKEN: &str = "a-token-for-tests-only";

/// What a test may want otherwise.
pub(crate) struct Setup {
    pub(crate) limiter: Limiter,
    pub(crate) loader: Loader,
    pub(crate) bounds: Bounds,
    pub(crate) origins: Vec<Origin>,
    pub(crate) admin_hosts: Vec<String>,
}

pub(crate) struct Site {
    dir: tempfile::TempDir,
    http: SocketAddr,
    admin: SocketAddr,
    watching: JoinHandle<()>,
    _runtime: Runtime,
}

/// What a door said.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("{self:?}"))
    }
}

impl Site {
    pub(crate) fn start(rules: &str) -> Site {
        Site::start_with(rules, |_| {})
    }

    /// With something that is otherwise; it is chosen inside the runtime.
    pub(crate) fn start_with(rules: &str, choose: impl FnOnce(&mut Setup)) -> Site {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        let file = dir.path().join("etc/tollgate.toml");
        std::fs::write(&file, rules).unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let context = runtime.enter();
        let mut setup = Setup {
            limiter: Limiter::memory(),
            loader: Loader::new(),
            bounds: Bounds::default(),
            origins: Vec::new(),
            admin_hosts: Vec::new(),
        };
        choose(&mut setup);
        let Setup { limiter, loader, bounds, origins, admin_hosts } = setup;
        let loaded = loader.load(&file).unwrap();
        let engine = Engine::new(limiter.clone(), loaded.rules.clone());
        let reloader = Reloader::rules(&file, loader, loaded, engine.clone());
        let ((http, http_at), (admin, admin_at)) = (listen(), listen());
        let doors = BoundListeners::new(limiter.clone())
            .rules(engine)
            .bounds(bounds)
            .allowed_origins(origins)
            .admin_hosts(admin_hosts)
            .readiness(Readiness::new(limiter, None, reloader.clone()))
            .token(Token::given(TOKEN).unwrap())
            .reloader(reloader.clone());
        let watching = tokio::spawn(reloader.watch());
        let listeners = Listeners { http: Some(http), admin: Some(admin), ..Listeners::default() };
        tokio::spawn(run(listeners, doors, std::future::pending()));
        drop(context);
        Site { dir, http: http_at, admin: admin_at, watching, _runtime: runtime }
    }

    /// A file of the service.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.file(name), text).unwrap();
    }

    /// Ends the task that watches the files.
    pub(crate) fn end_watching(&self) {
        self.watching.abort();
    }

    /// The HTTP door's word on a question.
    pub(crate) fn check(&self, question: &Value) -> Answer {
        ask(self.http, "POST", "/v1/check", &question.to_string())
    }

    /// The admin door's answer, with the token.
    pub(crate) fn operate(&self, method: &str, path: &str, body: &str) -> Answer {
        ask(self.admin, method, path, body)
    }

    /// The admin door's answer to a request with these header lines and no others.
    pub(crate) fn ask_admin(&self, method: &str, path: &str, headers: &str) -> Answer {
        exchange(self.admin, &format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n{headers}\r\n"))
    }

    /// Asks to have the files read again, without waiting for an answer.
    pub(crate) fn ask_to_reload(&self) -> TcpStream {
        let mut stream = TcpStream::connect(self.admin).unwrap();
        stream.write_all(request("POST", "/v1/reload", "").as_bytes()).unwrap();
        stream
    }

    /// Waits until the admin door's answer is as expected.
    pub(crate) fn until(&self, path: &str, holds: impl Fn(&Answer) -> bool) -> Answer {
        eventually(path, || self.operate("GET", path, ""), holds)
    }

    /// Waits until so many reloads have had this result.
    pub(crate) fn until_reloaded(&self, result: &str, times: u64) {
        let line = format!("tollgate_reloads_total{{result=\"{result}\"}} {times}\n");
        self.until("/metrics", |answer| answer.body.contains(&line));
    }
}

fn listen() -> (tokio::net::TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    (tokio::net::TcpListener::from_std(listener).unwrap(), address)
}

fn request(method: &str, path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

fn ask(door: SocketAddr, method: &str, path: &str, body: &str) -> Answer {
    exchange(door, &request(method, path, body))
}

fn exchange(door: SocketAddr, request: &str) -> Answer {
    let mut stream = TcpStream::connect(door).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    let (head, body) = said.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {said:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line");
    Answer { status, body: body.to_owned() }
}
