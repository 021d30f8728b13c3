//! API keys from a hash on a real Redis, as the quota that applies to a request.

use std::sync::Arc;
use std::time::Duration;

use tidegate::config::{Config, Format};
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::identity::KeyDigest;
use tidegate::rules::{KeyChange, KeyHash, KeyNameError, Lookups, OwnLimits, RequestView, RuleSet};
use tidegate::{Limiter, ManualClock, Timestamp};
use tidegate_redis::RedisStore;
use tidegate_testkit::server::{Brand, Config as ServerConfig, Server};

use crate::plan_hash::{field_of, quota};

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
/// Long enough that no lookup times out on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);
const HASH: &str = "tidegate:keys";

const CONFIG: &str = r#"
store = "redis://localhost"
instances = 1
deadline = "20s"
keys = [{ key = "listed", plan = "pro" }]

[plans]
anonymous = { limits = ["5000/h"] }
default = { limits = ["10/h"] }
pro = { limits = ["1000/h"] }

[key_sources]
redis_hash = "tidegate:keys"

[[rules]]
name = "api"
limits = "plan"
"#;

struct Bench {
    server: Server,
    engine: Engine,
    clock: Arc<ManualClock>,
}

fn bench() -> Bench {
    let server = Server::redis();
    let clock = Arc::new(ManualClock::new(START));
    let store = RedisStore::builder(server.url()).call_timeout(TIMEOUT).build().unwrap();
    let lookups = Lookups::new().key(KeyHash::new(store, HASH)).clock(clock.clone()).deadline(TIMEOUT);
    let rules = Config::from_text(CONFIG, Format::Toml).unwrap().rules;
    Bench { server, engine: Engine::with_lookups(Limiter::memory(), rules, lookups), clock }
}

impl Bench {
    /// Returns the quota that applies to a request with this key, or `None` if it is exempt.
    async fn quota(&self, key: &str) -> Option<u32> {
        quota(&self.engine, Some(key)).await
    }

    fn set(&self, key: &str, value: &str) {
        self.server.command(&["HSET", HASH, &field_of(key), value]);
    }
}

