//! `rediss://`: TLS to a server whose certificate is trusted.

use std::net::TcpListener;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tollgate_core::{Check, Demand, Key, Limit, Store, StoreErrorKind};
use tollgate_redis::{BuildError, RedisStore};
use tollgate_testkit::server::{Brand, Config};

/// A call timeout that does not pass on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

#[tokio::test]
async fn server_is_used_only_if_its_certificate_is_trusted() {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["localhost".into()]).unwrap().signed_by(&key, &authority).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let _server = Config::new(Brand::Redis)
        .set("tls-port", &port.to_string())
        .set("tls-cert-file", &file("server.pem", certificate.pem()))
        .set("tls-key-file", &file("server.key", key.serialize_pem()))
        .set("tls-ca-cert-file", &file("authority.pem", authority.pem()))
        .set("tls-auth-clients", "no")
        .start();

    let limit: Limit = "5/min".parse().unwrap();
    let demand = Demand::new(limit, Key::new("k").unwrap());
    let url = format!("rediss://localhost:{port}");
    let trusting = RedisStore::builder(&url).call_timeout(PATIENCE).trust(authority.pem()).build().unwrap();
    assert!(trusting.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());

    let wary = RedisStore::builder(&url).call_timeout(PATIENCE).build().unwrap();
    let error = wary.decide(&[Check::one(&demand)]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable);
    assert!(error.to_string().contains("certificate"), "{error}");

    let by_address = RedisStore::builder(format!("rediss://127.0.0.1:{port}"))
        .call_timeout(PATIENCE)
        .trust(authority.pem())
        .build()
        .unwrap();
    let error = by_address.decide(&[Check::one(&demand)]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "the certificate is for another name");
}

#[tokio::test]
async fn invalid_certificate_is_a_build_error() {
    for pem in ["", "hello", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        let error = RedisStore::builder("rediss://localhost").trust(pem).build().unwrap_err();
        assert!(matches!(error, BuildError::Tls(_)), "{error}");
        assert!(error.to_string().contains("PEM"), "{error}");
    }
}
