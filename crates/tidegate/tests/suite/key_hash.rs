//! API keys from a hash on a real Redis, as the quota that applies to a request.

use std::sync::Arc;
use std::time::Duration;

use tidegate::config::{Config, Format};
use tidegate::engine::Engine;
use tidegate::rules::{KeyHash, Lookups};
use tidegate::{Limiter, ManualClock, Timestamp};
use tidegate_redis::RedisStore;
use tidegate_testkit::server::Server;

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
    let long = format!(r#"{{"plan": "pro", "name": "{}"}}"#, "x".repeat(1_024));
    for (key, value, quota) in [
        ("pro", r#"{"name": "acme", "plan": "pro"}"#, Some(1_000)),
        ("plain", "{}", Some(10)),
        ("exempt", r#"{"exempt": true}"#, None),
        ("other-plan", r#"{"plan": "a plan that does not exist"}"#, Some(10)),
        ("listed", r#"{"plan": "default"}"#, Some(1_000)),
        ("misspelt", r#"{"plann": "pro"}"#, Some(5_000)),
        ("no-json", "pro", Some(5_000)),
        ("too-long", &long, Some(5_000)),
    ] {
        bench.set(key, value);
        assert_eq!(bench.quota(key).await, quota, "{key}");
    }
    assert_eq!(bench.quota("not in the hash").await, Some(5_000));
    assert_eq!(bench.engine.lookups().key_stats().calls, 8, "a listed key is not looked up");
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
