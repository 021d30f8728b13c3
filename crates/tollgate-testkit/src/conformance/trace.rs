//! A trace: a few limits, and operations on them in time. Made from bytes, so that a seed or a fuzzer can make one.
//!
//! **Two kinds of time.** A store may forget a counter once it has expired under the limit it was last written with. While time
//! only goes forward nobody can tell; if the clock then steps back, or the limit changes to one that would have kept
//! the counter alive, one can. So a trace is one of two kinds:
//!
//! | | keys | clock | limits change | expired counters |
//! |---|---|---|---|---|
//! | forward | several | only forward | quotas, where the state's life does not depend on them | stay, or not |
//! | wandering | one fixed set, all asked in each check | forward and back | quota, options and (of rules) window | are reset |

mod bytes;
mod long;
mod within;

use std::fmt;

use tollgate_core::{Check, CheckError, Cost, Demand, Key, Limit, Scope, Timestamp};

use super::Abilities;

const SLOT_NAMES: [&str; 3] = ["a", "b", "c"];
/// The number of the newest receipt, however many there are.
pub(super) const NEWEST: usize = usize::MAX;
const SUBJECTS: [&str; 4] = ["k0", "k1", "k2", "k3"];

/// Limits, a starting time, and what happens.
#[derive(Clone, PartialEq, Debug)]
pub struct Trace {
    /// When it begins.
    pub start: Timestamp,
    /// Whether the clock may step back; then every check asks for every slot of the first key.
    pub wandering: bool,
    /// The limits at the beginning.
    pub slots: Vec<Slot>,
    /// What happens, in order.
    pub operations: Vec<Operation>,
}

/// A place for a limit. The limit may change; the place keeps its name.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Slot {
    /// What is asked.
    pub limit: Limit,
    /// Whether it counts as a rule's limit (by name) or as an explicit one (by algorithm and window).
    pub in_rule: bool,
}

/// One thing that happens.
#[derive(Clone, PartialEq, Debug)]
pub enum Operation {
    /// Time moves.
    Move(Step),
    /// A request asks.
    Check(Vec<Ask>),
    /// Many units are admitted one after the other, for the first key: as many as fit, and before anything leaves.
    Fill {
        /// Against what.
        slot: usize,
        /// How many at most.
        count: u64,
        /// Microseconds from one to the next.
        step_us: u64,
    },
    /// One of the admitted and not yet refunded checks is taken back: the nth, counted around.
    Refund {
        /// Which; `usize::MAX` is the last.
        nth: usize,
        /// With the slots' limits as they are by then, not as they were.
        with_present_limits: bool,
    },
    /// A counter is forgotten (in a wandering trace: all of them).
    Reset(Ask),
    /// A limit changes.
    Change {
        /// Whose.
        slot: usize,
        /// To what.
        limit: Limit,
    },
}

/// One line of a check.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ask {
    /// Who.
    pub key: usize,
    /// Against what.
    pub slot: usize,
    /// For how much.
    pub cost: u32,
}

/// How time moves.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Step {
    /// Forward.
    By(u64),
    /// Backward.
    Back(u64),
    /// To the next edge of a slot's window, or this far from it; never backward.
    ToEdge {
        /// Whose window.
        slot: usize,
        /// Microseconds after the edge.
        offset_us: i64,
    },
    /// To the moment that the last decision named, or this far from it; never backward.
    ToRetry {
        /// Microseconds after that moment.
        offset_us: i64,
    },
}

impl Step {
    /// Where the clock then stands, given where it stands, what moment was last named, and the limits.
    pub fn from(self, now: Timestamp, retry_at: Timestamp, slots: &[Slot]) -> Timestamp {
        let shifted = |instant: Timestamp, us: i64| match us {
            0.. => instant.plus_micros(us.unsigned_abs()),
            _ => instant.minus_micros(us.unsigned_abs()),
        };
        match self {
            Step::By(us) => now.plus_micros(us),
            Step::Back(us) => now.minus_micros(us),
            Step::ToEdge { slot, offset_us } => {
                let window_us = slots[slot].limit.window_us();
                let to_edge_us = window_us - now.as_micros() % window_us;
                shifted(now.plus_micros(to_edge_us), offset_us).max(now)
            }
            Step::ToRetry { offset_us } => shifted(retry_at, offset_us).max(now),
        }
    }
}

