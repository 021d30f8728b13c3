//! The cost of denials: a client that keeps sending requests over its limit, in each way that it can choose.
//!
//! Every case sends 12,000 requests within three seconds of the limiter's clock, which the test advances, and counts the
//! calls to a real server. The windows are an hour long, so the server's own clock does not matter.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use http::Request;
use tidegate::config::{Config, Format};
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::rules::{KeyHash, Lookups, RequestView};
use tidegate::{Clock, Limiter, ManualClock, Source, Timestamp};
use tidegate_redis::RedisStore;
use tidegate_testkit::server::{Brand, Cluster, Server};

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
/// So long that a busy machine makes no decision local.
const TIMEOUT: Duration = Duration::from_secs(30);
const REQUESTS: u64 = 12_000;
const SECONDS: u64 = 3;
const PEER: [u8; 4] = [203, 0, 113, 9];

/// The rule by which the client is denied: five requests an hour.
const OWN: &str = "[[rules]]\nname = \"own\"\nby = [\"ip\"]\nlimits = [\"5/h\"]\n";

/// The calls of a run.
#[derive(Debug)]
struct Calls {
    /// Calls that decide.
    decisions: u64,
    /// Lookups of API keys.
    lookups: u64,
    /// Denials from the deny cache.
    cached: u64,
}

struct Bench {
    engine: Engine,
    clock: Arc<ManualClock>,
}

impl Bench {
    /// Creates an engine on a store, with these rules. `prefix` separates the counters of the cases.
    fn new(url: &str, prefix: &str, rules: &str) -> Bench {
        let clock = Arc::new(ManualClock::new(START));
        let store = || RedisStore::builder(url).prefix(prefix).call_timeout(TIMEOUT).bans(true).build().unwrap();
        let limiter = Limiter::builder().store(Arc::new(store())).clock(clock.clone()).deadline(TIMEOUT).build();
        let lookups = if url.starts_with("redis+cluster") {
            Lookups::new()
        } else {
            Lookups::new().key(KeyHash::new(store(), "tidegate:keys"))
        };
        let lookups = lookups.clock(clock.clone()).deadline(TIMEOUT);
        let rules = Config::from_text(rules, Format::Toml).unwrap().rules;
        Bench { engine: Engine::on_clock(limiter, rules, lookups, clock.clone()), clock }
    }

    async fn outcome(&self, request: Request<()>) -> Outcome {
        // As in the layer.
        let options = RequestOptions { max_wait: Some(Duration::from_secs(30)), ..RequestOptions::default() };
        self.engine.check(&RequestView::of(&request), PEER.into(), options).await
    }

    /// Sends the requests one after the other, and returns the calls that they have cost. Each of them must be refused
    /// except the first five.
    async fn flood(&self, request: impl Fn(u64) -> Request<()>) -> Calls {
        self.flood_with(1, request).await
    }

    /// Sends the requests, always `in_flight` of them at the same time. Otherwise like [`flood`](Bench::flood).
    async fn flood_with(&self, in_flight: u64, request: impl Fn(u64) -> Request<()>) -> Calls {
        let mut refused = 0;
        for round in 0..REQUESTS / in_flight {
            let numbers = round * in_flight..(round + 1) * in_flight;
            for (number, outcome) in
                join_all(numbers.map(async |number| (number, self.outcome(request(number)).await))).await
            {
                match outcome {
                    Outcome::Refused(refusal) => {
                        refused += 1;
                        if let Some(decision) = refusal.decision() {
                            assert!(matches!(decision.source, Source::Store | Source::DenyCache), "{decision:?}");
                            let response = refusal.response(&http::HeaderMap::new());
                            assert!(response.headers().contains_key("retry-after"), "{number}: {response:?}");
                        }
                    }
                    Outcome::Admitted(permit) => permit.keep(),
                }
            }
            self.clock.advance(Duration::from_micros(SECONDS * 1_000_000 / REQUESTS * in_flight));
        }
        assert!(refused >= REQUESTS - 5, "{refused}");
        assert_eq!(self.clock.now(), START.plus_micros(SECONDS * 1_000_000));
        let stats = self.engine.limiter().stats();
        assert_eq!((stats.local, stats.uncounted, stats.unavailable), (0, 0, 0), "{stats:?}");
        let lookups = self.engine.lookups().key_stats().calls;
        Calls { decisions: stats.store_calls, lookups, cached: stats.deny_cache_hits }
    }
}

