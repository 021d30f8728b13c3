//! Reduces a trace to the abilities of an implementation.
//!
//! Most random traces contain a refund, a rule or a check of several limits. An endpoint that supports none of these
//! could run hardly any of them. So the unsupported operations are removed, and the rest stays. The reduced trace still
//! determines its decisions (see the two kinds of traces): a wandering trace uses every counter in each check, and no
//! two buckets share one.

use tidegate_core::Limit;

use super::{Abilities, Operation, Slot, Step, Trace, TraceDemand};

impl Trace {
    /// Removes the operations and limits that an implementation with these abilities does not support.
    ///
    /// Checks keep only their first limit without `several_limits`, and limits of rules become explicit without
    /// `rules`.
    ///
    /// Returns `None` if the rest still needs more, or if two buckets of rules would share a counter outside of rules.
    pub fn within(mut self, abilities: Abilities) -> Option<Trace> {
        if !abilities.refunds {
            self.operations.retain(|operation| !matches!(operation, Operation::Refund { .. }));
        }
        if !abilities.several_limits {
            self.check_one_limit_at_a_time();
        }
        if !abilities.rules {
            self.remove_rules()?;
        }
        abilities.cover(self.needs()).then_some(self)
    }

    fn check_one_limit_at_a_time(&mut self) {
        if self.wandering {
            self.slots.truncate(1);
        }
        let slots = self.slots.len();
        self.operations.retain_mut(|operation| match operation {
            Operation::Check(asks) => {
                asks.truncate(1);
                true
            }
            Operation::Move(Step::ToEdge { slot, .. }) => {
                *slot %= slots;
                true
            }
            Operation::Reset(TraceDemand { slot, .. })
            | Operation::Change { slot, .. }
            | Operation::Fill { slot, .. } => *slot < slots,
            Operation::Move(_) | Operation::Refund { .. } => true,
        });
    }

    /// Makes all limits explicit, and removes changes of their algorithm or window, which would select another counter.
    ///
    /// Returns `None` if two buckets would then share a counter. The trace must not be used in that case.
    fn remove_rules(&mut self) -> Option<()> {
        for n in 0..self.slots.len() {
            self.slots[n].in_rule = false;
            if self.slots[n].apart_from(&self.slots[..n]).in_rule {
                return None;
            }
        }
        let slots: Vec<Slot> = self.slots.clone();
        self.operations.retain(|operation| match operation {
            Operation::Change { slot, limit } => is_same_counter(&slots[*slot].limit, limit),
            _ => true,
        });
        Some(())
    }
}

fn is_same_counter(limit: &Limit, changed: &Limit) -> bool {
    limit.algorithm() == changed.algorithm() && limit.window_us() == changed.window_us()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{InMemory, Random, compare};
    use tidegate_core::Algorithm;

    const ONE_AT_A_TIME: Abilities = Abilities {
        refunds: false,
        rules: false,
        several_limits: false,
        several_subjects: false,
        microseconds: false,
        fills: false,
    };

    #[test]
    fn most_reduced_traces_are_kept_and_memory_agrees_with_the_oracle_on_them() {
        let (mut random, mut left, mut checks) = (Random::new(11), 0, 0);
        for number in 0..2_000 {
            let algorithm = Algorithm::ALL[number % Algorithm::ALL.len()];
            let Some(trace) = random.trace(algorithm).within(ONE_AT_A_TIME) else { continue };
            assert!(ONE_AT_A_TIME.cover(trace.needs()), "{trace}");
            left += 1;
            checks += trace.operations.iter().filter(|operation| matches!(operation, Operation::Check(_))).count();
            if let Err(difference) = compare(&trace, &mut InMemory::new()) {
                panic!("{trace}{difference}");
            }
        }
        assert!(left > 1_500 && checks > 10_000, "{left} traces with {checks} checks");
    }

    #[test]
    fn implementation_with_all_abilities_gets_the_unchanged_trace() {
        let trace = Random::new(12).trace(Algorithm::Sliding);
        assert_eq!(trace.clone().within(Abilities::default()), Some(trace));
    }
}
