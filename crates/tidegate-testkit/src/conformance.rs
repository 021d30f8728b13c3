//! The conformance suite for everything that decides: oracle, memory, Redis and every endpoint.
//!
//! Tidegate promises the same verdict everywhere. So there is one list of behaviours and one source of random traffic,
//! and both run against each implementation, as a [`Implementation`]:
//!
//! ```text
//!   named cases      scripts with literal expectations; the oracle must pass them, too
//!   random traces    implementation and oracle must agree in every field of every decision, except its source
//!   properties       guarantees of each algorithm under any traffic
//!   net use          the guarantee of each algorithm for what is charged and not refunded
//! ```
//!
//! Adding an implementation takes five lines:
//!
//! ```
//! use tidegate_core::{Check, Decision, Demand, Timestamp};
//! use tidegate_testkit::conformance::{self, Implementation};
//! use tidegate_testkit::oracle::Oracle;
//!
//! struct Mine(Oracle);
//! impl Implementation for Mine {
//!     fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision { self.0.check(now, check) }
//!     fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) { self.0.refund(now, check, decision) }
//!     fn reset(&mut self, _: Timestamp, demand: &Demand<'_>) { self.0.reset(demand) }
//! }
//! conformance::random_traces(3, 1, || Mine(Oracle::new())).expect("the oracle agrees with itself");
//! ```
//!
//! A failing trace is shrunk and printed as a script, which can then be added as a named case.

pub mod accuracy;
pub mod cases;
mod compare;
mod memory;
pub mod net_use;
pub mod properties;
mod random;
mod redeeming;
mod script;
mod shrink;
mod trace;

pub use compare::{Difference, compare};
pub use memory::InMemory;
pub use random::{Failure, Random, long_traces, random_traces, random_traces_of, traces_from_env};
pub use redeeming::{Redeem, Redeeming, random_redemptions};
pub use script::{Case, CaseFailure};
pub use trace::{Operation, Slot, Step, Trace, TraceDemand};

use tidegate_core::{Check, Cost, Decision, Demand, Timestamp};

use crate::oracle::Oracle;

/// An implementation under test. The suite passes the time of each operation, which may be earlier than the last one.
///
/// Implementations panic if their store returns an error, since the suite expects none.
pub trait Implementation {
    /// Decides a check at `now`, and charges its units if it is admitted.
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision;

    /// Refunds at `now` the units that `decision` charged for `check`, as far as they still count.
    ///
    /// `decision` is always an admission. The limits of `check` may have changed since.
    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision);

    /// Deletes the counter of `demand`. The cost is ignored.
    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>);

    /// Converts an expected decision to the form in which this implementation returns it, before the two are compared.
    ///
    /// For example, an endpoint that returns milliseconds rounds the waits. The default returns the decision unchanged.
    fn as_seen(&self, decision: Decision) -> Decision {
        decision
    }

    /// Returns the abilities of this implementation, which select the cases and traces that run on it. Defaults to all.
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    /// Charges one unit of `demand` at each of these instants, which are ascending. There must be room for all of them.
    ///
    /// The cost of `demand` is ignored. There may be no instants.
    ///
    /// The default makes one check per instant and panics if one is denied. Override it if there is a faster way.
    fn fill(&mut self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        let demand = demand.cost(Cost::ONE);
        for now in instants {
            let decision = self.check(now, &Check::one(&demand));
            assert!(decision.allowed(), "filling up at {now:?}: {decision:?}");
        }
    }
}

/// What a [`Implementation`] supports, or what a case or trace needs. An endpoint supports less than a store. Defaults to all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// Supports refunds.
    pub refunds: bool,
    /// Supports limits in the scope of a rule, whose window may change.
    pub rules: bool,
    /// Decides several limits in one check.
    pub several_limits: bool,
    /// Decides several subjects in one check.
    pub several_subjects: bool,
    /// Returns waits in microseconds.
    pub microseconds: bool,
    /// Is fast enough for 100,000 admissions in one case.
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
    /// Returns whether each ability that is set in `needed` is set in `self`, too.
    pub fn cover(self, needed: Abilities) -> bool {
        (self.refunds || !needed.refunds)
            && (self.rules || !needed.rules)
            && (self.several_limits || !needed.several_limits)
            && (self.several_subjects || !needed.several_subjects)
            && (self.microseconds || !needed.microseconds)
            && (self.fills || !needed.fills)
    }
}

impl Implementation for Oracle {
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
        self.charge_at(demand, instants);
    }
}
