//! A server that is there and says no: full, loading, read-only, locked, crowded, or holding something else.

use tollgate::{Check, CheckOptions, Demand, Key, Limit, OnFailure, Source, StoreErrorKind as Kind};
use tollgate_testkit::server::{Brand, Config, Connection, Server};

use super::node::Node;

/// Says something on a connection that was made before the door was shut.
fn say(connection: &mut Connection, commands: &[&[&str]]) {
    for command in commands {
        let reply = connection.call(command).unwrap();
        assert_eq!(reply.error(), None, "{command:?}");
    }
}

const KICK_THE_OTHERS_OUT: &[&str] = &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"];

#[tokio::test]
async fn a_full_server_makes_admissions_local_until_it_has_room() {
    let server = Config::new(Brand::Redis).set("maxmemory-policy", "noeviction").start();
    let node = Node::new(server.url()).await;
    let full = || drop(server.command(&["CONFIG", "SET", "maxmemory", "1"]));
    let roomy = || drop(server.command(&["CONFIG", "SET", "maxmemory", "0"]));
    node.outlive("full", Kind::Unavailable, full, roomy).await;
}

#[tokio::test]
async fn a_loading_server_is_answered_for_until_it_has_loaded() {
    // A pause for each key: long enough to be met loading, short enough to be waited for.
    let slow = Config::new(Brand::Redis).set("key-load-delay", "2000");
    let server = slow.set("loading-process-events-interval-bytes", "1024").start();
    let node = Node::new(server.url()).await;
    let mut connection = server.connect().unwrap();
    for key in 0..500 {
        connection.call(&["SET", &key.to_string(), &format!("{key:0>100}")]).unwrap();
    }
    let restart = || {
        say(&mut connection, &[&["SAVE"]]);
        server.restart_without_waiting();
    };
    // It heals by itself.
    node.outlive("loading", Kind::Unavailable, restart, || ()).await;
    assert_eq!(server.command(&["EXISTS", "499"]).integer(), 1);
}

#[tokio::test]
async fn a_read_only_server_is_answered_for_until_it_is_promoted() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    // Of a master that nobody has, but it is a replica at once. Port 1 answers nothing here.
    let demote = || drop(server.command(&["REPLICAOF", "127.0.0.1", "1"]));
    let promote = || drop(server.command(&["REPLICAOF", "NO", "ONE"]));
    node.outlive("read-only", Kind::Unavailable, demote, promote).await;
}

#[tokio::test]
async fn a_server_that_wants_a_password_is_answered_for_until_it_does_not() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    let before = node.ledger().await;
    let mut insider = server.connect().unwrap();
    say(&mut insider, &[&["CONFIG", "SET", "requirepass", "sesame"], KICK_THE_OTHERS_OUT]);
    node.wait_until_failing(Kind::Forbidden).await;
    node.assert_local("locked").await;
    say(&mut insider, &[&["CONFIG", "SET", "requirepass", ""]]);
    node.wait_until_shared("unlocked").await;
    assert_eq!(node.ledger().await, before - 1);
}

#[tokio::test]
async fn a_user_who_may_not_do_what_the_script_does_is_answered_for() {
    let forbidden: [(&str, &[&str]); 4] = [
        ("no scripts", &["ACL", "SETUSER", "default", "-evalsha", "-eval"]),
        ("no reads", &["ACL", "SETUSER", "default", "-lindex", "-lrange", "-get"]),
        ("no writes", &["ACL", "SETUSER", "default", "-rpush", "-set"]),
        ("no keys of ours", &["ACL", "SETUSER", "default", "resetkeys", "~other:*"]),
    ];
    // Each has its own words for it.
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
async fn a_server_without_a_free_connection_is_answered_for_until_it_has_one() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    let before = node.ledger().await;
    let mut guest = server.connect().unwrap();
    say(&mut guest, &[&["CONFIG", "SET", "maxclients", "1"], KICK_THE_OTHERS_OUT]);
    node.wait_until_failing(Kind::Unavailable).await;
    node.assert_local("crowded").await;
    say(&mut guest, &[&["CONFIG", "SET", "maxclients", "100"]]);
    node.wait_until_shared("with room for us").await;
    assert_eq!(node.ledger().await, before - 1);
}

#[tokio::test]
async fn something_else_under_our_key_degrades_that_key_alone() {
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
        let key = format!("tollgate:tg2:{{stranger}}:{algorithm}:3600000000");
        let command: Vec<&str> = [&plant[..1], &[key.as_str()], &plant[1..]].concat();
        assert_eq!(server.command(&command).error(), None);
        let text = format!("5/h {algorithm}");
        for n in 0..20 {
            let decision = node.ask(&text, "stranger").await;
            assert_eq!(decision.source, Source::Local, "{algorithm}, request {n}");
            let neighbour = node.ask(&text, "neighbour").await.source;
            assert!(matches!(neighbour, Source::Store | Source::DenyCache), "{algorithm}, request {n}");
        }
        let limit: Limit = text.parse().unwrap();
        let demand = Demand::new(limit, Key::new("stranger").unwrap());
        let options = CheckOptions { on_failure: Some(OnFailure::Deny), ..CheckOptions::default() };
        let refused = node.limiter.check_with(&Check::one(&demand), options).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Foreign, "{algorithm}");
        server.command(&["DEL", &key]);
        assert_eq!(node.ask(&text, "stranger").await.source, Source::Store, "{algorithm}: once it has gone");
    }
    assert_eq!(node.limiter.stats().breaker_opened, 0);
    assert_eq!(node.store.stats().panics, 0);
}

#[tokio::test]
async fn something_else_under_the_key_of_the_probe_does_not_prolong_an_outage() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    let plant = ["SET", "tollgate:tg2:{tollgate-probe}:token-bucket:1000000", "hello"];
    assert_eq!(server.command(&plant).error(), None);
    node.outlive("a planted probe", Kind::TimedOut, || server.stop(), || server.cont()).await;
    assert!(node.limiter.stats().breaker_opened >= 1);
}

#[tokio::test]
async fn something_else_under_one_key_of_a_batch_leaves_the_other_answers_as_they_are() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    server.command(&["SET", "tollgate:tg2:{stranger}:sliding:3600000000", "hello"]);
    let demands = ["stranger", "full", "stranger", "full"]
        .map(|subject| Demand::new("1/h".parse().unwrap(), Key::new(subject).unwrap()));
    assert!(node.ask("1/h", "full").await.allowed());
    let limiter = tollgate::Limiter::builder().store(std::sync::Arc::new(node.store.clone())).deny_cache(false);
    let limiter = limiter.deadline(std::time::Duration::from_secs(30)).build();
    let checks = demands.each_ref().map(Check::one);
    let answers = limiter.check_batch(&checks, CheckOptions::default()).await;
    let answers: Vec<_> =
        answers.into_iter().map(|answer| answer.map(|it| (it.source, it.allowed())).unwrap()).collect();
    let (share, denied) = ((Source::Local, true), (Source::Store, false));
    assert_eq!(answers, [share, denied, (Source::Local, false), denied]);
    let stats = limiter.stats();
    assert_eq!((stats.store_calls, stats.store_failures, stats.breaker_opened), (1, 0, 0));
}
