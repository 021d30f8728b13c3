//! Plans from a hash on a real Redis, as the quota that applies to a request.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tidegate::config::{Config, Format};
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::rules::{Lookups, PlanHash, RequestView};
use tidegate::{Limiter, ManualClock, Timestamp};
use tidegate_redis::RedisStore;
use tidegate_testkit::server::Server;

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
/// So long that a busy machine fails no lookup.
const TIMEOUT: Duration = Duration::from_secs(30);
const HASH: &str = "tidegate:plans";

const CONFIG: &str = r#"
store = "redis://localhost"
instances = 1
api_keys = "any"

[plans]
default = { limits = ["10/h"] }
anonymous = { limits = ["5/h"] }
pro = { limits = ["1000/h"] }
partner = { limits = ["9000/h"] }

[plan_sources]
redis_hash = "tidegate:plans"

[[rules]]
name = "api"
limits = "plan"
"#;

struct Bench {
    server: Server,
    engine: Engine,
    clock: Arc<ManualClock>,
}

fn bench(timeout: Duration) -> Bench {
    let server = Server::redis();
    let clock = Arc::new(ManualClock::new(START));
    let store = RedisStore::builder(server.url()).call_timeout(TIMEOUT).build().unwrap();
    let lookups = Lookups::new().plan(PlanHash::new(store, HASH)).clock(clock.clone());
    let loaded = Config::from_text(CONFIG, Format::Toml).unwrap();
    assert_eq!(loaded.settings.plan_hash.as_deref(), Some(HASH));
    // A lookup of a plan has three quarters of the deadline.
    let engine = Engine::with_lookups(Limiter::memory(), loaded.rules, lookups.deadline(timeout / 3 * 4));
    Bench { server, engine, clock }
}

impl Bench {
    /// Returns the quota that applies to a request with this key.
    async fn quota(&self, key: Option<&str>) -> u32 {
        quota(&self.engine, key).await.unwrap()
    }

    fn set(&self, field: &str, plan: &str) {
        self.server.command(&["HSET", HASH, field, plan]);
    }

    /// Returns how many lookups the server has executed.
    fn lookups(&self) -> u64 {
        let info = self.server.command(&["INFO", "commandstats"]).text();
        let line = info.lines().find(|line| line.starts_with("cmdstat_hget:"));
        line.and_then(|line| line.split("calls=").nth(1)?.split(',').next()?.parse().ok()).unwrap_or(0)
    }
}

#[tokio::test]
async fn plan_is_read_from_the_hash_and_cached_for_a_second() {
    let bench = bench(TIMEOUT);
    bench.set(&field_of("key-1"), "pro");
    bench.set(&field_of("key-2"), "a plan that does not exist");
    assert_eq!(bench.quota(Some("key-1")).await, 1_000);
    assert_eq!(bench.quota(Some("key-2")).await, 10, "like a key that is not in the hash");
    assert_eq!(bench.quota(Some("key-3")).await, 10);
    assert_eq!(bench.quota(None).await, 5, "a request without an identity needs no lookup");
    assert_eq!(bench.lookups(), 3);

    bench.set(&field_of("key-1"), "partner");
    bench.set(&field_of("key-3"), "pro");
    bench.clock.set(START.plus_micros(499_999));
    for _ in 0..5 {
        assert_eq!((bench.quota(Some("key-1")).await, bench.quota(Some("key-3")).await), (1_000, 10));
    }
    assert_eq!(bench.lookups(), 3, "found and missing entries are both cached");
    bench.clock.set(START.plus_micros(1_000_000));
    assert_eq!((bench.quota(Some("key-1")).await, bench.quota(Some("key-3")).await), (9_000, 1_000));
}

#[tokio::test]
async fn request_in_the_second_half_of_the_second_refreshes_the_plan_without_waiting() {
    let bench = bench(TIMEOUT);
    bench.set(&field_of("key-1"), "pro");
    assert_eq!(bench.quota(Some("key-1")).await, 1_000);
    bench.set(&field_of("key-1"), "partner");
    bench.clock.set(START.plus_micros(500_000));
    assert_eq!(bench.quota(Some("key-1")).await, 1_000, "the cached plan, while the new one is read");
    while bench.quota(Some("key-1")).await != 9_000 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(bench.lookups(), 2, "read once, however many requests came meanwhile");
}