fn get(path: &str) -> Request<()> {
    Request::get(path).body(()).unwrap()
}

fn with_header(name: &str, value: String) -> Request<()> {
    Request::get("/").header(name, value).body(()).unwrap()
}

/// A request by its number.
type NumberedRequest = fn(u64) -> Request<()>;

/// The rules and requests of the cases in which one limit of the client denies, whatever else is counted.
const CASES: [(&str, &str, NumberedRequest); 7] = [
    ("own", "", |_| get("/")),
    ("path", "[[rules]]\nname = \"path\"\nby = [\"path\"]\nlimits = [\"1000/h\"]\n", |number| {
        get(&format!("/{number}"))
    }),
    ("cookie", "[[rules]]\nname = \"cookie\"\nby = [\"cookie:device\"]\nlimits = [\"1000/h\"]\n", |number| {
        with_header("cookie", format!("device={number}"))
    }),
    ("header", "[[rules]]\nname = \"header\"\nby = [\"header:x-tenant\"]\nlimits = [\"1000/h\"]\n", |number| {
        with_header("x-tenant", number.to_string())
    }),
    ("several", "[[rules]]\nname = \"more\"\nby = [\"global\"]\nlimits = [\"90000/h\", \"900000/day\"]\n", |_| {
        get("/")
    }),
    ("queue", "[[rules]]\nname = \"queue\"\nby = [\"ip\"]\nlimits = [\"600/s leaky-bucket queue=50\"]\n", |_| get("/")),
    ("first", "[[rules]]\nname = \"before\"\nby = [\"path\", \"ip\"]\nlimits = [\"1000/h\"]\n", |number| {
        get(&format!("/{number}"))
    }),
];

#[tokio::test]
async fn denied_client_costs_one_call_per_second_whatever_it_invents() {
    let server = Server::redis();
    for (name, rules, request) in CASES {
        // The other rule is before or after the one that denies.
        let rules = if name == "first" { format!("{rules}{OWN}") } else { format!("{OWN}{rules}") };
        let calls = Bench::new(&server.url(), name, &rules).flood(request).await;
        println!("{name}: {calls:?}");
        // The five admissions, and one denial for each further second.
        assert!(calls.decisions <= 5 + SECONDS, "{name}: {calls:?}");
        assert_eq!((calls.cached, calls.lookups), (REQUESTS - calls.decisions, 0), "{name}");
    }
}

/// When the cached denial expires, all requests in flight are checked by the store, in a few calls.
#[tokio::test]
async fn denied_client_with_many_requests_in_flight_costs_a_few_calls_per_second() {
    const IN_FLIGHT: u64 = 400;
    let server = Server::redis();
    for (name, rules, request) in CASES {
        let rules = if name == "first" { format!("{rules}{OWN}") } else { format!("{OWN}{rules}") };
        let bench = Bench::new(&server.url(), &format!("many-{name}"), &rules);
        let before = server.script_calls();
        let calls = bench.flood_with(IN_FLIGHT, request).await;
        let script_calls = server.script_calls() - before;
        println!("{name}: {calls:?} in {script_calls} calls");
        // All that are in flight when the client reaches its limit, and in each further second.
        assert!(calls.decisions <= IN_FLIGHT * (1 + SECONDS), "{name}: {calls:?}");
        assert!(script_calls * 20 <= calls.decisions, "{name}: {script_calls} calls for {calls:?}");
        assert_eq!((calls.cached, calls.lookups), (REQUESTS - calls.decisions, 0), "{name}");
    }
}

