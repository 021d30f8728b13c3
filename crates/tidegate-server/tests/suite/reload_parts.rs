//! A reload puts all parts of a configuration into use in one step, or none of them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::Limiter;
use tidegate::config::Loader;
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::rules::RequestView;
use tidegate_server::listeners::gateway::GATEWAY;
use tidegate_server::listeners::http::HTTP;
use tidegate_server::{Gateway, ReloadError, Reloader, ServerOptions, Tls, run};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::poll::eventually;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use crate::site::listen;

/// The number of reloads under load.
const RELOADS: usize = 1_000;

/// A server with a configuration file, a keys file, a secret, a certificate and a gateway with one upstream.
struct Service {
    dir: tempfile::TempDir,
    reloader: Reloader,
    engine: Engine,
    /// The address of the HTTP listener.
    http: SocketAddr,
    /// The address of the gateway.
    gateway: SocketAddr,
    runtime: Runtime,
}

impl Service {
    /// Starts a server with the files of `version` whose listeners are encrypted if `is_encrypted`.
    fn start(version: &Version, is_encrypted: bool) -> Service {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let context = runtime.enter();
        let dir = tempfile::tempdir().unwrap();
        version.write(dir.path());
        let file = dir.path().join("tidegate.toml");
        let loaded = Loader::new().load(&file).unwrap();
        let engine = Engine::new(Limiter::memory(), loaded.rules.clone());
        let upstreams = Gateway::new(&loaded.gateway).unwrap();
        let mut reloader = Reloader::rules(&file, Loader::new(), loaded, engine.clone());
        let mut options = ServerOptions::new(engine.clone());
        if is_encrypted {
            let tls = Tls::read(&dir.path().join("cert.pem"), &dir.path().join("key.pem")).unwrap();
            reloader = reloader.tls(tls.clone());
            options = options.tls(tls);
        }
        reloader.follow_upstreams();
        let ((http_socket, http), (gateway_socket, gateway)) = (listen(), listen());
        let listeners = [(&HTTP, http_socket), (&GATEWAY, gateway_socket)];
        tokio::spawn(run(listeners, options.gateway(upstreams), std::future::pending()));
        drop(context);
        Service { dir, reloader, engine, http, gateway, runtime }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn reload(&self) -> Result<(), Arc<ReloadError>> {
        self.runtime.block_on(self.reloader.reload()).map(drop)
    }

    /// Connects with TLS to the address. Returns `None` if the server does not present the certificate of `version`.
    async fn connect(
        &self,
        address: SocketAddr,
        version: &Version,
    ) -> Option<tokio_rustls::client::TlsStream<tokio::net::TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(version.file("cert.pem").as_bytes()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), stream).await.ok()
    }

    /// Asserts that each part in use is that of `version`: the rules, the keys, the upstreams and the certificate.
    fn assert_uses(&self, version: &Version, case: &str) {
        self.runtime.block_on(async {
            let request = http::Request::get("/").header("x-api-key", "key-of-acme").body(()).unwrap();
            let view = RequestView::of(&request);
            let decided = self.engine.check(&view, [203, 0, 113, 9].into(), RequestOptions::default()).await;
            let Outcome::Admitted(permit) = decided else { panic!("{case}: {decided:?}") };
            let quotas: Vec<u32> = permit.decision().unwrap().limits.iter().map(|status| status.quota).collect();
            assert_eq!(quotas, [version.rule_quota, version.key_quota], "{case}: the rules and the keys");
            assert!(self.connect(self.http, version).await.is_some(), "{case}: the certificate");
            let mut stream = self.connect(self.gateway, version).await.expect("the certificate of the gateway");
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
            let mut response = Vec::new();
            stream.read_to_end(&mut response).await.unwrap();
            let response = String::from_utf8(response).unwrap();
            assert!(response.contains(&format!("x-from: {}\r\n", version.name)), "{case}: the upstreams: {response}");
        });
    }
}

/// One version of all files of a [`Service`].
struct Version {
    name: &'static str,
    rule_quota: u32,
    key_quota: u32,
    files: Vec<(&'static str, String)>,
}

impl Version {
    /// Creates a version whose upstream answers with the header `x-from: NAME`. Must be called in a runtime.
    fn new(name: &'static str, rule_quota: u32, key_quota: u32) -> Version {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let upstream = upstream(name);
        let rules = format!(
            "keys_file = 'keys.toml'\n[anonymize]\nsecret_file = 'secret'\n[plans.default]\nlimits = ['1000000/h']\n\
             [[rules]]\nname = 'all'\nlimits = [{{ name = '{name}', limit = '{rule_quota}/h' }}]\n\
             [[rules]]\nname = 'plan'\nlimits = 'plan'\n\
             [[upstreams]]\nname = 'plain'\nservers = ['http://{upstream}']\nmatch = {{ path = '/' }}\n\
             [[upstreams]]\nname = 'encrypted'\nservers = ['https://localhost:1']\nmatch = {{ path = '/tls' }}\n\
             ca_file = 'ca.pem'\n"
        );
        let keys = format!("[[keys]]\nname = 'acme'\nkey = 'key-of-acme'\nlimits = ['{key_quota}/h']\n");
        let files = vec![
            ("tidegate.toml", rules),
            ("keys.toml", keys),
            ("secret", format!("a secret of version {name}, long enough for pseudonyms\n")),
            ("ca.pem", made.cert.pem()),
            ("cert.pem", made.cert.pem()),
            ("key.pem", made.signing_key.serialize_pem()),
        ];
        Version { name, rule_quota, key_quota, files }
    }

