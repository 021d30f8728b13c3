//! The HTTP door as a subject: one keep-alive connection, every check a question in JSON.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};
use tollgate::{Check, Decision, Demand, LimitStatus, Source, Timestamp, Wait};
use tollgate_testkit::conformance::{Abilities, Subject};

use crate::behind_doors::{BehindDoors, Names};

pub(crate) struct OverHttp<'d> {
    behind: &'d BehindDoors,
    names: Names,
    stream: BufReader<TcpStream>,
}

impl<'d> OverHttp<'d> {
    pub(crate) fn new(behind: &'d BehindDoors) -> OverHttp<'d> {
        let stream = TcpStream::connect(behind.http).unwrap();
        stream.set_nodelay(true).unwrap();
        OverHttp { behind, names: Names::unused(), stream: BufReader::new(stream) }
    }

    /// The status and the body.
    fn post(&mut self, body: &str) -> (u16, Value) {
        let request =
            format!("POST /v1/check HTTP/1.1\r\nhost: tollgate\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        self.stream.get_mut().write_all(request.as_bytes()).unwrap();
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line");
        let mut length = 0;
        while line != "\r\n" {
            line.clear();
            self.stream.read_line(&mut line).unwrap();
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim_end().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).unwrap();
        (status, serde_json::from_slice(&body).unwrap())
    }
}

/// One demand in the shorter form, several in the longer.
fn question(demands: &[Demand<'_>]) -> String {
    let one = |demand: &Demand<'_>| {
        let key = std::str::from_utf8(demand.key.subject()).unwrap();
        json!({ "key": key, "limit": demand.limit.to_string(), "cost": demand.cost.units() })
    };
    match demands {
        [demand] => one(demand).to_string(),
        demands => json!({ "checks": demands.iter().map(one).collect::<Vec<_>>() }).to_string(),
    }
}

fn line(told: &Value, demand: &Demand<'_>) -> LimitStatus {
    let number = |name: &str| told[name].as_u64().unwrap_or_else(|| panic!("{name} in {told}"));
    let wait = |name: &str| match told[name].is_null() {
        true => Wait::NEVER,
        false => Wait::from_micros(number(name) * 1_000),
    };
    assert_eq!(number("window_ms"), demand.limit.window_us().div_ceil(1_000), "{told}");
    LimitStatus {
        allowed: told["allowed"].as_bool().unwrap(),
        cost: demand.cost.units(),
        quota: number("quota") as u32,
        remaining: number("remaining") as u32,
        retry_after: wait("retry_after_ms"),
        next_after: wait("next_after_ms"),
        reset_after: wait("reset_after_ms"),
    }
}

/// A wait as a door tells it: whole milliseconds, rounded up.
pub(crate) fn in_whole_ms(wait: Wait) -> Wait {
    wait.as_millis_ceil().map_or(Wait::NEVER, |ms| Wait::from_micros(ms * 1_000))
}

impl Subject for OverHttp<'_> {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        self.behind.clock.set(now);
        let names = self.names.clone();
        names.with(check.demands(), |demands| {
            let (status, told) = self.post(&question(demands));
            let lines = told["limits"].as_array().unwrap_or_else(|| panic!("{status}: {told}"));
            assert_eq!(lines.len(), demands.len(), "{told}");
            let lines = lines.iter().zip(demands).map(|(told, demand)| line(told, demand)).collect();
            let decision = Decision { at: now, source: Source::Store, limits: lines };
            assert_eq!(told["source"], "store", "{told}");
            assert_eq!(told["allowed"], decision.allowed(), "{told}");
            assert_eq!(status, if decision.allowed() { 200 } else { 429 }, "{told}");
            decision
        })
    }

    fn refund(&mut self, _: Timestamp, _: &Check<'_>, _: &Decision) {
        unreachable!("the door takes no refunds");
    }

    /// There is no such question at this door: the limiter behind it is told.
    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        self.names.with(&[*demand], |demands| self.behind.reset(now, &demands[0]));
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
        let fills = self.behind.is_in_memory();
        Abilities { refunds: false, rules: false, microseconds: false, fills, ..Abilities::default() }
    }

    fn fill(&mut self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        self.names.with(&[*demand], |demands| self.behind.fill(&demands[0], instants));
    }
}
