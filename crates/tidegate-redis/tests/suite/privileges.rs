//! Users with few permissions, and credentials in files.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tidegate_core::{
    Check, Demand, InstanceId, Key, Limit, ReceiptId, Redemption, Store, StoreErrorKind as Kind, Timestamp,
};
use tidegate_redis::{BuildError, CredentialSource, RedisStore, acl_rules};
use tidegate_testkit::server::{Brand, Cluster, Config, Server};

const PASSWORD: &str = "hunter2";
const PATIENCE: Duration = Duration::from_secs(10);

fn rules() -> String {
    acl_rules("tidegate", Some("plans"), Some("keys")).unwrap()
}

/// Starts a server with the user `tidegate`, which has these rules, and without a default user.
fn server(brand: Brand, rules: &str) -> Server {
    Config::new(brand).only_user("tidegate", PASSWORD, rules).start()
}

fn store(server: &Server) -> RedisStore {
    let url = format!("redis://tidegate:{PASSWORD}@{}", server.addr());
    RedisStore::builder(url).call_timeout(PATIENCE).bans(true).build().unwrap()
}

async fn decide(store: &RedisStore, limit: &str) -> Result<bool, tidegate_core::StoreError> {
    let limit: Limit = limit.parse().unwrap();
    let demand = Demand::new(limit, Key::new("k").unwrap());
    store.decide(&[Check::one(&demand)]).await.map(|decisions| decisions[0].allowed())
}

#[tokio::test]
async fn minimal_user_may_do_what_the_store_does_and_nothing_else() {
    for brand in Brand::ALL {
        let server = server(brand, &rules());
        server.command(&["HSET", "plans", "user:1", "pro"]);
        let store = store(&server);
        let report = store.check_server().await.unwrap();
        assert_eq!(report.warnings, Vec::<String>::new());
        assert_eq!(store.eviction().await.unwrap().policy.as_deref(), Some("noeviction"));
        let limit: Limit = "5/h".parse().unwrap();
        let demand = Demand::new(limit, Key::new("k").unwrap());
        let check = Check::one(&demand);
        let decision = store.decide(&[check]).await.unwrap().remove(0);
        store.refund(&check, &decision).await.unwrap();
        let until = Timestamp::from_micros(decision.at.as_micros() + 60_000_000);
        let mut redemption = Redemption::new(ReceiptId::from_bytes([7; 16]), b"k", until);
        redemption.charge = Some(check);
        let _redeemed = store.redeem(&redemption).await.unwrap();
        store.inspect(&demand).await.unwrap();
        store.ban(b"k", Some(Duration::from_secs(60))).await.unwrap();
        assert!(store.decide(&[check]).await.unwrap()[0].ban.is_some());
        assert!(store.ban_of(b"k").await.unwrap().is_some());
        assert!(store.unban(b"k").await.unwrap());
        store.reset(&demand).await.unwrap();
        store.probe(store.shards()[0].id).await.unwrap();
        let id = InstanceId::new(7);
        assert_eq!(store.announce(id, PATIENCE).await.unwrap().unwrap().count, 1);
        store.withdraw(id).await.unwrap();
        assert_eq!(store.command(&["HGET", "plans", "user:1"]).await.unwrap().as_text(), Some("pro"));

        server.command(&["HSET", "keys", "api_key:1", "{}"]);
        assert!(store.replace_hash_field("keys", "api_key:1", b"{}", b"[]").await.unwrap());
        assert!(!store.replace_hash_field("keys", "api_key:1", b"{}", b"{}").await.unwrap());
        let scanned = store.command(&["HSCAN", "keys", "0", "COUNT", "10"]).await.unwrap();
        assert!(format!("{scanned:?}").contains("List"), "{scanned:?}");

        for (command, expected) in [
            (&["FLUSHALL"][..], "may not run FLUSHALL"),
            (&["CONFIG", "GET", "requirepass"], "may not run CONFIG GET"),
            (&["KEYS", "*"], "may not run KEYS"),
            (&["GET", "other"], "~tidegate:tg2:*"),
            (&["SET", "plans", "x"], "may not access a key"),
            (&["HSET", "plans", "user:1", "x"], "may not access a key"),
        ] {
            let error = store.command(command).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Forbidden);
            assert!(error.to_string().contains(expected), "{brand}: {error}");
        }
        assert_eq!(store.stats().connects, 1);
    }
}

#[tokio::test]
async fn user_with_a_database_of_its_own_may_select_it() {
    let server = server(Brand::Redis, &rules());
    let url = format!("redis://tidegate:{PASSWORD}@{}/3", server.addr());
    let store = RedisStore::builder(url).call_timeout(PATIENCE).build().unwrap();
    assert!(decide(&store, "1/h").await.unwrap());
}

/// Removes every command of the rules, except those that are only used for reports, on both servers.
#[tokio::test]
async fn missing_command_or_key_pattern_is_named() {
    for brand in Brand::ALL {
        for (change, limit, expected) in [
            ("-evalsha", "5/h", "may not run EVALSHA"),
            ("-script|load", "5/h", "may not run SCRIPT LOAD"),
            ("-time", "5/h", "may not run TIME"),
            ("-rpush", "5/h", "may not run RPUSH"),
            ("-pexpireat", "5/h", "may not run PEXPIREAT"),
            ("-set", "5/h token-bucket", "may not run SET"),
            ("-get", "5/h token-bucket", "GET"),
            ("-lindex", "5/h", "LINDEX"),
            ("-pttl", "5/h", "PTTL"),
            ("resetkeys ~other:*", "5/h", "the keys of the store need the rule ~tidegate:tg2:*"),
        ] {
            let server = server(brand, &format!("{} {change}", rules()));
            let error = decide(&store(&server), limit).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Forbidden, "{brand} {change}");
            assert!(error.to_string().contains(expected), "{brand} {change}: {error}");
            assert!(error.to_string().contains("tidegate script --acl"), "{error}");
            assert!(!error.to_string().contains(PASSWORD), "{error}");
        }
    }
}