#[tokio::test]
async fn key_is_read_from_the_hash_by_its_digest() {
    let bench = bench();
    let long = format!(r#"{{"plan": "pro", "name": "{}"}}"#, "x".repeat(4_096));
    for (key, value, quota) in [
        ("pro", r#"{"name": "acme", "plan": "pro"}"#, Some(1_000)),
        ("plain", "{}", Some(10)),
        ("exempt", r#"{"exempt": true}"#, None),
        ("other-plan", r#"{"plan": "a plan that does not exist"}"#, Some(10)),
        ("listed", r#"{"plan": "default"}"#, Some(1_000)),
        // A key with an entry is never anonymous, whatever the entry is.
        ("misspelt", r#"{"plann": "pro"}"#, Some(10)),
        ("no-json", "pro", Some(10)),
        ("too-long", &long, Some(10)),
        ("own", r#"{"plan": "pro", "limits": ["77/h"]}"#, Some(77)),
        ("own-without-plan", r#"{"limits": "78/h"}"#, Some(78)),
        ("wrong-limits", r#"{"plan": "pro", "limits": ["77/h", "78"]}"#, Some(1_000)),
        ("wrong-plan", r#"{"plan": 5, "limits": ["77/h"]}"#, Some(77)),
        ("wrong-exempt", r#"{"plan": "pro", "exempt": "yes"}"#, Some(1_000)),
    ] {
        bench.set(key, value);
        assert_eq!(bench.quota(key).await, quota, "{key}");
    }
    assert_eq!(bench.quota("not in the hash").await, Some(5_000));
    assert_eq!(bench.engine.lookups().key_stats().calls, 13, "a listed key is not looked up");
    assert_eq!(bench.engine.lookups().key_stats().failures, 0);
}

#[tokio::test]
async fn change_takes_effect_after_a_second_and_known_keys_outlive_redis() {
    let bench = bench();
    bench.set("acme", r#"{"plan": "pro"}"#);
    assert_eq!(bench.quota("acme").await, Some(1_000));
    assert_eq!(bench.quota("globex").await, Some(5_000));
    bench.set("acme", "{}");
    bench.set("globex", r#"{"plan": "pro"}"#);
    bench.clock.set(START.plus_micros(499_999));
    assert_eq!((bench.quota("acme").await, bench.quota("globex").await), (Some(1_000), Some(5_000)));
    bench.clock.set(START.plus_micros(1_000_000));
    assert_eq!((bench.quota("acme").await, bench.quota("globex").await), (Some(10), Some(1_000)));

    bench.server.kill9();
    bench.clock.advance(Duration::from_secs(3_600));
    assert_eq!((bench.quota("acme").await, bench.quota("globex").await), (Some(10), Some(1_000)));
    assert_eq!(bench.quota("initech").await, Some(5_000), "not in the cache");
    assert!(bench.engine.lookups().key_stats().failures > 0);
}

#[tokio::test]
async fn key_that_is_not_a_hash_makes_keys_unknown() {
    let bench = bench();
    bench.server.command(&["SET", HASH, "not a hash"]);
    assert_eq!(bench.quota("acme").await, Some(5_000));
    assert_eq!(bench.engine.lookups().key_stats().failures, 1);
}

#[tokio::test]
async fn engine_of_a_file_reads_its_key_hash() {
    let server = Server::redis();
    let file = CONFIG.replace("redis://localhost", &server.url());
    let engine = Config::from_text(&file, Format::Toml).unwrap().engine().unwrap();
    let bench = Bench { server, engine, clock: Arc::new(ManualClock::new(START)) };
    bench.set("acme", r#"{"plan": "pro"}"#);
    assert_eq!(bench.quota("acme").await, Some(1_000));
}

/// Rules in which names of own limits are shared: by two rules per plan, and by a rule with limits of its own.
const COMPARED: &str = r#"
[plans]
anonymous = { limits = ["5000/h"] }
default = { limits = ["3/h"] }
pro = { limits = ["4/h", "100/day"], upgrade_url = "https://example.com/plans" }

[[rules]]
name = "api"
match = { path = "/api/*" }
limits = "plan"
[[rules]]
name = "search"
match = { path = "/api/search" }
limits = "plan"
headers = ["draft-6"]
[[rules]]
name = "site"
by = ["ip"]
limits = ["50/h", { name = "burst", limit = "40/s" }]
[[rules]]
name = "trial"
mode = "shadow"
limits = "plan"
"#;

/// Entries of a key, in the forms of a Redis hash and of a keys file.
const ENTRIES: &[(&str, &str)] = &[
    ("{}", ""),
    (r#"{"name": "acme"}"#, "name = 'acme'"),
    (r#"{"plan": "pro"}"#, "plan = 'pro'"),
    (r#"{"limits": ["2/h"]}"#, "limits = ['2/h']"),
    (r#"{"limits": "2/h"}"#, "limits = '2/h'"),
    (
        r#"{"plan": "pro", "limits": ["6/h", "5/h token-bucket burst=2"]}"#,
        "plan = 'pro'\nlimits = ['6/h', '5/h token-bucket burst=2']",
    ),
    (
        r#"{"plan": "pro", "limits": [{"name": "burst", "quota": 2, "window": "1min", "count_denied": true}, "9/h"]}"#,
        "plan = 'pro'\nlimits = [{ name = 'burst', quota = 2, window = '1min', count_denied = true }, '9/h']",
    ),
    (r#"{"limits": [{"limit": "2/h leaky-bucket"}]}"#, "limits = [{ limit = '2/h leaky-bucket' }]"),
    (r#"{"plan": "pro", "limits": ["1/h"], "exempt": true}"#, "plan = 'pro'\nlimits = ['1/h']\nexempt = true"),
];

fn compared_engine(rules: RuleSet, lookups: Lookups) -> Engine {
    let clock = Arc::new(ManualClock::new(START));
    Engine::with_lookups(Limiter::builder().clock(clock).build(), rules, lookups)
}

/// Returns the status, the headers, the body and the wait of the response to a request with the key `k`.
async fn answer(engine: &Engine, path: &str) -> String {
    let request = http::Request::get(path).header("x-api-key", "k").body(()).unwrap();
    let outcome = engine.check(&RequestView::of(&request), [203, 0, 113, 9].into(), RequestOptions::default()).await;
    let mut headers = http::HeaderMap::new();
    match outcome {
        Outcome::Admitted(permit) => {
            permit.write_headers(&mut headers);
            format!("admitted after {:?} {headers:?}", permit.wait())
        }
        Outcome::Refused(refusal) => format!("{:?}", refusal.response(&headers)),
    }
}

#[tokio::test]
async fn entry_of_the_hash_has_the_effect_of_the_same_entry_in_a_keys_file() {
    for brand in Brand::ALL {
        let server = ServerConfig::new(brand).start();
        for (json, toml) in ENTRIES {
            server.command(&["HSET", HASH, &field_of("k"), json]);
            let store = RedisStore::builder(server.url()).call_timeout(TIMEOUT).build().unwrap();
            let lookups = Lookups::new().key(KeyHash::new(store, HASH)).deadline(TIMEOUT);
            let without = Config::from_text(COMPARED, Format::Toml).unwrap().rules;
            let by_hash = compared_engine(without, lookups);
            let listed = format!("{COMPARED}\n[[keys]]\nkey = 'k'\n{toml}");
            let by_file = compared_engine(Config::from_text(&listed, Format::Toml).unwrap().rules, Lookups::new());
            for path in ["/api/a", "/api/search"].into_iter().cycle().take(14) {
                let (found, expected) = (answer(&by_hash, path).await, answer(&by_file, path).await);
                assert_eq!(found, expected, "{brand}: {json} on {path}");
            }
            let counts = |engine: &Engine| format!("{:?}", engine.rule_stats());
            assert_eq!(counts(&by_hash), counts(&by_file), "{brand}: {json}");
        }
    }
}

#[tokio::test]
async fn changed_limits_are_in_force_on_two_instances_and_keep_their_counters() {
    let server = Server::redis();
    let file = CONFIG.replace("redis://localhost", &server.url());
    let engine = || Config::from_text(&file, Format::Toml).unwrap().engine().unwrap();
    let (one, other) = (engine(), engine());
    let set = |value: &str| server.command(&["HSET", HASH, &field_of("acme"), value]);
    let status = async |engine: &Engine| {
        let request = http::Request::get("/").header("x-api-key", "acme").body(()).unwrap();
        let peer = [203, 0, 113, 9].into();
        match engine.check(&RequestView::of(&request), peer, RequestOptions::default()).await {
            Outcome::Admitted(permit) => {
                permit.decision().map(|decision| (decision.limits[0].quota, decision.limits[0].remaining))
            }
            refused => panic!("{refused:?}"),
        }
        .unwrap()
    };
    set(r#"{"plan": "pro", "limits": ["5000/h"]}"#);
    for used in 1..=10 {
        let engine = if used % 2 == 0 { &one } else { &other };
        assert_eq!(status(engine).await, (5_000, 5_000 - used));
    }
    let mut used = 10;
    for (value, quota) in [
        (r#"{"plan": "pro", "limits": ["9000/h"]}"#, 9_000),
        (r#"{"plan": "pro"}"#, 1_000),
        (r#"{"plan": "pro", "limits": ["7000/h"]}"#, 7_000),
    ] {
        set(value);
        for engine in [&one, &other] {
            loop {
                let (found, left) = status(engine).await;
                used += 1;
                assert_eq!(left, found - used, "the counter is kept");
                if found == quota {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

#[tokio::test]
async fn key_is_found_by_the_name_of_its_owner() {
    let bench = bench();
    let lookups = bench.engine.lookups();
    assert!(lookups.key_named("acme").await.unwrap().is_none(), "there is no hash");
    for number in 0..1_200 {
        bench.server.command(&["HSET", HASH, &KeyDigest::of(&format!("k{number}")).field(), "{}"]);
    }
    bench.set("a", r#"{"name": "acme", "limits": ["7/h"]}"#);
    bench.set("b", r#"{"name": "twice"}"#);
    bench.set("c", r#"{"name": "twice", "plan": "pro"}"#);
    bench.server.command(&["HSET", HASH, "user:acme", r#"{"name": "acme"}"#]);
    let (digest, known) = lookups.key_named("acme").await.unwrap().unwrap();
    assert_eq!(digest, KeyDigest::of("a"));
    assert_eq!(known.limits.unwrap().to_string(), "7/h");
    assert!(matches!(lookups.key_named("twice").await, Err(KeyNameError::Ambiguous(2))));
    assert!(lookups.key_named("nobody").await.unwrap().is_none());
    let list = lookups.key_hash().unwrap().list(1_000).await.unwrap();
    assert!(list.has_more && list.keys.len() == 1_000);
    let all = lookups.key_hash().unwrap().list(2_000).await.unwrap();
    assert!(!all.has_more && all.keys.len() == 1_203);
}

#[tokio::test]
async fn groups_of_the_hash_decide_which_rules_apply() {
    let server = Server::redis();
    let clock = Arc::new(ManualClock::new(START));
    let store = RedisStore::builder(server.url()).call_timeout(TIMEOUT).build().unwrap();
    let hash = KeyHash::new(store, HASH);
    let lookups = Lookups::new().key(hash.clone()).clock(clock.clone()).deadline(TIMEOUT);
    let rules = CONFIG.replace("limits = \"plan\"", "match.groups = [\"partners\"]\nlimits = [\"7/h\"]");
    let rules = Config::from_text(&rules, Format::Toml).unwrap().rules;
    let engine = Engine::with_lookups(Limiter::memory(), rules, lookups);
    for (value, expected) in [
        (r#"{"groups": ["beta", "partners"]}"#, Some(7)),
        (r#"{"groups": "partners"}"#, Some(7)),
        (r#"{"groups": ["beta"]}"#, None),
        (r#"{"groups": null}"#, None),
        ("{}", None),
        // Groups are read as a whole, and a mistake in them does not make the caller anonymous.
        (r#"{"groups": ["partners", 5]}"#, None),
        (r#"{"groups": ["partners", "a b"]}"#, None),
    ] {
        server.command(&["HSET", HASH, &field_of("k"), value]);
        clock.advance(Duration::from_secs(2));
        assert_eq!(quota(&engine, Some("k")).await, expected, "{value}");
    }
    let digest = KeyDigest::of("k");
    let change = |groups: &[&'static str]| KeyChange::new().groups(groups.iter().copied());
    let known = hash.update(&digest, &change(&["partners"]).unwrap()).await.unwrap().unwrap();
    assert_eq!(known.groups.iter().map(|group| &**group).collect::<Vec<_>>(), ["partners"]);
    hash.update(&digest, &change(&[]).unwrap()).await.unwrap();
    assert_eq!(server.command(&["HGET", HASH, &digest.field()]).text(), "{}");
    assert!(change(&["a b"]).is_err() && change(&[""]).is_err());
}

#[tokio::test]
async fn concurrent_changes_of_one_entry_lose_nothing() {
    let server = Server::redis();
    server.command(&["HSET", HASH, &field_of("k"), r#"{"name": "acme", "since": 2019}"#]);
    let hash = || {
        let store = RedisStore::builder(server.url()).call_timeout(TIMEOUT).build().unwrap();
        KeyHash::new(store, HASH)
    };
    let digest = KeyDigest::of("k");
    for round in 1..=20 {
        let (plans, limits) = (hash(), hash());
        let limit = OwnLimits::parse([format!("{round}/h")]).unwrap();
        let plan = format!("plan-{round}");
        let (first, second) = (KeyChange::new().plan(Some(&plan)), KeyChange::new().limits(Some(limit)));
        let (one, other) = tokio::join!(plans.update(&digest, &first), limits.update(&digest, &second));
        assert!(one.unwrap().is_some() && other.unwrap().is_some());
        let value = server.command(&["HGET", HASH, &digest.field()]).text();
        assert_eq!(value, format!(r#"{{"limits":["{round}/h"],"name":"acme","plan":"{plan}","since":2019}}"#));
    }
    let gone = hash().update(&KeyDigest::of("other"), &KeyChange::new().plan(None)).await.unwrap();
    assert!(gone.is_none() && server.command(&["HLEN", HASH]).integer() == 1, "no entry is created");
    server.command(&["HSET", HASH, &digest.field(), "no JSON"]);
    assert!(hash().update(&digest, &KeyChange::new().plan(None)).await.is_err());
    assert_eq!(server.command(&["HGET", HASH, &digest.field()]).text(), "no JSON");
}