impl Trace {
    /// What a subject must be able to do for this trace.
    pub fn needs(&self) -> Abilities {
        let checks = || {
            self.operations.iter().filter_map(|operation| match operation {
                Operation::Check(asks) => Some(asks),
                _ => None,
            })
        };
        let several = |asks: &[Ask]| asks.iter().any(|ask| ask.key != asks[0].key);
        Abilities {
            refunds: self.operations.iter().any(|operation| matches!(operation, Operation::Refund { .. })),
            rules: self.slots.iter().any(|slot| slot.in_rule),
            several_limits: checks().any(|asks| asks.len() > 1),
            several_subjects: checks().any(|asks| several(asks)),
            microseconds: false,
            fills: self.operations.iter().any(|operation| matches!(operation, Operation::Fill { .. })),
        }
    }
}

impl Ask {
    /// The demand that this means under these limits.
    pub fn demand(&self, slots: &[Slot]) -> Demand<'static> {
        let slot = &slots[self.slot];
        let rule = Scope::rule("trace", SLOT_NAMES[self.slot]);
        let scope = if slot.in_rule { rule } else { Scope::Explicit };
        let key = Key::scoped(SUBJECTS[self.key], scope).expect("the subjects of traces are short");
        Demand::new(slot.limit, key).cost(Cost::new(self.cost))
    }
}

/// The demands of these asks, without those that would count on a counter a second time.
pub(super) fn demands(asks: &[Ask], slots: &[Slot]) -> Vec<Demand<'static>> {
    let mut demands: Vec<Demand<'static>> = asks.iter().map(|ask| ask.demand(slots)).collect();
    while let Err(CheckError::SameCounter { second, .. }) = Check::new(&demands) {
        demands.remove(second);
    }
    demands
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.wandering { "wandering" } else { "forward" };
        writeln!(f, "a {kind} trace from {:?}", self.start)?;
        for (name, slot) in SLOT_NAMES.iter().zip(&self.slots) {
            writeln!(f, "  {name} = {}{}", slot.limit, if slot.in_rule { " (a rule's)" } else { "" })?;
        }
        for (number, operation) in self.operations.iter().enumerate() {
            writeln!(f, "  {number:3}. {operation}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::Move(Step::By(us)) => write!(f, "+{us}µs"),
            Operation::Move(Step::Back(us)) => write!(f, "-{us}µs"),
            Operation::Move(Step::ToEdge { slot, offset_us }) => {
                write!(f, "to the next window of {}, {offset_us:+}µs", SLOT_NAMES[*slot])
            }
            Operation::Move(Step::ToRetry { offset_us }) => write!(f, "to the last retry_after, {offset_us:+}µs"),
            Operation::Check(asks) => {
                f.write_str("check")?;
                asks.iter().try_for_each(|ask| write!(f, " {ask}"))
            }
            Operation::Fill { slot, count, step_us } => {
                write!(f, "fill {} with up to {count}, one every {step_us}µs", SLOT_NAMES[*slot])
            }
            Operation::Refund { nth, with_present_limits } => {
                write!(f, "refund #{nth}{}", if *with_present_limits { " by the present limits" } else { "" })
            }
            Operation::Reset(ask) => write!(f, "reset {} {}", SUBJECTS[ask.key], SLOT_NAMES[ask.slot]),
            Operation::Change { slot, limit } => write!(f, "{} becomes {limit}", SLOT_NAMES[*slot]),
        }
    }
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}×{}", SUBJECTS[self.key], SLOT_NAMES[self.slot], self.cost)
    }
}
