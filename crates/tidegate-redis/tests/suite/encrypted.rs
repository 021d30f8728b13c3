//! `rediss://`: TLS to a server whose certificate is trusted, with a client certificate, on one server, on a cluster and
//! with Sentinels. On Redis only: the Valkey of the tests is built without TLS.

use std::fs;
use std::path::Path;
use std::time::Duration;

use tidegate_core::{Check, Demand, Key, Limit, Store, StoreError, StoreErrorKind};
use tidegate_redis::{BuildError, RedisStore, RedisStoreBuilder, TlsOptions, TlsVersion};
use tidegate_testkit::certificates::{Authority, Identity};
use tidegate_testkit::poll::until;
use tidegate_testkit::server::{Brand, Cluster, Config, SentinelGroup, Server};

/// A call timeout that does not pass on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);
/// The names of a server: `localhost`, and the address that nodes of a cluster announce.
const NAMES: &[&str] = &["localhost", "127.0.0.1"];

fn builder(server: &Server, tls: TlsOptions) -> RedisStoreBuilder {
    RedisStore::builder(format!("rediss://localhost:{}", server.tls_port())).call_timeout(PATIENCE).tls(tls)
}

async fn decide(store: &RedisStore) -> Result<bool, StoreError> {
    let limit: Limit = "1000000/min".parse().unwrap();
    let demand = Demand::new(limit, Key::new("k").unwrap());
    store.decide(&[Check::one(&demand)]).await.map(|decisions| decisions[0].allowed())
}

/// Returns the error of a decision, which must say that the store cannot be reached.
async fn refusal(builder: RedisStoreBuilder) -> String {
    let error = decide(&builder.build().unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error}");
    error.to_string()
}

fn with_client(authority: &Authority) -> TlsOptions {
    let Identity { cert_file, key_file } = authority.issue(&["client"]);
    TlsOptions::new().ca_file(authority.file()).client_certificate(cert_file, key_file)
}

#[tokio::test]
async fn client_certificate_and_own_authority_are_used() {
    let authority = Authority::new();
    let server = Config::new(Brand::Redis).tls(&authority, &authority.issue(NAMES)).start();
    for version in [TlsVersion::Tls12, TlsVersion::Tls13] {
        let store = builder(&server, with_client(&authority).min_version(version)).build().unwrap();
        assert!(decide(&store).await.unwrap());
    }

    // Without one, in both versions: the server refuses during or after the handshake.
    let trusting = TlsOptions::new().ca_file(authority.file());
    let error = refusal(builder(&server, trusting.clone())).await;
    assert!(error.contains("client certificate"), "{error}");
    server.command(&["CONFIG", "SET", "tls-protocols", "TLSv1.2"]);
    let error = refusal(builder(&server, trusting)).await;
    assert!(error.contains("client certificate"), "{error}");
    // The server now has only TLS 1.2.
    let error = refusal(builder(&server, with_client(&authority).min_version(TlsVersion::Tls13))).await;
    assert!(error.contains("does not support the required version of TLS"), "{error}");
    assert!(decide(&builder(&server, with_client(&authority)).build().unwrap()).await.unwrap());

    // One of another authority.
    let other = Authority::new();
    let stranger = other.issue(&["client"]);
    server.command(&["CONFIG", "SET", "tls-protocols", "TLSv1.2 TLSv1.3"]);
    let error = refusal(builder(
        &server,
        TlsOptions::new().ca_file(authority.file()).client_certificate(stranger.cert_file, stranger.key_file),
    ))
    .await;
    assert!(error.contains("client certificate"), "{error}");
}

