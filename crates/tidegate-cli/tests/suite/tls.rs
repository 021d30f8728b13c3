//! Listeners with TLS, used by curl, redis-cli and openssl.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use tidegate_testkit::program::{PATIENCE, Serving, command};

struct Authority {
    dir: tempfile::TempDir,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    fn new() -> Authority {
        let dir = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, "an authority for tests");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        std::fs::write(dir.path().join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Authority { dir, issuer: rcgen::Issuer::new(params, key) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a certificate for 127.0.0.1 with this serial number, and its key, to `cert.pem` and `key.pem`.
    fn issue(&self, serial: u8) {
        let (certificate, key) = self.pair(serial);
        // The key first, so that a reload in between finds a pair that does not match, and keeps the old one.
        replace(&self.path("key.pem"), &key);
        replace(&self.path("cert.pem"), &certificate);
    }

    /// Creates a certificate for 127.0.0.1 with this serial number, and its key, both in PEM.
    fn pair(&self, serial: u8) -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, "a listener");
        params.serial_number = Some(vec![serial].into());
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    fn serve(&self, more: &[&str]) -> Serving {
        let (certificate, key) = (self.path("cert.pem"), self.path("key.pem"));
        let files = ["--tls-cert", certificate.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
        Serving::start(&[&files, more].concat())
    }
}

fn replace(file: &Path, text: &str) {
    let draft = file.with_extension("draft");
    std::fs::write(&draft, text).unwrap();
    std::fs::rename(draft, file).unwrap();
}

fn said(command: &mut Command) -> (bool, String) {
    let output = command.output().expect("it is installed by scripts/setup.sh");
    (
        output.status.success(),
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr),
    )
}

fn curl(authority: &Authority, address: &str, more: &[&str]) -> (bool, String) {
    let question = r#"{"key":"user:42","limit":"10/h"}"#;
    let url = format!("https://{address}/v1/check");
    said(
        Command::new("curl")
            .args(["-sS", "-v", "--cacert"])
            .arg(authority.path("ca.pem"))
            .args(["-d", question, &url])
            .args(more),
    )
}

/// Returns the certificate that the HTTP listener presents, in PEM.
fn shown(serving: &Serving) -> String {
    let connection = said(
        Command::new("openssl")
            .args(["s_client", "-connect", &serving.http, "-showcerts"])
            .stdin(std::process::Stdio::null()),
    )
    .1;
    let begin = connection.find("-----BEGIN CERTIFICATE-----").expect("a certificate is shown");
    let end = connection[begin..].find("-----END CERTIFICATE-----").unwrap();
    connection[begin..begin + end].to_owned()
}

#[test]
fn curl_and_redis_cli_are_served_over_tls_only() {
    let authority = Authority::new();
    authority.issue(1);
    let serving = authority.serve(&[]);
    let (ok, text) = curl(&authority, &serving.http, &[]);
    assert!(ok && text.contains(r#""remaining":9"#), "{text}");
    let (ok, text) = curl(&authority, &serving.http, &["--cacert", "/dev/null"]);
    assert!(!ok, "a client that does not trust the authority accepted the certificate: {text}");

    let (host, port) = serving.resp.split_once(':').unwrap();
    let mut redis_cli = Command::new("redis-cli");
    redis_cli.args(["-h", host, "-p", port, "--tls", "--cacert"]).arg(authority.path("ca.pem"));
    let (ok, text) = said(redis_cli.args(["TIDEGATE.PEEK", "user:42", "10/h"]));
    assert!(ok && text.starts_with("1\n10\n9\n"), "{text}");

    let (ok, _) = said(Command::new("curl").args(["-sS", "-d", "{}", &format!("http://{}/v1/check", serving.http)]));
    assert!(!ok, "a request without TLS is not answered");
    assert_eq!(serving.visit("/healthz").status, 200, "the admin listener on loopback is not encrypted");
}

#[test]
fn an_admin_listener_that_other_machines_can_reach_is_encrypted() {
    let authority = Authority::new();
    authority.issue(1);
    let serving = authority.serve(&["--admin", "0.0.0.0:0"]);
    let address = serving.admin.replace("0.0.0.0", "127.0.0.1");
    let (ok, text) = said(
        Command::new("curl")
            .args(["-sS", "--cacert"])
            .arg(authority.path("ca.pem"))
            .arg(format!("https://{address}/healthz")),
    );
    assert!(ok && text.contains("alive"), "{text}");
    let (ok, _) = said(Command::new("curl").args(["-sS", &format!("http://{address}/healthz")]));
    assert!(!ok);
}

#[test]
fn a_renewed_certificate_is_used_and_a_broken_one_is_not() {
    let authority = Authority::new();
    authority.issue(1);
    let serving = authority.serve(&[]);
    let first = shown(&serving);
    replace(&authority.path("cert.pem"), "no certificate");
    let told = serving.until("/readyz", |answer| answer.body.contains("\"failed\""));
    assert!(told.body.contains("contains no certificate"), "{told:?}");
    assert_eq!(shown(&serving), first);
    authority.issue(2);
    serving.until("/readyz", |answer| answer.body.contains("\"ok\""));
    assert_ne!(shown(&serving), first);
    assert!(curl(&authority, &serving.http, &[]).0);
}

/// Each step leaves files that cannot be used: half a certificate, half a key, a pair that does not match.
#[test]
fn the_old_pair_is_used_while_certificate_and_key_are_replaced() {
    let authority = Authority::new();
    authority.issue(1);
    let serving = authority.serve(&[]);
    let first = shown(&serving);
    let (certificate, key) = authority.pair(2);
    let steps = [
        ("cert.pem", &certificate[..certificate.len() / 2], "contains no certificate"),
        ("cert.pem", &certificate[..], "cannot be used together"),
        ("key.pem", &key[..key.len() / 2], "contains no private key"),
        ("key.pem", "", "contains no private key"),
    ];
    for (file, text, phrase) in steps {
        std::fs::write(authority.path(file), text).unwrap();
        serving.until("/readyz", |answer| answer.body.contains(phrase));
        assert_eq!(shown(&serving), first, "{phrase}");
        assert_eq!(serving.operate("POST", "/v1/reload").status, 422);
    }
    assert!(serving.visit("/metrics").body.contains("tidegate_reload_failed 1\n"));
    std::fs::write(authority.path("key.pem"), &key).unwrap();
    serving.until("/readyz", |answer| answer.body.contains("\"ok\""));
    assert_ne!(shown(&serving), first);
    assert!(curl(&authority, &serving.http, &[]).0);
}

/// A chain that is cut off between two certificates can be used. A warning says that it is shorter.
#[test]
fn a_chain_that_lost_a_certificate_is_reported() {
    let authority = Authority::new();
    authority.issue(1);
    let leaf = std::fs::read_to_string(authority.path("cert.pem")).unwrap();
    let chain = leaf.clone() + &std::fs::read_to_string(authority.path("ca.pem")).unwrap();
    replace(&authority.path("cert.pem"), &chain);
    let serving = authority.serve(&[]);
    replace(&authority.path("cert.pem"), &leaf);
    serving.wait_for_log("the certificate chain is shorter than before");
    serving.until("/metrics", |answer| answer.body.contains("tidegate_reload_removed_total{kind=\"certificate\"} 1\n"));
}

#[test]
fn unusable_tls_files_are_named_before_anything_is_served() {
    let authority = Authority::new();
    authority.issue(1);
    let other = Authority::new();
    other.issue(2);
    let (certificate, key, absent) = (authority.path("cert.pem"), authority.path("key.pem"), authority.path("absent"));
    for (certificate, key, phrase) in [
        (&absent, &key, "absent: no such file or directory"),
        (&key, &key, "key.pem contains no certificate"),
        (&certificate, &certificate, "cert.pem contains no private key"),
        (&certificate, &other.path("key.pem"), "cannot be used together"),
    ] {
        let mut serve = command();
        serve.args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--admin", "off", "--tls-cert"]);
        let output = serve.arg(certificate).arg("--tls-key").arg(key).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(phrase), "{phrase}: {said}");
        assert!(!said.contains("BEGIN EC") && !said.contains("MIG"), "{said}");
    }
    let output = command().args(["serve", "--tls-cert", "x.pem"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "--tls-cert requires --tls-key");
}

#[test]
fn a_connection_without_a_tls_hello_is_closed_after_the_handshake_timeout() {
    let authority = Authority::new();
    authority.issue(1);
    let serving = authority.serve(&["--connections", "2"]);
    let silent: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(&serving.http).unwrap()).collect();
    serving.until("/metrics", |answer| answer.body.contains("tidegate_connections{listener=\"http\"} 2\n"));
    assert!(!curl(&authority, &serving.http, &[]).0, "the listener is at its connection limit");
    // The silent connections are closed after the handshake timeout, and others are accepted again.
    assert!(PATIENCE.as_secs() > 10);
    serving.until("/metrics", |answer| answer.body.contains("tidegate_connections{listener=\"http\"} 0\n"));
    assert!(curl(&authority, &serving.http, &[]).0);
    drop(silent);
}