    fn file(&self, name: &str) -> &str {
        self.files.iter().find(|(file, _)| *file == name).map(|(_, text)| text.as_str()).unwrap()
    }

    fn write(&self, dir: &std::path::Path) {
        for (name, text) in &self.files {
            std::fs::write(dir.join(name), text).unwrap();
        }
    }
}

/// Starts an upstream whose responses have the header `x-from: NAME`. Returns its address.
fn upstream(name: &'static str) -> SocketAddr {
    let (socket, address) = listen();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = socket.accept().await {
            tokio::spawn(async move {
                let mut head = Vec::new();
                while stream.read_buf(&mut head).await.is_ok_and(|count| count > 0) {
                    if head.ends_with(b"\r\n\r\n") {
                        head.clear();
                        let response = format!("HTTP/1.1 200 OK\r\nx-from: {name}\r\ncontent-length: 0\r\n\r\n");
                        let _ = stream.write_all(response.as_bytes()).await;
                    }
                }
            });
        }
    });
    address
}

#[test]
fn a_reload_changes_nothing_if_one_part_cannot_be_used() {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _context = runtime.enter();
    let (old, new) = (Version::new("old", 2_000, 30), Version::new("new", 4_000, 50));
    let service = Service::start(&old, true);
    service.assert_uses(&old, "the start");
    let other_key = Version::new("other", 1, 1);
    for (file, broken, is_rejected) in [
        ("tidegate.toml", "[[rules]]\nname = 3\n", [true, false, false]),
        ("keys.toml", "[[keys]]\nkey = 'k'\nplan = 'absent'\n", [true, false, false]),
        ("secret", "", [true, false, false]),
        ("ca.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", [false, true, false]),
        ("cert.pem", "half a certificate", [false, false, true]),
        ("key.pem", other_key.file("key.pem"), [false, false, true]),
    ] {
        new.write(service.dir.path());
        std::fs::write(service.file(file), broken).unwrap();
        let error = service.reload().unwrap_err();
        let ReloadError::Rejected(parts) = &*error else { panic!("{file}: {error}") };
        let rejected = [parts.configuration.is_some(), parts.upstreams.is_some(), parts.certificate.is_some()];
        assert_eq!(rejected, is_rejected, "{file}: {error}");
        service.assert_uses(&old, file);
    }
    // All that is wrong is reported.
    std::fs::write(service.file("tidegate.toml"), "[[rules]]\nname = 3\n").unwrap();
    let message = service.reload().unwrap_err().to_string();
    assert!(message.contains("tidegate.toml") && message.contains("; the certificate in"), "{message}");
    service.assert_uses(&old, "two broken parts");

    new.write(service.dir.path());
    service.reload().unwrap();
    service.assert_uses(&new, "all parts are valid");
}

/// While the configuration changes between two versions, clients compare the limit in each response with the upstream
/// that it comes from. The reloads run on a paused clock, so that they do not wait for the files to be stable.
#[test]
fn no_request_meets_rules_and_upstreams_of_different_configurations() {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _context = runtime.enter();
    let versions = [Version::new("one", 10_000_000, 10_000_000), Version::new("two", 9_000_000, 10_000_000)];
    let service = Service::start(&versions[0], false);
    let is_done = AtomicBool::new(false);
    let reloading = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = HttpClient::open(service.gateway);
                    let mut seen = [0_u64; 2];
                    while !is_done.load(Ordering::Relaxed) {
                        let headers = client.ask("GET", "/", &[], "").headers;
                        let (policy, from) = (&headers["ratelimit-policy"], &headers["x-from"]);
                        assert!(policy.starts_with(&format!("\"{from}\";")), "{policy} from the upstream {from}");
                        seen[usize::from(from == "two")] += 1;
                    }
                    seen
                })
            })
            .collect();
        for round in 1..=RELOADS {
            versions[round % 2].write(service.dir.path());
            reloading.block_on(service.reloader.reload()).unwrap();
            if clients.iter().any(|client| client.is_finished()) {
                break;
            }
        }
        is_done.store(true, Ordering::Relaxed);
        let seen = clients.into_iter().map(|client| client.join().unwrap());
        let seen = seen.fold([0, 0], |sum, one| [sum[0] + one[0], sum[1] + one[1]]);
        assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
    });
    let is_last = || HttpClient::open(service.gateway).ask("GET", "/", &[], "").headers["x-from"].clone();
    eventually("the last version is in use", is_last, |name| name == versions[RELOADS % 2].name);
}