#[tokio::test]
async fn missing_command_for_the_instances_is_named() {
    for brand in Brand::ALL {
        for (change, expected) in [
            ("-eval", "may not run EVAL"),
            ("-zscore", "ZSCORE"),
            ("-zadd", "may not run ZADD"),
            ("-zrangebyscore", "may not run ZRANGEBYSCORE"),
            ("-zremrangebyscore", "may not run ZREMRANGEBYSCORE"),
            ("-zcard", "may not run ZCARD"),
            ("-pexpire", "may not run PEXPIRE"),
        ] {
            let server = server(brand, &format!("{} {change}", rules()));
            let error = store(&server).announce(InstanceId::new(7), PATIENCE).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Forbidden, "{brand} {change}");
            assert!(error.to_string().contains(expected), "{brand} {change}: {error}");
        }
    }
}

#[tokio::test]
async fn permissions_for_reports_may_be_dropped() {
    let server =
        server(Brand::Redis, &format!("{} -role -client|setname -info -select -cluster|slots -asking -wait", rules()));
    let store = store(&server);
    assert!(decide(&store, "1/h").await.unwrap());
    let error = store.check_server().await.unwrap_err().to_string();
    assert!(error.contains("may not run INFO"), "{error}");
}

#[tokio::test]
async fn minimal_user_of_a_cluster_finds_its_nodes_and_follows_redirections() {
    let brand = Brand::Redis;
    let cluster = Cluster::with(&Config::new(brand).only_user("tidegate", PASSWORD, &rules()));
    let url = cluster.url().replace("://", &format!("://tidegate:{PASSWORD}@"));
    let builder = || RedisStore::builder(&url).call_timeout(PATIENCE);
    let store = builder().build().unwrap();
    assert!(decide(&store, "1/h").await.unwrap());
    assert_eq!(store.check_server().await.unwrap().warnings, Vec::<String>::new());
    // A new counter in a slot that is being moved is created on the target, after ASKING.
    let slot = cluster.slot_of("{asked}");
    let source = cluster.owner_of(slot);
    let target = cluster.masters().into_iter().find(|node| node.port() != source.port()).unwrap();
    cluster.begin_move(slot, target);
    let demand = Demand::new("1/h".parse().unwrap(), Key::new("asked").unwrap());
    assert!(store.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());
    assert!(store.stats().redirections > 0);

    for node in cluster.nodes() {
        node.command(&["ACL", "SETUSER", "tidegate", "-cluster|slots"]);
    }
    let error = decide(&builder().build().unwrap(), "1/h").await.unwrap_err();
    assert!(error.to_string().contains("may not run CLUSTER SLOTS"), "{error}");
}

/// Returns a directory, and files for the user and the password in it.
fn files(user: &str, password: &str) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (user_file, password_file) = (dir.path().join("user"), dir.path().join("password"));
    fs::write(&user_file, user).unwrap();
    fs::write(&password_file, password).unwrap();
    (dir, user_file, password_file)
}

#[tokio::test]
async fn rotated_password_is_used_without_a_restart() {
    let server = server(Brand::Redis, &rules());
    let (_dir, user, password) = files("tidegate\n", "first\r\n");
    server.command(&["ACL", "SETUSER", "tidegate", "resetpass", ">first"]);
    let builder = RedisStore::builder(server.url()).call_timeout(PATIENCE);
    let builder =
        builder.username_from(CredentialSource::File(user)).password_from(CredentialSource::File(password.clone()));
    assert!(!format!("{builder:?}").contains("first"));
    let store = builder.build().unwrap();
    assert!(decide(&store, "1000/h").await.unwrap());

    server.command(&["ACL", "SETUSER", "tidegate", "resetpass", ">second"]);
    server.command(&["CLIENT", "KILL", "USER", "tidegate"]);
    let rejected = loop {
        // A call that was in flight, or one on the next connection.
        match decide(&store, "1000/h").await {
            Err(error) if error.kind() == Kind::Forbidden => break error.to_string(),
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    assert!(rejected.ends_with("the server rejects the user or the password"), "{rejected}");
    fs::write(&password, "").unwrap();
    let unreadable = loop {
        match decide(&store, "1000/h").await.unwrap_err().to_string() {
            error if error.contains("cannot read") => break error,
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    assert!(unreadable.contains(&format!("the password of the store from {}: it is empty", password.display())));
    fs::write(&password, "second").unwrap();
    while decide(&store, "1000/h").await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn credentials_that_cannot_be_read_are_build_errors() {
    let (dir, user, password) = files("tidegate", "\n");
    let missing = CredentialSource::File(dir.path().join("missing"));
    let unset = CredentialSource::Env("TIDEGATE_TEST_VARIABLE_THAT_IS_NOT_SET".into());
    let builder = || RedisStore::builder("redis://localhost");
    for (builder, expected) in [
        (builder().password_from(missing), "missing: no such file or directory"),
        (builder().password_from(CredentialSource::File(password)), "password: it is empty"),
        (builder().password_from(unset), "from $TIDEGATE_TEST_VARIABLE_THAT_IS_NOT_SET: it is not set"),
        (builder().username_from(CredentialSource::File(user)), "a user name is set for the store, but no password"),
    ] {
        let error = builder.build().unwrap_err();
        assert!(matches!(error, BuildError::Credentials(_)), "{error:?}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}
