//! Clients that are refunded in every order, to get more than their limit: over HTTP, over RESP and by the library.
//!
//! Each has a counter of its own, so that it alone decides the order of charges and refunds. In the long form, clients of
//! several instances also share a counter.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::redis::RedisStore;
use tidegate::{Check, Decision, Demand, Limit, Limiter, Source, Timestamp};
use tidegate_testkit::conformance::Implementation;
use tidegate_testkit::conformance::net_use::{RefundImplementation, keeps_the_limit_in_real_time};
use tidegate_testkit::server::{Brand, Cluster, Connection, Server};
use tokio::runtime::Runtime;

use crate::campaign::{is_long, random, record, scale};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::Serving;

/// One limit of each algorithm. All units are available again after 400 ms without a charge.
const LIMITS: [&str; 6] = [
    "100/s token-bucket burst=40",
    "100/s leaky-bucket queue=39",
    "40/400ms",
    "40/400ms sliding-log",
    "40/400ms sliding-counter",
    "40/400ms fixed-window",
];
/// A deadline that does not pass on a busy machine: all decisions must be of the store.
const DEADLINE: Duration = Duration::from_secs(20);

/// A client of a service, which refunds by receipts.
enum ReceiptClient {
    Http(HttpClient),
    Resp(Connection),
}

impl ReceiptClient {
    fn post(client: &mut HttpClient, path: &str, body: &Value) -> Value {
        serde_json::from_str(&client.ask("POST", path, &[], &body.to_string()).body).unwrap()
    }

    /// Checks `cost` units, and returns the remaining units and the receipt of an admission.
    fn check(&mut self, demand: &Demand<'_>, cost: u32) -> (u32, Option<String>) {
        let (key, limit) = (std::str::from_utf8(demand.key.subject()).unwrap(), demand.limit.to_string());
        match self {
            ReceiptClient::Http(client) => {
                let body = json!({ "key": key, "limit": limit, "cost": cost, "receipt": true });
                let body = ReceiptClient::post(client, "/v1/check", &body);
                assert!(body["allowed"] == false || body["source"] == "store", "{body}");
                let remaining = body["limits"][0]["remaining"].as_u64().unwrap_or_else(|| panic!("{body}"));
                (remaining as u32, body["receipt"].as_str().map(str::to_owned))
            }
            ReceiptClient::Resp(connection) => {
                let cost = cost.to_string();
                let reply = connection.call(&["TIDEGATE.CHECK", key, &limit, "COST", &cost, "RECEIPT"]).unwrap();
                let [allowed, _, remaining, .., receipt] = reply.items() else { panic!("{reply:?}") };
                let is_charged = allowed.integer() == 1 && cost != "0";
                (remaining.integer() as u32, is_charged.then(|| receipt.text()))
            }
        }
    }
}

impl RefundImplementation for ReceiptClient {
    type Charge = String;

    fn remaining(&mut self, _: Timestamp, demand: &Demand<'_>) -> u32 {
        self.check(demand, 0).0
    }

    fn charge(&mut self, _: Timestamp, demand: &Demand<'_>) -> Option<String> {
        self.check(demand, demand.cost.units()).1
    }

    fn refund(&mut self, _: Timestamp, demand: &Demand<'_>, receipt: String, units: u32) {
        let used = demand.cost.units() - units;
        match self {
            ReceiptClient::Http(client) => {
                let body = ReceiptClient::post(client, "/v1/refund", &json!({ "receipt": receipt, "used": used }));
                assert_eq!(body, json!({ "applied": true }));
            }
            ReceiptClient::Resp(connection) => {
                let command = ["TIDEGATE.REFUND", &receipt, "USED", &used.to_string()];
                assert_eq!(connection.call(&command).unwrap().integer(), 1);
            }
        }
    }
}

/// The library, in this process.
struct Library {
    runtime: Arc<Runtime>,
    limiter: Limiter,
}

