//! A complete server with a configuration file: listeners on free ports, watched files, and a client for the admin API.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

use serde_json::Value;
use tidegate::Limiter;
use tidegate::config::Loader;
use tidegate::engine::Engine;
use tidegate_server::listeners::admin::ADMIN;
use tidegate_server::listeners::http::HTTP;
use tidegate_server::{Bounds, Readiness, Reloader, SecretForm, ServerOptions, WebOrigin, run};
use tidegate_testkit::http::{HttpClient, HttpResponse};
use tidegate_testkit::poll::eventually;
use tidegate_testkit::program::TOKEN;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

/// The options that a test can change.
pub(crate) struct Setup {
    pub(crate) limiter: Limiter,
    pub(crate) loader: Loader,
    pub(crate) bounds: Bounds,
    pub(crate) origins: Vec<WebOrigin>,
    pub(crate) admin_hosts: Vec<String>,
}

pub(crate) struct Site {
    dir: tempfile::TempDir,
    http: SocketAddr,
    admin: SocketAddr,
    watching: JoinHandle<()>,
    _runtime: Runtime,
}

impl Site {
    pub(crate) fn start(rules: &str) -> Site {
        Site::start_with(rules, |_| {})
    }

    /// Starts a server. `choose` changes its options, inside the runtime.
    pub(crate) fn start_with(rules: &str, choose: impl FnOnce(&mut Setup)) -> Site {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        let file = dir.path().join("etc/tidegate.toml");
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
        let options = ServerOptions::new(engine)
            .bounds(bounds)
            .allowed_origins(origins)
            .admin_hosts(admin_hosts)
            .readiness(Readiness::new(limiter, None, reloader.clone()))
            .secret(&ADMIN, SecretForm::Token.parse(TOKEN).unwrap())
            .reloader(reloader.clone());
        let watching = tokio::spawn(reloader.watch());
        tokio::spawn(run([(&HTTP, http), (&ADMIN, admin)], options, std::future::pending()));
        drop(context);
        Site { dir, http: http_at, admin: admin_at, watching, _runtime: runtime }
    }

    /// Returns the path of a file of the server.
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

    /// Sends `POST /v1/check`.
    pub(crate) fn check(&self, body: &Value) -> HttpResponse {
        ask(self.http, "POST", "/v1/check", &body.to_string())
    }

    /// Sends a request without a body to the HTTP listener.
    pub(crate) fn ask_http(&self, method: &str, path: &str) -> HttpResponse {
        ask(self.http, method, path, "")
    }

    /// Sends a request with the token to the admin listener.
    pub(crate) fn operate(&self, method: &str, path: &str, body: &str) -> HttpResponse {
        ask(self.admin, method, path, body)
    }

    /// Sends a request with these header lines and no others to the admin listener.
    pub(crate) fn ask_admin(&self, method: &str, path: &str, headers: &str) -> HttpResponse {
        let mut client = HttpClient::open(self.admin);
        client.raw(format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n{headers}\r\n").as_bytes());
        client.receive().expect("a response")
    }

    /// Sends `POST /v1/reload`, without waiting for the response.
    pub(crate) fn start_reload(&self) -> HttpClient {
        let mut client = HttpClient::open(self.admin);
        send(&mut client, "POST", "/v1/reload", "");
        client
    }

    /// Waits until the response of the admin listener is as expected.
    pub(crate) fn until(&self, path: &str, holds: impl Fn(&HttpResponse) -> bool) -> HttpResponse {
        eventually(path, || self.operate("GET", path, ""), holds)
    }

    /// Waits until this many reloads have had this result.
    pub(crate) fn until_reloaded(&self, result: &str, times: u64) {
        let line = format!("tidegate_reloads_total{{result=\"{result}\"}} {times}\n");
        self.until("/metrics", |answer| answer.body.contains(&line));
    }
}

/// Binds a free port, inside a runtime.
pub(crate) fn listen() -> (tokio::net::TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    (tokio::net::TcpListener::from_std(listener).unwrap(), address)
}

/// Sends a request with the token on this connection, which is the last on it.
fn send(client: &mut HttpClient, method: &str, path: &str, body: &str) {
    let bearer = format!("Bearer {TOKEN}");
    client.send(method, path, &[("connection", "close"), ("authorization", &bearer)], body);
}

/// Sends a request with the token on a new connection, and returns its response.
fn ask(address: SocketAddr, method: &str, path: &str, body: &str) -> HttpResponse {
    let mut client = HttpClient::open(address);
    send(&mut client, method, path, body);
    client.receive().expect("a response")
}
