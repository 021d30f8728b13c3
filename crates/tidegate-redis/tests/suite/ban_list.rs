//! The ban list in Redis: its layout, its lifetime, its bound, and changes at the same time.

use std::time::Duration;

use futures_util::future::join_all;
use tidegate_core::{BAN_LIST_MAX, ListedBan, Store, StoreErrorKind, Wait};
use tidegate_redis::RedisStore;
use tidegate_testkit::server::{Brand, Config, Server};

const KEY: &str = "tidegate:tg2:bans";
/// A call timeout that does not pass on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
const HOUR: Option<Duration> = Some(Duration::from_secs(3_600));

fn store(server: &Server) -> RedisStore {
    RedisStore::builder(server.url()).call_timeout(PATIENCE).build().unwrap()
}

async fn entries(store: &RedisStore) -> Vec<String> {
    let listing = store.listed_bans(None).await.unwrap().unwrap();
    listing.bans.iter().map(|ban| ban.entry.to_string()).collect()
}

async fn list_is_read_changed_and_expires(brand: Brand) {
    let server = Config::new(brand).start();
    let store = store(&server);
    assert_eq!(store.listed_bans(Some(0)).await.unwrap(), None, "no list has the version 0");
    assert!(store.list_ban("ip:203.0.113.9", HOUR).await.unwrap());
    let first = store.listed_bans(Some(0)).await.unwrap().unwrap();
    assert_eq!(store.listed_bans(Some(first.version)).await.unwrap(), None);
    let [ListedBan { entry, remaining, .. }] = &first.bans[..] else { panic!("{first:?}") };
    assert_eq!(&**entry, "ip:203.0.113.9");
    let left_ms = remaining.as_millis_ceil().unwrap();
    assert!((3_000_000..=3_600_000).contains(&left_ms), "{left_ms}");
    let ttl_ms = server.command(&["PTTL", KEY]).integer();
    assert!((3_000_000..=3_600_000).contains(&ttl_ms), "{ttl_ms}");

    assert!(store.list_ban("user:42", None).await.unwrap());
    assert_eq!(server.command(&["PTTL", KEY]).integer(), -1, "a permanent ban");
    let second = store.listed_bans(Some(first.version)).await.unwrap().unwrap();
    assert_eq!(second.bans[1], ListedBan::new("user:42", Wait::NEVER));
    assert!(store.unlist_ban("user:42").await.unwrap());
    assert!(!store.unlist_ban("user:42").await.unwrap());
    assert!(server.command(&["PTTL", KEY]).integer() > 0, "the rest expires");
    assert!(store.unlist_ban("ip:203.0.113.9").await.unwrap());
    assert_eq!(server.command(&["EXISTS", KEY]).integer(), 0, "an empty list has no key");
    assert_ne!(store.listed_bans(Some(second.version)).await.unwrap(), None);

    // The version of a new list differs from those of the old one.
    assert!(store.list_ban("a", HOUR).await.unwrap());
    let third = store.listed_bans(None).await.unwrap().unwrap();
    assert!(third.version > second.version, "{third:?} {second:?}");
    // An entry that has ended is neither read nor kept by the next change.
    server.command(&["HSET", KEY, "ended", "1"]);
    assert_eq!(entries(&store).await, ["a"]);
    assert!(!store.unlist_ban("ended").await.unwrap());
    assert_eq!(server.command(&["HEXISTS", KEY, "ended"]).integer(), 0);
    let long = "a".repeat(257);
    assert_eq!(store.list_ban(&long, None).await.unwrap_err().kind(), StoreErrorKind::Forbidden);
}

#[tokio::test]
async fn list_is_read_changed_and_expires_on_redis() {
    list_is_read_changed_and_expires(Brand::Redis).await;
}

#[tokio::test]
async fn list_is_read_changed_and_expires_on_valkey() {
    list_is_read_changed_and_expires(Brand::Valkey).await;
}

#[tokio::test]
async fn concurrent_changes_lose_no_entry() {
    let server = Server::redis();
    let (one, other) = (store(&server), store(&server));
    let texts: Vec<String> = (0..200).map(|number| format!("ip:10.0.0.{number}")).collect();
    let adds = texts.iter().enumerate().map(|(number, text)| {
        let store = if number % 2 == 0 { &one } else { &other };
        store.list_ban(text, HOUR)
    });
    assert!(join_all(adds).await.into_iter().all(|added| added.unwrap()));
    assert_eq!(entries(&one).await.len(), texts.len());
    let removals = texts.iter().map(|text| other.unlist_ban(text));
    assert!(join_all(removals).await.into_iter().all(|removed| removed.unwrap()));
    assert_eq!(entries(&one).await, [""; 0]);
}

#[tokio::test]
async fn full_list_takes_no_more_entries() {
    let server = Server::redis();
    let store = store(&server);
    for first in (0..BAN_LIST_MAX).step_by(1_000) {
        let fields: Vec<String> = (first..first + 1_000).map(|number| format!("user:{number}")).collect();
        let pairs = fields.iter().flat_map(|field| [field.as_str(), "0"]);
        server.command(&["HSET", KEY].into_iter().chain(pairs).collect::<Vec<&str>>());
    }
    assert!(!store.list_ban("user:one-more", None).await.unwrap());
    assert!(store.list_ban("user:7", HOUR).await.unwrap(), "an entry can be replaced");
    assert_eq!(entries(&store).await.len(), BAN_LIST_MAX);
    assert!(store.unlist_ban("user:7").await.unwrap());
    assert!(store.list_ban("user:one-more", None).await.unwrap());
}
