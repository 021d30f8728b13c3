//! A trace, cut to what a subject can be asked for.
//!
//! Most random traces hold a refund, a rule or a check of several limits somewhere. A door that translates none of these would be
//! left with hardly any, so what it cannot be asked is taken out and the rest stays. The cut keeps what makes
//! a trace decidable (see the table of the two kinds of time): a wandering trace still asks every counter it has in each
//! check, and no bucket counts for two limits.

use tollgate_core::Limit;

use super::{Abilities, Ask, Operation, Slot, Step, Trace};

impl Trace {
    /// What is left of this trace for a subject with these abilities; `None` if nothing sensible is.
    pub fn within(mut self, abilities: Abilities) -> Option<Trace> {
        if !abilities.refunds {
            self.operations.retain(|operation| !matches!(operation, Operation::Refund { .. }));
        }
        if !abilities.several_limits {
            self.ask_for_one_limit_at_a_time();
        }
        if !abilities.rules {
            self.leave_rules()?;
        }
        abilities.cover(self.needs()).then_some(self)
    }

    fn ask_for_one_limit_at_a_time(&mut self) {
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
            Operation::Reset(Ask { slot, .. }) | Operation::Change { slot, .. } | Operation::Fill { slot, .. } => {
                *slot < slots
            }
            Operation::Move(_) | Operation::Refund { .. } => true,
        });
    }

    /// Every limit counts by its algorithm and window, so these may not change.
    fn leave_rules(&mut self) -> Option<()> {
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
    use tollgate_core::Algorithm;

    const ONE_AT_A_TIME: Abilities = Abilities {
        refunds: false,
        rules: false,
        several_limits: false,
        several_subjects: false,
        microseconds: false,
        fills: false,
    };

    #[test]
    fn most_of_the_traces_are_left_and_still_mean_one_thing() {
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
    fn whoever_can_everything_is_asked_everything() {
        let trace = Random::new(12).trace(Algorithm::Sliding);
        assert_eq!(trace.clone().within(Abilities::default()), Some(trace));
    }
}