#[tokio::test]
async fn certificate_that_cannot_be_trusted_is_refused_with_its_reason() {
    let authority = Authority::new();
    let other = Authority::new();
    for (identity, trusted, expected) in [
        (authority.issue_expired(NAMES), &authority, "the server's certificate has expired"),
        (authority.issue(&["redis.example"]), &authority, "the server's certificate is not valid for localhost"),
        (
            authority.self_signed(NAMES),
            &authority,
            "self-signed, or issued by a certificate authority that is not trusted",
        ),
        (authority.issue(NAMES), &other, "self-signed, or issued by a certificate authority that is not trusted"),
    ] {
        let server = Config::new(Brand::Redis).tls(&authority, &identity).set("tls-auth-clients", "no").start();
        let error = refusal(builder(&server, TlsOptions::new().ca_file(trusted.file()))).await;
        let prefix =
            format!("cannot reach the store rediss://localhost:{}: the TLS handshake failed: ", server.tls_port());
        assert!(error.starts_with(&prefix) && error.contains(expected), "{error}");
    }
    // The system's authorities do not include this one, and the name may differ from the host.
    let server = Config::new(Brand::Redis)
        .tls(&authority, &authority.issue(&["redis.example"]))
        .set("tls-auth-clients", "no")
        .start();
    assert!(refusal(builder(&server, TlsOptions::new())).await.contains("not trusted"));
    let named = TlsOptions::new().server_name("redis.example");
    for trusting in [named.clone().ca_file(authority.file()), named] {
        let store = builder(&server, trusting).trust(authority.pem()).build().unwrap();
        assert!(decide(&store).await.unwrap());
    }
}

#[tokio::test]
async fn plain_connection_to_tls_and_tls_to_a_plain_port_are_named() {
    let authority = Authority::new();
    let server = Config::new(Brand::Redis).tls(&authority, &authority.issue(NAMES)).start();
    let to_tls_port = format!("redis://localhost:{}", server.tls_port());
    let error = refusal(RedisStore::builder(to_tls_port).call_timeout(PATIENCE)).await;
    assert!(error.contains("use rediss://"), "{error}");

    // The server waits for the end of a line, which a TLS handshake may or may not contain.
    let to_plain_port = format!("rediss://localhost:{}", server.port());
    let tls = TlsOptions::new().ca_file(authority.file());
    for _ in 0..5 {
        let builder = RedisStore::builder(&to_plain_port).call_timeout(Duration::from_millis(300)).tls(tls.clone());
        let error = refusal(builder).await;
        assert!(error.contains("is this a port without TLS (redis instead of rediss)?"), "{error}");
    }
}

#[tokio::test]
async fn files_that_cannot_be_used_are_build_errors_with_their_names() {
    let authority = Authority::new();
    let (one, two) = (authority.issue(NAMES), authority.issue(NAMES));
    let missing = one.cert_file.with_file_name("missing.pem");
    let name = |path: &Path| path.display().to_string();
    let options = TlsOptions::new;

    for (options, expected) in [
        (options().ca_file(&missing), format!("cannot read {}: no such file or directory", name(&missing))),
        (options().ca_file(&one.key_file), format!("{}: no certificate was found", name(&one.key_file))),
        (
            options().client_certificate(&one.cert_file, &two.key_file),
            format!(
                "the certificate in {} and the key in {} cannot be used together: the key does not belong to the certificate",
                name(&one.cert_file),
                name(&two.key_file)
            ),
        ),
        (
            options().client_certificate(&one.cert_file, &one.cert_file),
            format!("{} contains no private key", name(&one.cert_file)),
        ),
        (options().client_certificate(&missing, &one.key_file), format!("cannot read {}", name(&missing))),
        (options().server_name("not a name"), "neither a DNS name nor an IP address".to_owned()),
    ] {
        let error = RedisStore::builder("rediss://localhost").tls(options).build().unwrap_err();
        assert!(matches!(error, BuildError::Tls(_)), "{error}");
        assert!(error.to_string().contains(&expected), "{error}");
        assert!(!error.to_string().contains("-----END"), "{error}");
    }
    for pem in ["", "hello", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        let error = RedisStore::builder("rediss://localhost").trust(pem).build().unwrap_err();
        assert!(matches!(error, BuildError::Tls(_)), "{error}");
        assert!(error.to_string().contains("PEM"), "{error}");
    }
}