#[tokio::test]
async fn denied_client_costs_one_call_per_second_and_limit_on_a_cluster() {
    let cluster = Cluster::shared(Brand::Redis);
    for (name, rules, request) in CASES {
        let calls =
            Bench::new(&cluster.url(), &format!("denied-{name}"), &format!("{OWN}{rules}")).flood(request).await;
        println!("cluster, {name}: {calls:?}");
        // At most two servers decide a check, and at most one more asks first.
        assert!(calls.decisions <= 3 * (5 + SECONDS), "{name}: {calls:?}");
    }
}

#[tokio::test]
async fn client_that_invents_api_keys_costs_ten_lookups_per_second() {
    let server = Server::redis();
    server.command(&["HSET", "tidegate:keys", &crate::plan_hash::field_of("real"), "{}"]);
    let rules = r#"
keys = [{ key = "listed", plan = "default" }]
[plans]
anonymous = { limits = ["5/h"] }
default = { limits = ["100000/h"] }
[[rules]]
name = "api"
limits = "plan"
"#;
    let bench = Bench::new(&server.url(), "keys", rules);
    let keyed = |key: &str| with_header("x-api-key", key.to_owned());
    let quota = async |bench: &Bench, key: &str| match bench.outcome(keyed(key)).await {
        Outcome::Admitted(permit) => permit.decision().unwrap().limits[0].quota,
        Outcome::Refused(_) => 0,
    };
    assert_eq!(quota(&bench, "real").await, 100_000);
    let calls = bench.flood(|number| with_header("x-api-key", format!("invented-{number}"))).await;
    println!("{calls:?}");
    assert!(calls.decisions <= 1 + 5 + SECONDS, "{calls:?}");
    assert!(calls.lookups <= 1 + 10 * SECONDS, "{calls:?}");
    // A key that was found before stays known behind the same address, and so does one that the rules list.
    assert_eq!((quota(&bench, "real").await, quota(&bench, "listed").await), (100_000, 100_000));
    // Keys that are repeated do not cost more.
    let before = bench.engine.lookups().key_stats().calls;
    for number in 0..REQUESTS {
        let _ = bench.outcome(keyed(&format!("repeated-{}", number % 100))).await;
        bench.clock.advance(Duration::from_micros(SECONDS * 1_000_000 / REQUESTS));
    }
    let lookups = bench.engine.lookups().key_stats().calls - before;
    assert!(lookups <= 10 * (SECONDS + 1), "{lookups}");
}

#[tokio::test]
async fn banned_client_and_one_that_a_shield_refuses_cost_no_call_per_request() {
    let server = Server::redis();
    let path = "[[rules]]\nname = \"path\"\nby = [\"path\"]\nlimits = [\"1000/h\"]\n";

    // A ban in the store on one of the subjects, which the decision does not name.
    let bench = Bench::new(&server.url(), "banned", &format!("{OWN}{path}"));
    bench.engine.limiter().ban(b"ip:203.0.113.9", None).await.unwrap();
    let calls = bench.flood(|number| get(&format!("/{number}"))).await;
    println!("a ban of one of several subjects: {calls:?}");
    assert!(calls.decisions <= 10 * SECONDS, "{calls:?}");

    // A ban of a client at run time.
    let bench = Bench::new(&server.url(), "listed", &format!("{OWN}{path}"));
    bench.engine.limiter().list_ban("ip:203.0.113.9", None).await.unwrap();
    while !matches!(bench.outcome(get("/")).await, Outcome::Refused(tidegate::engine::Refusal::Banned { .. })) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let before = bench.engine.limiter().stats().store_calls;
    let calls = bench.flood(|number| get(&format!("/{number}"))).await;
    assert_eq!(calls.decisions, before, "a ban of a client at run time");

    let shield = "[[rules]]\nname = \"shield\"\nby = [\"ip\"]\nstore = \"memory\"\nlimits = [\"5/h\"]\n";
    let calls = Bench::new(&server.url(), "shield", &format!("{shield}{path}")).flood(|n| get(&format!("/{n}"))).await;
    assert_eq!((calls.decisions, calls.cached), (5, 0), "a shield: {calls:?}");
}
