//! One suite for everything that decides: oracle, memory, Redis, and whatever stands behind a door.
//!
//! The product promises the same verdict everywhere. So there is one list of behaviours and one
//! source of random traffic, and each implementation is a [`Subject`] that is put through both:
//!
//! ```text
//!   named cases      scripts with literal expectations; the oracle passes them first
//!   random traces    subject and oracle side by side, every field of every decision
//!   properties       what each algorithm promises, whatever the traffic
//! ```
//!
//! An implementation joins in five lines:
//!
//! ```
//! use tollgate_core::{Check, Decision, Demand, Timestamp};
//! use tollgate_testkit::conformance::{self, Subject};
//! use tollgate_testkit::oracle::Oracle;
//!
//! struct Mine(Oracle);
//! impl Subject for Mine {
//!     fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision { self.0.check(now, check) }
//!     fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) { self.0.refund(now, check, decision) }
//!     fn reset(&mut self, _: Timestamp, demand: &Demand<'_>) { self.0.reset(demand) }
//! }
//! conformance::random_traces(3, 1, || Mine(Oracle::new())).expect("the oracle agrees with itself");
//! ```
//!
//! A failing trace is shrunk and printed as a script; it then becomes a named case.

pub mod accuracy;
pub mod cases;
mod compare;
mod memory;
pub mod properties;
mod random;
mod script;
mod shrink;
mod trace;

pub use compare::{Difference, compare};
pub use memory::InMemory;
pub use random::{Failure, Random, long_traces, random_traces, random_traces_of, traces_from_env};
pub use script::{Case, CaseFailure};
pub use trace::{Ask, Operation, Slot, Step, Trace};

use tollgate_core::{Check, Cost, Decision, Demand, Timestamp};

use crate::oracle::Oracle;

/// Something that decides at an injected time. An error of a store is a panic: the suite expects none.
pub trait Subject {
    /// Decides at `now`.
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision;

    /// Takes back at `now` what `decision` charged.
    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision);

    /// Forgets one counter.
    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>);

    /// How this subject shows a decision: a door that tells milliseconds rounds the expected one here.
    fn as_seen(&self, decision: Decision) -> Decision {
        decision
    }

    /// What this subject can be asked for.
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    /// One unit admitted at each of these instants. For subjects that know a faster way than one by one.
    fn fill(&mut self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        let demand = demand.cost(Cost::ONE);
        for now in instants {
            let decision = self.check(now, &Check::one(&demand));
            assert!(decision.allowed(), "filling up at {now:?}: {decision:?}");
        }
    }
}

/// What a subject can be asked for. Doors translate only part of what a store can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// It takes refunds.
    pub refunds: bool,
    /// It takes the scope of a rule, and so a changed window.
    pub rules: bool,
    /// It decides atomically over several limits.
    pub several_limits: bool,
    /// It decides atomically over several subjects.
    pub several_subjects: bool,
    /// It tells waits to the microsecond.
    pub microseconds: bool,
    /// It is quick enough to be filled with a hundred thousand admissions.
    pub fills: bool,
}

impl Default for Abilities {
    fn default() -> Abilities {
        Abilities {
            refunds: true,
            rules: true,
            several_limits: true,
            several_subjects: true,
            microseconds: true,
            fills: true,
        }
    }
}

impl Abilities {
    /// Whether everything that is needed is there.
    pub fn cover(self, needed: Abilities) -> bool {
        (self.refunds || !needed.refunds)
            && (self.rules || !needed.rules)
            && (self.several_limits || !needed.several_limits)
            && (self.several_subjects || !needed.several_subjects)
            && (self.microseconds || !needed.microseconds)
            && (self.fills || !needed.fills)
    }
}

impl Subject for Oracle {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        Oracle::check(self, now, check)
    }
    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        Oracle::refund(self, now, check, decision);
    }
    fn reset(&mut self, _: Timestamp, demand: &Demand<'_>) {
        Oracle::reset(self, demand);
    }
    fn fill(&mut self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        self.recall(demand, instants);
    }
}
