//! Rules and certificate are reloaded independently: neither keeps the other from being used.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidegate::Limiter;
use tidegate::config::Loader;
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::rules::RequestView;
use tidegate_server::{Listeners, ReloadError, Reloader, ServerOptions, Tls, run};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

fn rules(quota: u32) -> String {
    format!("[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"{quota}/h\"]\n")
}

struct Service {
    dir: tempfile::TempDir,
    reloader: Reloader,
    engine: Engine,
    address: std::net::SocketAddr,
}

impl Service {
    async fn start() -> Service {
        let dir = tempfile::tempdir().unwrap();
        write_certificate(dir.path());
        let file = dir.path().join("tidegate.toml");
        std::fs::write(&file, rules(2)).unwrap();
        let loaded = Loader::new().load(&file).unwrap();
        let engine = Engine::new(Limiter::memory(), loaded.rules.clone());
        let tls = Tls::read(&dir.path().join("cert.pem"), &dir.path().join("key.pem")).unwrap();
        let reloader = Reloader::rules(&file, Loader::new(), loaded, engine.clone()).tls(tls.clone());
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let options = ServerOptions::new(Limiter::memory()).tls(tls);
        tokio::spawn(run(Listeners::default().http(socket), options, std::future::pending()));
        Service { dir, reloader, engine, address }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns whether a client that trusts only the certificate in the file can connect.
    async fn presents_certificate_in_file(&self) -> bool {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.file("cert.pem")).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.address).await.unwrap();
        TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), stream).await.is_ok()
    }

    /// Returns the quota of the rules in force.
    async fn quota(&self, peer: [u8; 4]) -> u32 {
        let request = http::Request::get("/").body(()).unwrap();
        match self.engine.check(&RequestView::of(&request), peer.into(), RequestOptions::default()).await {
            Outcome::Admitted(permit) => permit.decision().unwrap().limits[0].quota,
            other => panic!("{other:?}"),
        }
    }
}

fn write_certificate(dir: &Path) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(dir.join("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(dir.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
}

#[tokio::test]
async fn a_renewed_certificate_is_used_although_the_rules_are_broken() {
    let service = Service::start().await;
    assert!(service.presents_certificate_in_file().await);
    std::fs::write(service.file("tidegate.toml"), "[[rules]]\nname = 3\n").unwrap();
    write_certificate(service.dir.path());
    assert!(!service.presents_certificate_in_file().await, "before the reload");
    let error = service.reloader.reload().await.unwrap_err();
    assert!(matches!(*error, ReloadError::Configuration(_)), "{error}");
    assert!(service.presents_certificate_in_file().await, "the new certificate");
    assert_eq!(service.quota([203, 0, 113, 1]).await, 2, "the old rules");
}

#[tokio::test]
async fn new_rules_are_used_although_the_certificate_is_broken() {
    let service = Service::start().await;
    std::fs::write(service.file("tidegate.toml"), rules(3)).unwrap();
    let certificate = std::fs::read(service.file("cert.pem")).unwrap();
    std::fs::write(service.file("cert.pem"), "half a certificate").unwrap();
    let error = service.reloader.reload().await.unwrap_err();
    assert!(matches!(*error, ReloadError::Tls(_)), "{error}");
    assert_eq!(service.quota([203, 0, 113, 2]).await, 3, "the new rules");

    std::fs::write(service.file("tidegate.toml"), "[[rules]]\nname = 3\n").unwrap();
    let error = service.reloader.reload().await.unwrap_err();
    assert!(matches!(*error, ReloadError::ConfigurationAndTls { .. }), "{error}");
    assert!(error.to_string().contains("cert.pem"), "{error}");
    std::fs::write(service.file("cert.pem"), certificate).unwrap();
    assert!(service.presents_certificate_in_file().await, "the old certificate");
    assert_eq!(service.quota([203, 0, 113, 3]).await, 3, "the rules of the last reload that could use them");
}
