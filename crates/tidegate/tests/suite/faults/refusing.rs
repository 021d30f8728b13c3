//! A server that runs and refuses commands: out of memory, loading, read-only, without permission, out of connections,
//! or with a foreign value under our key.

use tidegate::{Check, CheckOptions, Demand, Key, Limit, OnFailure, Source, StoreErrorKind as Kind};
use tidegate_testkit::server::{Brand, Config, Connection, Server};

use super::node::Node;

/// Runs commands on a connection that was opened before the server refuses new ones.
fn run(connection: &mut Connection, commands: &[&[&str]]) {
    for command in commands {
        let reply = connection.call(command).unwrap();
        assert_eq!(reply.error(), None, "{command:?}");
    }
}

const CLOSE_OTHER_CONNECTIONS: &[&str] = &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"];

#[tokio::test]
async fn decisions_are_local_while_the_server_is_out_of_memory() {
    let server = Config::new(Brand::Redis).set("maxmemory-policy", "noeviction").start();
    let node = Node::new(server.url()).await;
    let full = || drop(server.command(&["CONFIG", "SET", "maxmemory", "1"]));
    let roomy = || drop(server.command(&["CONFIG", "SET", "maxmemory", "0"]));
    node.outlive("full", Kind::Unavailable, full, roomy).await;
}

#[tokio::test]
async fn decisions_are_local_while_the_server_loads() {
    // The server pauses for each key, and answers commands between two of them. It has loaded them all after 20 seconds,
    // or as soon as the pause is taken away.
    let slow = Config::new(Brand::Redis).set("key-load-delay", "2000").set("rdbcompression", "no");
    let server = slow.set("loading-process-events-interval-bytes", "1024").start();
    let node = Node::new(server.url()).await;
    let mut connection = server.connect().unwrap();
    for key in 0..10_000 {
        connection.call(&["SET", &key.to_string(), &format!("{key:0>1100}")]).unwrap();
    }
    let restart = || {
        run(&mut connection, &[&["SAVE"]]);
        server.restart_without_waiting();
    };
    let load_fast = || {
        let reply = server.command(&["CONFIG", "SET", "key-load-delay", "0"]);
        assert_eq!(reply.error(), None);
    };
    node.outlive("loading", Kind::Unavailable, restart, load_fast).await;
    assert_eq!(server.command(&["EXISTS", "9999"]).integer(), 1);
}

#[tokio::test]
async fn decisions_are_local_while_the_server_is_a_replica() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    // The master does not exist, but the server is a replica at once.
    let demote = || drop(server.command(&["REPLICAOF", "127.0.0.1", "1"]));
    let promote = || drop(server.command(&["REPLICAOF", "NO", "ONE"]));
    node.outlive("read-only", Kind::Unavailable, demote, promote).await;
}

#[tokio::test]
async fn decisions_are_local_while_the_server_requires_a_password() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    let before = node.ledger().await;
    let mut connection = server.connect().unwrap();
    run(&mut connection, &[&["CONFIG", "SET", "requirepass", "sesame"], CLOSE_OTHER_CONNECTIONS]);
    node.wait_until_failing(Kind::Forbidden).await;
    node.assert_local("locked").await;
    run(&mut connection, &[&["CONFIG", "SET", "requirepass", ""]]);
    node.wait_until_shared("unlocked").await;
    assert_eq!(node.ledger().await, before - 1);
}

#[tokio::test]
async fn decisions_are_local_while_the_acl_forbids_the_script() {
    let forbidden: [(&str, &[&str]); 4] = [
        ("no scripts", &["ACL", "SETUSER", "default", "-evalsha", "-eval"]),
        ("no reads", &["ACL", "SETUSER", "default", "-lindex", "-lrange", "-get"]),
        ("no writes", &["ACL", "SETUSER", "default", "-rpush", "-set"]),
        ("no keys of ours", &["ACL", "SETUSER", "default", "resetkeys", "~other:*"]),
    ];
    // Each brand has its own error messages.
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        let node = Node::new(server.url()).await;
        for (name, forbid) in forbidden {
            let allow = || drop(server.command(&["ACL", "SETUSER", "default", "on", "nopass", "allkeys", "+@all"]));
            node.outlive(name, Kind::Forbidden, || drop(server.command(forbid)), allow).await;
        }
    }
}

