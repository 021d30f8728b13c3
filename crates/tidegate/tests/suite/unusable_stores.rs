//! Errors for a `[store]` table whose servers are not what it describes: they name what was found.

use tidegate::config::{Format, Loader};
use tidegate::{Check, Demand, Key, Store, StoreErrorKind as Kind};
use tidegate_redis::RedisStore;
use tidegate_testkit::fake_sentinel::{FakeSentinel, SentinelAnswer};
use tidegate_testkit::poll;
use tidegate_testkit::server::{Brand, Config, SentinelGroup, Server};

/// Creates the store of a table. Its calls have a timeout that does not pass on a busy machine.
fn store(kind: &str, servers: &[String], more: &str) -> RedisStore {
    let urls: Vec<String> = servers.iter().map(|server| format!("'redis://{server}'")).collect();
    let text = format!("deadline = '10s'\n[store]\nkind = '{kind}'\nurls = [{}]\n{more}\n", urls.join(", "));
    let settings = Loader::new().load_text("tidegate.toml", &text, Format::Toml).unwrap().settings;
    settings.redis().unwrap().unwrap()
}

/// Returns the kind and the message of the error of a check.
async fn error_of(store: &RedisStore, subject: &str) -> (Kind, String) {
    let demand = Demand::new("10/h".parse().unwrap(), Key::new(subject).unwrap());
    let error = store.decide(&[Check::one(&demand)]).await.unwrap_err();
    (error.kind(), error.to_string())
}

#[tokio::test]
async fn sentinel_that_does_not_know_the_name_or_answers_nonsense_is_named() {
    let group = SentinelGroup::shared(Brand::Redis);
    let sentinel = group.sentinels()[0].addr().to_string();
    let (kind, message) =
        error_of(&store("sentinel", std::slice::from_ref(&sentinel), "master = 'other'"), "ann").await;
    let reason = "it does not watch a master named other; it watches main";
    let expected = format!("store redis+sentinel://{sentinel}/other: Sentinel {sentinel}: {reason}");
    assert_eq!((kind, message), (Kind::Unsupported, expected));

    let fake = FakeSentinel::start(SentinelAnswer::Bytes(b"*2\r\n$1\r\nh\r\n$1\r\nx\r\n")).await;
    let (kind, message) = error_of(&store("sentinel", &[fake.addr().to_string()], "master = 'main'"), "ann").await;
    let reason = "the reply to SENTINEL GET-MASTER-ADDR-BY-NAME is not an address";
    assert_eq!(kind, Kind::Protocol, "{message}");
    assert!(message.ends_with(&format!("Sentinel {}: {reason}", fake.addr())), "{message}");
}

#[tokio::test]
async fn nodes_of_two_clusters_and_slots_without_a_master_are_named() {
    let node = |slots: &[&str]| {
        let config = Config::new(Brand::Redis).set("cluster-enabled", "yes");
        let node = config.set("cluster-require-full-coverage", "no").start();
        let command: Vec<&str> = ["CLUSTER", "ADDSLOTSRANGE"].iter().chain(slots).copied().collect();
        assert_eq!(node.command(&command).text(), "OK");
        poll::eventually("the node serves", || node.command(&["CLUSTER", "INFO"]).text(), |info| info.contains(":ok"));
        node
    };
    // `ann` is in slot 2,326, and `bob` in slot 8,955.
    let [one, other]: [Server; 2] = [node(&["0", "8000"]), node(&["0", "16383"])];
    let addresses = [one.addr().to_string(), other.addr().to_string()];
    let (kind, message) = error_of(&store("cluster", &addresses, ""), "ann").await;
    assert_eq!(kind, Kind::Unsupported, "{message}");
    assert!(addresses.iter().all(|address| message.contains(address)), "{message}");
    assert!(message.ends_with("are nodes of different clusters"), "{message}");

    let (kind, message) = error_of(&store("cluster", &addresses[..1], ""), "bob").await;
    let expected = format!("store redis+cluster://{}: no node of the cluster owns this slot", addresses[0]);
    assert_eq!((kind, message), (Kind::Unavailable, expected));
}