#[tokio::test]
async fn cached_plan_is_used_while_redis_is_down_and_unknown_keys_get_the_default_plan() {
    let bench = bench(TIMEOUT);
    bench.set(&field_of("key-1"), "pro");
    assert_eq!(bench.quota(Some("key-1")).await, 1_000);
    bench.server.kill9();
    bench.clock.advance(Duration::from_secs(3_600));
    assert_eq!(bench.quota(Some("key-1")).await, 1_000);
    assert_eq!(bench.quota(Some("key-9")).await, 10);
}

#[tokio::test]
async fn lookups_stop_for_a_while_after_a_timeout() {
    let bench = bench(Duration::from_millis(50));
    bench.set(&field_of("key-1"), "pro");
    // On a busy machine the first lookups may time out.
    for _ in 0..1_000 {
        if bench.quota(Some("key-1")).await == 1_000 {
            break;
        }
        bench.clock.advance(Duration::from_secs(2));
    }
    bench.server.stop();
    bench.clock.advance(Duration::from_secs(2));
    // After the timeouts of two names, no name is looked up for a while.
    assert_eq!((bench.quota(Some("key-1")).await, bench.quota(Some("key-8")).await), (1_000, 10));
    // A lookup would start a timer of tokio, and the paused clock would advance to it.
    tokio::time::pause();
    let before = tokio::time::Instant::now();
    for _ in 0..5 {
        assert_eq!((bench.quota(Some("key-1")).await, bench.quota(Some("key-9")).await), (1_000, 10));
    }
    assert_eq!(before.elapsed(), Duration::ZERO);
    bench.server.cont();
}

#[tokio::test]
async fn key_that_is_not_a_hash_gives_the_default_plan() {
    let bench = bench(TIMEOUT);
    bench.server.command(&["SET", HASH, "not a hash"]);
    assert_eq!(bench.quota(Some("key-1")).await, 10);
}

#[tokio::test]
async fn cache_of_plans_is_bounded() {
    const KEYS: usize = 12_000;
    let bench = bench(TIMEOUT);
    for number in 0..KEYS {
        bench.quota(Some(&format!("flood-{number}"))).await;
    }
    let before = bench.lookups();
    for number in 0..KEYS {
        bench.quota(Some(&format!("flood-{number}"))).await;
    }
    let repeated = bench.lookups() - before;
    assert!((2_000..4_000).contains(&repeated), "{repeated} of {KEYS} were not cached");
}

#[tokio::test]
async fn engine_of_a_file_reads_its_plan_hash() {
    let server = Server::redis();
    server.command(&["HSET", HASH, &field_of("ann"), "pro"]);
    let file = CONFIG.replace("redis://localhost", &server.url()).replace("instances = 1", "deadline = \"20s\"");
    let engine = Config::from_text(&file, Format::Toml).unwrap().engine().unwrap();
    let bench = Bench { server, engine, clock: Arc::new(ManualClock::new(START)) };
    assert_eq!(bench.quota(Some("ann")).await, 1000);
    assert_eq!(bench.quota(Some("bob")).await, 10);
}

/// Returns the field of a key, computed as the documentation describes.
/// Returns the quota that applies to a request with this key, or `None` if it is exempt.
pub(crate) async fn quota(engine: &Engine, key: Option<&str>) -> Option<u32> {
    let request = http::Request::get("/");
    let request = key.into_iter().fold(request, |request, key| request.header("x-api-key", key)).body(()).unwrap();
    let peer: IpAddr = [203, 0, 113, 9].into();
    match engine.check(&RequestView::of(&request), peer, RequestOptions::default()).await {
        Outcome::Admitted(permit) => permit.decision().map(|decision| decision.limits[0].quota),
        refused => panic!("{refused:?}"),
    }
}

/// Returns the field of an API key in a hash. The digest is that of another program.
pub(crate) fn field_of(key: &str) -> String {
    let mut sum = std::process::Command::new("sha256sum");
    let mut child = sum.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), key.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    format!("api_key:{}", &String::from_utf8(output.stdout).unwrap()[..64])
}
