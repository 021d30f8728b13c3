//! The HTTP listener as a subject of the conformance suite: one keep-alive connection, one request per check.

use serde_json::{Value, json};
use tidegate::{Check, Decision, Demand, LimitStatus, Source, Timestamp, Wait};
use tidegate_testkit::conformance::net_use::RefundImplementation;
use tidegate_testkit::conformance::{Abilities, Implementation};
use tidegate_testkit::http::{HttpClient, HttpResponse};

use crate::fixture::{Fixture, Names};

pub(crate) struct OverHttp<'d> {
    fixture: &'d Fixture,
    names: Names,
    client: HttpClient,
}

impl<'d> OverHttp<'d> {
    pub(crate) fn new(fixture: &'d Fixture) -> OverHttp<'d> {
        OverHttp { fixture, names: Names::unused(), client: HttpClient::open(fixture.http) }
    }
}

/// Posts a body. Returns the status and the body of the response.
fn post(client: &mut HttpClient, path: &str, body: &str) -> (u16, Value) {
    let response = client.ask("POST", path, &[], body);
    (response.status, response.json())
}

/// Sends a request, and returns its response.
pub(crate) fn exchange(client: &mut HttpClient, request: &str) -> HttpResponse {
    client.raw(request.as_bytes());
    client.receive().expect("a response")
}

/// Returns the body of a check: the short form for one demand, the list for several.
fn check_body(demands: &[Demand<'_>]) -> String {
    let entry = |demand: &Demand<'_>| {
        let key = std::str::from_utf8(demand.key.subject()).unwrap();
        json!({ "key": key, "limit": demand.limit.to_string(), "cost": demand.cost.units() })
    };
    match demands {
        [demand] => entry(demand).to_string(),
        demands => json!({ "checks": demands.iter().map(entry).collect::<Vec<_>>() }).to_string(),
    }
}

/// Parses an entry of `limits`.
fn limit_status(entry: &Value, demand: &Demand<'_>) -> LimitStatus {
    let number = |name: &str| entry[name].as_u64().unwrap_or_else(|| panic!("{name} in {entry}"));
    let wait = |name: &str| if entry[name].is_null() { Wait::NEVER } else { Wait::from_micros(number(name) * 1_000) };
    assert_eq!(number("window_ms"), demand.limit.window_us().div_ceil(1_000), "{entry}");
    LimitStatus {
        allowed: entry["allowed"].as_bool().unwrap(),
        cost: demand.cost.units(),
        quota: number("quota") as u32,
        remaining: number("remaining") as u32,
        retry_after: wait("retry_after_ms"),
        next_after: wait("next_after_ms"),
        reset_after: wait("reset_after_ms"),
        late_us: 0,
        refunded_before: 0,
    }
}

/// Returns a wait as a listener reports it: whole milliseconds, rounded up.
pub(crate) fn in_whole_ms(wait: Wait) -> Wait {
    wait.as_millis_ceil().map_or(Wait::NEVER, |ms| Wait::from_micros(ms * 1_000))
}

impl Implementation for OverHttp<'_> {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        self.fixture.clock.set(now);
        let names = self.names.clone();
        names.with(check.demands(), |demands| {
            let (status, body) = post(&mut self.client, "/v1/check", &check_body(demands));
            let limits = body["limits"].as_array().unwrap_or_else(|| panic!("{status}: {body}"));
            assert_eq!(limits.len(), demands.len(), "{body}");
            let limits = limits.iter().zip(demands).map(|(entry, demand)| limit_status(entry, demand)).collect();
            let decision = Decision::new(now, Source::Store, limits);
            assert_eq!(body["source"], "store", "{body}");
            assert_eq!(body["allowed"], decision.allowed(), "{body}");
            assert_eq!(status, if decision.allowed() { 200 } else { 429 }, "{body}");
            decision
        })
    }

    fn refund(&mut self, _: Timestamp, _: &Check<'_>, _: &Decision) {
        unreachable!("this listener has no refunds");
    }

    /// Resets by the limiter, because this listener has no resets.
    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        self.names.with(&[*demand], |demands| self.fixture.reset(now, &demands[0]));
    }

    fn as_seen(&self, mut decision: Decision) -> Decision {
        for line in &mut decision.limits {
            for wait in [&mut line.retry_after, &mut line.next_after, &mut line.reset_after] {
                *wait = in_whole_ms(*wait);
            }
        }
        decision
    }

    fn abilities(&self) -> Abilities {
        let fills = self.fixture.is_in_memory();
        Abilities { refunds: false, rules: false, microseconds: false, fills, ..Abilities::default() }
    }

    fn fill(&mut self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        self.names.with(&[*demand], |demands| self.fixture.fill(&demands[0], instants));
    }
}

/// The HTTP listener with refunds by receipts.
pub(crate) struct HttpReceipts<'d>(OverHttp<'d>);

impl<'d> HttpReceipts<'d> {
    pub(crate) fn new(fixture: &'d Fixture) -> HttpReceipts<'d> {
        HttpReceipts(OverHttp::new(fixture))
    }
}

impl RefundImplementation for HttpReceipts<'_> {
    type Charge = String;

    fn remaining(&mut self, now: Timestamp, demand: &Demand<'_>) -> u32 {
        self.0.remaining(now, demand)
    }

    fn charge(&mut self, now: Timestamp, demand: &Demand<'_>) -> Option<String> {
        self.0.fixture.clock.set(now);
        let (key, limit) = (self.0.names.name(demand), demand.limit.to_string());
        let body = json!({ "key": key, "limit": limit, "cost": demand.cost.units(), "receipt": true });
        let (status, body) = post(&mut self.0.client, "/v1/check", &body.to_string());
        assert_eq!(
            (status == 200, &body["source"]),
            (body["receipt"].is_string(), &json!("store")),
            "{status}: {body}"
        );
        body["receipt"].as_str().map(str::to_owned)
    }

    fn refund(&mut self, now: Timestamp, demand: &Demand<'_>, receipt: String, units: u32) {
        self.0.fixture.clock.set(now);
        let body = match demand.cost.units() - units {
            0 => json!({ "receipt": receipt }),
            used => json!({ "receipt": receipt, "used": used }),
        };
        let (_, body) = post(&mut self.0.client, "/v1/refund", &body.to_string());
        assert_eq!(body, json!({ "applied": true }));
    }
}