/// The store is not notified of a change: it reads the files when it connects.
#[tokio::test]
async fn changed_files_are_used_at_the_next_connect_and_broken_ones_are_not() {
    let authority = Authority::new();
    let server = Config::new(Brand::Redis).tls(&authority, &authority.issue(NAMES)).start();
    let dir = tempfile::tempdir().unwrap();
    let (cert, key) = (dir.path().join("client.pem"), dir.path().join("client.key"));
    let install = |identity: &Identity| {
        fs::copy(&identity.cert_file, &cert).unwrap();
        fs::copy(&identity.key_file, &key).unwrap();
    };
    // At first a certificate that the server does not accept.
    install(&Authority::new().issue(&["client"]));
    let options = TlsOptions::new().ca_file(authority.file()).client_certificate(&cert, &key);
    let store = builder(&server, options).build().unwrap();
    assert!(decide(&store).await.unwrap_err().to_string().contains("client certificate"));
    install(&authority.issue(&["client"]));
    eventually_decides(&store).await;

    // A key that does not match, and a missing file: the previous pair stays in use.
    fs::copy(authority.issue(&["client"]).key_file, &key).unwrap();
    for _ in 0..2 {
        let connects = store.stats().connects;
        server.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        until("the store has connected again", || store.stats().connects > connects).await;
        eventually_decides(&store).await;
        let _ = fs::remove_file(&cert);
    }
}

async fn eventually_decides(store: &RedisStore) {
    for _ in 0..3_000 {
        if decide(store).await.is_ok_and(|is_allowed| is_allowed) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{:?}", decide(store).await);
}

#[tokio::test]
async fn cluster_is_used_with_tls_and_client_certificates() {
    let authority = Authority::new();
    let cluster = Cluster::with(&Config::new(Brand::Redis).tls(&authority, &authority.issue(NAMES)));
    let builder = |tls| RedisStore::builder(cluster.tls_url()).call_timeout(PATIENCE).tls(tls);
    let store = builder(with_client(&authority)).build().unwrap();
    let limit: Limit = "1/h".parse().unwrap();
    for subject in 0..30 {
        let subject = format!("user:{subject}");
        let demand = Demand::new(limit, Key::new(&subject).unwrap());
        assert!(store.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());
        assert!(!store.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());
    }
    assert_eq!(store.stats().redirections, 0);
    assert_eq!(store.shards().len(), 3);
    assert!(store.shards().iter().all(|shard| shard.address.as_deref().unwrap().starts_with("rediss://127.0.0.1:")));

    let error = refusal(builder(TlsOptions::new().ca_file(authority.file()))).await;
    assert!(error.contains("client certificate"), "{error}");
    let other = Authority::new();
    let error = refusal(builder(with_client(&other))).await;
    assert!(error.contains("not trusted"), "{error}");
}

#[tokio::test]
async fn sentinels_and_their_master_are_used_with_tls_and_client_certificates() {
    let authority = Authority::new();
    let group = SentinelGroup::with(&Config::new(Brand::Redis).tls(&authority, &authority.issue(NAMES)), 1, None);
    let [first, second] = [0, 1].map(|index| format!("rediss://127.0.0.1:{}", group.servers()[index].tls_port()));
    let builder = |tls| RedisStore::builder(group.tls_url()).call_timeout(PATIENCE).tls(tls);
    let store = builder(with_client(&authority)).build().unwrap();
    assert!(decide(&store).await.unwrap());
    assert_eq!(store.shards()[0].address.as_deref(), Some(first.as_str()));
    group.fail_over();
    until("the store uses the new master", || store.shards()[0].address.as_deref() == Some(second.as_str())).await;
    eventually_decides(&store).await;

    let sentinel = format!("Sentinel 127.0.0.1:{}: ", group.sentinels()[0].tls_port());
    for (tls, expected) in [
        (TlsOptions::new().ca_file(authority.file()), "client certificate"),
        (with_client(&Authority::new()), "not trusted"),
    ] {
        let error = refusal(builder(tls)).await;
        assert!(error.contains(&sentinel) && error.contains(expected), "{error}");
    }
    let plain_to_tls = RedisStore::builder(group.tls_url().replace("rediss", "redis")).call_timeout(PATIENCE);
    let error = refusal(plain_to_tls).await;
    assert!(error.contains(&sentinel) && error.contains("use rediss+sentinel://"), "{error}");
    let tls_to_plain = RedisStore::builder(group.url().replace("redis", "rediss")).tls(with_client(&authority));
    let error = refusal(tls_to_plain.call_timeout(Duration::from_millis(300))).await;
    assert!(error.contains("is this a port without TLS (redis instead of rediss)?"), "{error}");
}