#[tokio::test]
async fn decisions_are_local_while_the_server_has_no_free_connection() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    let before = node.ledger().await;
    let mut connection = server.connect().unwrap();
    run(&mut connection, &[&["CONFIG", "SET", "maxclients", "1"], CLOSE_OTHER_CONNECTIONS]);
    node.wait_until_failing(Kind::Unavailable).await;
    node.assert_local("crowded").await;
    run(&mut connection, &[&["CONFIG", "SET", "maxclients", "100"]]);
    node.wait_until_shared("with a free connection").await;
    assert_eq!(node.ledger().await, before - 1);
}

#[tokio::test]
async fn foreign_value_makes_decisions_of_its_key_local_and_of_no_other() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    for (algorithm, plant) in [
        ("sliding", &["HSET", "field", "value"][..]),
        ("sliding-log", &["RPUSH", "not a time"]),
        ("sliding-counter", &["SADD", "member"]),
        ("fixed-window", &["SET", "hello"]),
        ("token-bucket", &["ZADD", "1", "member"]),
        ("leaky-bucket", &["SET", "1 2 3 4 5 6"]),
    ] {
        let key = format!("tidegate:tg2:{{foreign}}:{algorithm}:3600000000");
        let command: Vec<&str> = [&plant[..1], &[key.as_str()], &plant[1..]].concat();
        assert_eq!(server.command(&command).error(), None);
        let text = format!("5/h {algorithm}");
        for n in 0..20 {
            let decision = node.check(&text, "foreign").await;
            assert_eq!(decision.source, Source::Local, "{algorithm}, request {n}");
            let neighbour = node.check(&text, "neighbour").await.source;
            assert!(matches!(neighbour, Source::Store | Source::DenyCache), "{algorithm}, request {n}");
        }
        let limit: Limit = text.parse().unwrap();
        let demand = Demand::new(limit, Key::new("foreign").unwrap());
        let options = CheckOptions { on_failure: Some(OnFailure::Deny), ..CheckOptions::default() };
        let refused = node.limiter.check_with(&Check::one(&demand), options).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Foreign, "{algorithm}");
        server.command(&["DEL", &key]);
        assert_eq!(
            node.check(&text, "foreign").await.source,
            Source::Store,
            "{algorithm}: after the foreign value was deleted"
        );
    }
    assert_eq!(node.limiter.stats().breaker_opened, 0);
    assert_eq!(node.store.stats().panics, 0);
}

#[tokio::test]
async fn foreign_value_under_the_probe_key_does_not_prolong_an_outage() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    let plant = ["SET", "tidegate:tg2:{tidegate}:probe:bucket", "hello"];
    assert_eq!(server.command(&plant).error(), None);
    node.outlive("a planted probe", Kind::TimedOut, || server.stop(), || server.cont()).await;
    assert!(node.limiter.stats().breaker_opened >= 1);
}

#[tokio::test]
async fn foreign_value_fails_only_its_own_checks_of_a_batch() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    server.command(&["SET", "tidegate:tg2:{foreign}:sliding:3600000000", "hello"]);
    let demands = ["foreign", "full", "foreign", "full"]
        .map(|subject| Demand::new("1/h".parse().unwrap(), Key::new(subject).unwrap()));
    assert!(node.check("1/h", "full").await.allowed());
    let limiter = tidegate::Limiter::builder().store(std::sync::Arc::new(node.store.clone())).deny_cache(false);
    let limiter = limiter.deadline(std::time::Duration::from_secs(30)).build();
    let checks = demands.each_ref().map(Check::one);
    let decisions = limiter.check_batch(&checks, CheckOptions::default()).await;
    let decisions: Vec<_> =
        decisions.into_iter().map(|decision| decision.map(|it| (it.source, it.allowed())).unwrap()).collect();
    let (share, denied) = ((Source::Local, true), (Source::Store, false));
    assert_eq!(decisions, [share, denied, (Source::Local, false), denied]);
    let stats = limiter.stats();
    assert_eq!((stats.store_calls, stats.store_failures, stats.breaker_opened), (1, 0, 0));
}