impl Implementation for Library {
    fn check(&mut self, _: Timestamp, check: &Check<'_>) -> Decision {
        let decision = self.runtime.block_on(self.limiter.check(check)).unwrap();
        assert!(!decision.allowed() || decision.source == Source::Store, "{decision:?}");
        decision
    }

    fn refund(&mut self, _: Timestamp, check: &Check<'_>, decision: &Decision) {
        self.runtime.block_on(self.limiter.refund(check, decision)).unwrap();
    }

    fn reset(&mut self, _: Timestamp, demand: &Demand<'_>) {
        self.runtime.block_on(self.limiter.reset(demand)).unwrap();
    }
}

/// Returns a limiter with counters of its own, or on this store.
fn limiter(url: Option<&str>) -> Limiter {
    let builder = Limiter::builder().deadline(DEADLINE);
    let Some(url) = url else { return builder.build() };
    builder.store(Arc::new(RedisStore::builder(url).call_timeout(DEADLINE).build().unwrap())).build()
}

/// Two instances on a store, or one with its counters in memory.
fn refunds_keep_the_limit(place: &str, url: Option<&str>) {
    let dir = tempfile::tempdir().unwrap();
    let [file, secret] = ["tidegate.toml", "secret"].map(|name| dir.path().join(name).to_str().unwrap().to_owned());
    std::fs::write(&file, format!("deadline = '{}s'\n", DEADLINE.as_secs())).unwrap();
    std::fs::write(&secret, "a-receipt-secret-for-tests").unwrap();
    let mut arguments = vec!["--config", &file, "--receipt-secret-file", &secret];
    arguments.extend(url.iter().flat_map(|url| ["--store", url]));
    let instances: Vec<Serving> = (0..if url.is_some() { 2 } else { 1 }).map(|_| Serving::start(&arguments)).collect();
    let (first, last) = (&instances[0], &instances[instances.len() - 1]);
    let over_http = || ReceiptClient::Http(HttpClient::open(&first.http));
    let over_resp = || ReceiptClient::Resp(last.connect());

    let runtime = Arc::new(tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());
    let by_library = || {
        let _context = runtime.enter();
        Library { runtime: runtime.clone(), limiter: limiter(url) }
    };
    let scenario = &format!("refunds, {place}");
    let seed = random(scenario).below(1 << 32);
    std::thread::scope(|scope| {
        for text in LIMITS {
            let limit: Limit = text.parse().unwrap();
            scope.spawn(move || attack(scenario, "HTTP", &limit, seed, vec![over_http()]));
            scope.spawn(move || attack(scenario, "RESP", &limit, seed, vec![over_resp()]));
            scope.spawn(move || attack(scenario, "library", &limit, seed, vec![by_library()]));
            if is_long() {
                let clients = vec![over_http(), over_resp(), over_http(), over_resp()];
                scope.spawn(move || attack(scenario, "HTTP and RESP together", &limit, seed, clients));
            }
        }
    });
}

/// Runs clients on a counter of this name, and reports their net use.
fn attack<S: RefundImplementation + Send>(scenario: &str, name: &str, limit: &Limit, seed: u64, clients: Vec<S>) {
    let net_use = keeps_the_limit_in_real_time(limit, name, scale(1, 20), seed, clients)
        .unwrap_or_else(|violation| panic!("{name}: {violation}"));
    record(scenario, &format!("{limit}, {name}"), net_use);
}

#[test]
fn refunds_keep_the_limit_in_memory() {
    refunds_keep_the_limit("memory", None);
}

#[test]
fn refunds_keep_the_limit_on_redis() {
    let redis = Server::redis();
    refunds_keep_the_limit("Redis", Some(&redis.url()));
}

#[test]
fn refunds_keep_the_limit_on_a_cluster() {
    for brand in &Brand::ALL[..scale(1, 2)] {
        refunds_keep_the_limit(&format!("{brand} Cluster"), Some(&Cluster::shared(*brand).url()));
    }
}
