//! A trace: a few limits and a list of operations on them. Any bytes give a trace, so that a seed or a fuzzer can make
//! one.
//!
//! **Two kinds of traces.** A store may delete a counter that has expired under the limit it was last written with.
//! While time goes forward, that makes no difference. It does if the clock then steps back, or if the limit changes to
//! one under which the counter would not have expired. So there are two kinds of traces, for which the decisions are
//! determined:
//!
//! | | keys | clock | limits change | expired counters |
//! |---|---|---|---|---|
//! | forward | several | only forward | quotas, where the lifetime does not depend on them | may exist or not |
//! | wandering | one fixed set, all used in each check | forward and back | quota, options and (of rules) window | are reset |

mod bytes;
mod long;
mod within;

use std::fmt;

use tidegate_core::{Check, CheckError, Cost, Demand, Key, Limit, Scope, Timestamp};

use super::Abilities;

const SLOT_NAMES: [&str; 3] = ["a", "b", "c"];
/// As `nth` of a refund: the newest admitted check.
pub(super) const NEWEST: usize = usize::MAX;
const SUBJECTS: [&str; 4] = ["k0", "k1", "k2", "k3"];

/// A list of operations on a few limits, from a start time. `Display` prints it as a script.
#[derive(Clone, PartialEq, Debug)]
pub struct Trace {
    /// The time of the first operation.
    pub start: Timestamp,
    /// Whether the clock may step back. Every check then uses every slot, with the first key.
    pub wandering: bool,
    /// The limits at the start.
    pub slots: Vec<Slot>,
    /// The operations, in order.
    pub operations: Vec<Operation>,
}

/// A place for a limit in a trace, which operations refer to by index. [`Operation::Change`] replaces the limit in it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Slot {
    /// The limit.
    pub limit: Limit,
    /// Whether the limit belongs to a rule (its counter stays when the limit changes) or to explicit checks (a limit
    /// with another algorithm or window has another counter).
    pub in_rule: bool,
}

/// One operation of a trace.
#[derive(Clone, PartialEq, Debug)]
pub enum Operation {
    /// Moves the clock.
    Move(Step),
    /// Checks these demands together.
    Check(Vec<TraceDemand>),
    /// Checks one unit for the first key, then admits single units, one after the other: as many as remain and fit
    /// before the next unit expires. The clock moves to the last of them.
    Fill {
        /// The slot of the limit.
        slot: usize,
        /// The most units, without that of the first check.
        count: u64,
        /// The time from one unit to the next, in microseconds.
        step_us: u64,
    },
    /// Refunds one of the admitted and not yet refunded checks: the nth, modulo their number.
    Refund {
        /// The index of the check; `usize::MAX` is the newest.
        nth: usize,
        /// Whether the refund uses the present limits of the slots, not those of the check.
        with_present_limits: bool,
    },
    /// Deletes a counter; in a wandering trace, all counters.
    Reset(TraceDemand),
    /// Changes a limit.
    Change {
        /// The slot of the limit.
        slot: usize,
        /// The new limit.
        limit: Limit,
    },
}

/// One demand of a check in a trace: units of the limit in a slot, for a subject.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TraceDemand {
    /// The index of the subject, from 0 to 3.
    pub key: usize,
    /// The index of the slot.
    pub slot: usize,
    /// The units.
    pub cost: u32,
}

/// A movement of the clock.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Step {
    /// Forward by microseconds.
    By(u64),
    /// Back by microseconds.
    Back(u64),
    /// To the next edge of a slot's window plus an offset, but never back.
    ToEdge {
        /// The slot of the window.
        slot: usize,
        /// Microseconds after the edge.
        offset_us: i64,
    },
    /// To the end of the last `retry_after` plus an offset, but never back.
    ToRetry {
        /// Microseconds after that time.
        offset_us: i64,
    },
}

impl Step {
    /// Returns the time after this movement of the clock from `now`.
    ///
    /// `retry_at` is the end of the `retry_after` of the last check, or its time if that is
    /// [never](tidegate_core::Wait). `slots` are the current limits. An edge of a window is a multiple of its length
    /// since 1970; the next one is always after `now`.
    ///
    /// # Panics
    /// If the slot of an edge is not in `slots`.
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
    /// Returns the abilities that an implementation needs for this trace.
    pub fn needs(&self) -> Abilities {
        let checks = || {
            self.operations.iter().filter_map(|operation| match operation {
                Operation::Check(asks) => Some(asks),
                _ => None,
            })
        };
        let several = |asks: &[TraceDemand]| asks.iter().any(|ask| ask.key != asks[0].key);
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

impl TraceDemand {
    /// Returns the demand with the limit that its slot has in `slots`.
    ///
    /// # Panics
    /// If the index of the slot or of the subject is out of range.
    pub fn demand(&self, slots: &[Slot]) -> Demand<'static> {
        let slot = &slots[self.slot];
        let rule = Scope::rule("trace", SLOT_NAMES[self.slot]);
        let scope = if slot.in_rule { rule } else { Scope::Explicit };
        let key = Key::scoped(SUBJECTS[self.key], scope).expect("the subjects of traces are short");
        Demand::new(slot.limit, key).cost(Cost::new(self.cost))
    }
}

/// Returns the demands of a check under the limits of `slots`. Of several demands on one counter, only the first is
/// kept.
pub(super) fn demands(asks: &[TraceDemand], slots: &[Slot]) -> Vec<Demand<'static>> {
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
                write!(f, "refund #{nth}{}", if *with_present_limits { " with the present limits" } else { "" })
            }
            Operation::Reset(ask) => write!(f, "reset {} {}", SUBJECTS[ask.key], SLOT_NAMES[ask.slot]),
            Operation::Change { slot, limit } => write!(f, "{} becomes {limit}", SLOT_NAMES[*slot]),
        }
    }
}

impl fmt::Display for TraceDemand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}×{}", SUBJECTS[self.key], SLOT_NAMES[self.slot], self.cost)
    }
}
