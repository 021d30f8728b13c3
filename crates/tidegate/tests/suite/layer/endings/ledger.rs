//! The expected charges of the endings, and their comparison with headers and counters.

use std::fmt::Write;
use std::sync::Arc;

use tidegate::config::{Config, Format};
use tidegate::engine::Engine;
use tidegate::rules::RuleSet;
use tidegate::{Demand, Key, Limiter, ManualClock, MemoryStore, Scope, Timestamp};

use crate::layer::site::parse_ratelimit;

/// More than the cost of all requests of a run, so that none is refused.
pub(crate) const QUOTA: u32 = 100_000;
/// The client of all requests.
pub(crate) const PEER: [u8; 4] = [203, 0, 113, 9];
const SUBJECT: &str = "ip:203.0.113.9";

const CHARGES: [&str; 3] = ["always", "on_failure", "on_success"];
const MODES: [&str; 2] = ["enforce", "shadow"];
/// One limit of each state machine. No unit expires during a run.
const LIMITS: [(&str, &str); 3] =
    [("log", "100000/day"), ("pair", "100000/day fixed-window"), ("bucket", "100000/365day token-bucket burst=100000")];

/// Returns a rule for every charge and mode, with a limit of every kind.
pub(crate) fn rules() -> RuleSet {
    let mut text = String::new();
    for (charge, mode) in CHARGES.iter().flat_map(|charge| MODES.map(|mode| (charge, mode))) {
        let name = rule_name(charge, mode);
        let limits = LIMITS.map(|(kind, limit)| format!("{{ name = '{charge}-{kind}', limit = '{limit}' }}"));
        let limits = limits.join(", ").replace("on_", "on-");
        writeln!(text, "[[rules]]\nname = '{name}'\nby = ['ip']\ncharge = '{charge}'\nmode = '{mode}'").unwrap();
        writeln!(text, "limits = [{limits}]").unwrap();
    }
    Config::from_text(&text, Format::Toml).unwrap_or_else(|report| panic!("{report:?}")).rules
}

/// Creates a clock that does not advance, so that no unit expires.
pub(crate) fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)))
}

/// Creates an engine with these rules and counters in memory.
pub(crate) fn engine_in_process() -> Engine {
    let clock = clock();
    let memory = MemoryStore::builder().clock(clock.clone()).build();
    let limiter = Limiter::builder().memory(memory).clock(clock.clone()).build();
    Engine::on_clock(limiter, rules(), Vec::new(), clock)
}

fn rule_name(charge: &str, mode: &str) -> String {
    format!("{charge}-{mode}").replace('_', "-")
}

/// Units of admitted requests, by how the requests ended.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Ledger {
    pub(crate) succeeded: u32,
    pub(crate) failed: u32,
    /// Units of requests without a response.
    pub(crate) unanswered: u32,
}

impl Ledger {
    pub(crate) fn note(&mut self, cost: u32, succeeded: bool) {
        *(if succeeded { &mut self.succeeded } else { &mut self.failed }) += cost;
    }

    pub(crate) fn add(&mut self, other: Ledger) {
        self.succeeded += other.succeeded;
        self.failed += other.failed;
        self.unanswered += other.unanswered;
    }

    fn remaining(&self, charge: &str) -> u32 {
        QUOTA
            - self.unanswered
            - match charge {
                "on_failure" => self.failed,
                "on_success" => self.succeeded,
                _ => self.failed + self.succeeded,
            }
    }

    /// Asserts that a `RateLimit` header shows these charges for the enforced rules.
    pub(crate) fn expect_header(&self, ratelimit: &str, context: &str) {
        let policies = parse_ratelimit(ratelimit).into_iter();
        let got: Vec<(String, i64)> = policies.map(|policy| (policy.name, policy.remaining)).collect();
        let expected: Vec<(String, i64)> = CHARGES
            .iter()
            .flat_map(|charge| LIMITS.map(|(kind, _)| (charge, kind)))
            .map(|(charge, kind)| (format!("{charge}-{kind}").replace('_', "-"), self.remaining(charge).into()))
            .collect();
        assert_eq!(got, expected, "{context}; {self:?}");
    }

    /// Asserts that the counters of all rules, shadow rules included, show these charges.
    pub(crate) async fn expect_counters(&self, engine: &Engine, context: &str) {
        for (charge, mode) in CHARGES.iter().flat_map(|charge| MODES.map(|mode| (charge, mode))) {
            for (kind, limit) in LIMITS {
                let (rule, name) = (rule_name(charge, mode), format!("{charge}-{kind}").replace('_', "-"));
                let key = Key::scoped(SUBJECT, Scope::rule(&rule, &name)).unwrap();
                let line = engine.limiter().inspect(&Demand::new(limit.parse().unwrap(), key)).await.unwrap();
                assert_eq!(line.remaining, self.remaining(charge), "{rule}, {kind}; {context}; {self:?}");
            }
        }
    }
}

/// Returns the seed of the run: `TIDEGATE_SEED`, or 1 if it is not set.
pub(crate) fn seed() -> u64 {
    std::env::var("TIDEGATE_SEED").map_or(1, |text| text.parse().expect("TIDEGATE_SEED is a number"))
}
