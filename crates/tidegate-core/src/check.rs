//! The input of a decision: every (limit, key, cost) that one request must pass, decided together.

use std::fmt;
use std::time::Duration;

use crate::key::{Key, Scope, ScopeName};
use crate::limit::{Algorithm, Limit};

/// The maximum number of demands in one check.
///
/// Enough for any combination of rules, few enough to lock all their counters together.
pub const DEMANDS_MAX: usize = 32;

/// The number of units that a request takes. Defaults to 1.
///
/// A cost of 0 is a **peek**: it charges nothing, and its limit always allows it. A ban refuses it only in a check that
/// also charges other limits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cost(u32);

impl Cost {
    /// One unit, the default.
    pub const ONE: Cost = Cost(1);
    /// Zero units: reads the counter without charging it.
    pub const PEEK: Cost = Cost(0);

    /// Creates a cost of `units` units.
    ///
    /// Any number is accepted. If it exceeds what a limit can ever hold, the limit denies with a `retry_after` of
    /// [`Wait::NEVER`](crate::Wait::NEVER).
    pub const fn new(units: u32) -> Cost {
        Cost(units)
    }

    /// Returns the number of units.
    pub const fn units(self) -> u32 {
        self.0
    }
}

impl Default for Cost {
    fn default() -> Self {
        Cost::ONE
    }
}

impl From<u32> for Cost {
    fn from(units: u32) -> Self {
        Cost(units)
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One element of a [`Check`]: a limit, the key to count, and the cost.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// The limit that the request must pass.
    pub limit: Limit,
    /// The key that is counted.
    pub key: Key<'a>,
    /// The units to charge.
    pub cost: Cost,
}

impl<'a> Demand<'a> {
    /// Creates a demand for one unit of `limit` on the counter of `key`. [`Demand::cost`] sets another cost.
    pub fn new(limit: Limit, key: Key<'a>) -> Demand<'a> {
        Demand { limit, key, cost: Cost::ONE }
    }

    /// Returns this demand with another cost.
    #[must_use]
    pub fn cost(self, cost: impl Into<Cost>) -> Demand<'a> {
        Demand { cost: cost.into(), ..self }
    }
}

impl Demand<'static> {
    /// Creates the demand of a probe, which tests whether a store decides and writes.
    ///
    /// It charges one unit to a counter that is used for nothing else: that of the subject `tidegate` in the scope
    /// named `probe`. Its limit is a token bucket of ten million units per second, so it is never used up. The bucket
    /// is full again within a microsecond, so a store need not keep it. On Redis, with the default prefix, its key is
    /// `tidegate:tg2:{tidegate}:probe:bucket` and expires after two milliseconds.
    pub fn probe() -> Demand<'static> {
        Demand::probe_of("tidegate")
    }

    /// Returns a demand like [`Demand::probe`] with another subject, of at most 64 KiB.
    ///
    /// A store on several servers uses it to probe the server that has this subject.
    ///
    /// # Panics
    /// Panics if the subject is too long.
    pub fn probe_of(subject: &str) -> Demand<'_> {
        const SCOPE: Scope<'static> = Scope::Named(ScopeName::new("probe"));
        let limit = Limit::new(10_000_000, Duration::from_secs(1));
        let limit = limit.and_then(|limit| limit.with_algorithm(Algorithm::TokenBucket)).expect("a valid limit");
        Demand::new(limit, Key::scoped(subject, SCOPE).expect("a short subject"))
    }
}

/// All demands of one request, decided together: the request passes every limit, or none is charged.
///
/// Limits with `count_denied` are an exception: they are also charged if the request is denied.
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    demands: &'a [Demand<'a>],
    partition: Option<u32>,
}

/// The reason why a list of demands is not a valid check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The list is empty.
    #[error("a check needs at least one limit")]
    Empty,
    /// The list has more than [`DEMANDS_MAX`] demands.
    #[error("a check can have at most {DEMANDS_MAX} limits; this one has {count}")]
    TooMany {
        /// The number of demands in the list.
        count: usize,
    },
    /// Two demands use the same counter.
    #[error(
        "limits {first} and {second} (counted from 0) use the same counter; merge them or give them different keys"
    )]
    SameCounter {
        /// The index of the first of the two demands.
        first: usize,
        /// The index of the second of the two demands.
        second: usize,
    },
}

impl<'a> Check<'a> {
    /// Returns whether the check takes units: at least one cost is not 0.
    ///
    /// A check that takes no units is a peek, which no ban refuses.
    pub fn charges(&self) -> bool {
        self.demands.iter().any(|demand| demand.cost.units() > 0)
    }

    /// Creates a check of `demands`. The decision has one status per demand, in the same order.
    ///
    /// # Errors
    /// Returns an error if the list is empty, has more than [`DEMANDS_MAX`] demands, or has two demands that count on
    /// the same counter.
    pub fn new(demands: &'a [Demand<'a>]) -> Result<Check<'a>, CheckError> {
        match demands.len() {
            0 => return Err(CheckError::Empty),
            1 => return Ok(Check { demands, partition: None }),
            2..=DEMANDS_MAX => {}
            count => return Err(CheckError::TooMany { count }),
        }
        for second in 1..demands.len() {
            for first in 0..second {
                let (one, other) = (&demands[first], &demands[second]);
                if one.key.is_same_counter(&one.limit, &other.key, &other.limit) {
                    return Err(CheckError::SameCounter { first, second });
                }
            }
        }
        Ok(Check { demands, partition: None })
    }

    /// Creates a check of `demands` without validating them.
    ///
    /// The caller guarantees one to [`DEMANDS_MAX`] demands that all count on different counters. This skips the
    /// comparison of every pair in [`Check::new`].
    ///
    /// # Panics
    /// Panics in debug builds if [`Check::new`] would return an error. In release builds, a counter that occurs twice
    /// may be charged beyond its quota.
    pub fn of_distinct(demands: &'a [Demand<'a>]) -> Check<'a> {
        debug_assert!(Check::new(demands).is_ok(), "{:?}", Check::new(demands).err());
        Check { demands, partition: None }
    }

    /// Creates a check of a single demand, which is always valid.
    pub const fn one(demand: &'a Demand<'a>) -> Check<'a> {
        Check { demands: std::slice::from_ref(demand), partition: None }
    }

    /// Returns the demands, in order.
    pub const fn demands(&self) -> &'a [Demand<'a>] {
        self.demands
    }

    /// Returns this check with the partition of its counters, which the store then does not determine again.
    ///
    /// The caller guarantees that [`Store::locate`](crate::Store::locate) of the store that decides the check returns
    /// this partition for each of its subjects. With another one, this check and others may fail.
    #[must_use]
    pub const fn in_partition(self, partition: u32) -> Check<'a> {
        Check { demands: self.demands, partition: Some(partition) }
    }

    /// Returns the partition of the counters, or `None` if [`in_partition`](Check::in_partition) has not set it.
    pub const fn partition(&self) -> Option<u32> {
        self.partition
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Scope;

    fn limit(text: &str) -> Limit {
        text.parse().unwrap()
    }

    #[test]
    fn check_rejects_one_counter_twice_even_with_different_quotas() {
        let key = Key::new("user:42").unwrap();
        let demands = [Demand::new(limit("10/min"), key), Demand::new(limit("20/min"), key)];
        assert_eq!(Check::new(&demands).unwrap_err(), CheckError::SameCounter { first: 0, second: 1 });
        let demands = [Demand::new(limit("10/min"), key), Demand::new(limit("20/h"), key)];
        assert!(Check::new(&demands).is_ok());
    }

    #[test]
    fn rule_and_limit_names_are_not_concatenated() {
        let one = Key::scoped("s", Scope::rule("a", "b_c")).unwrap();
        let other = Key::scoped("s", Scope::rule("a_b", "c")).unwrap();
        let demands = [Demand::new(limit("10/min"), one), Demand::new(limit("10/min"), other)];
        assert!(Check::new(&demands).is_ok());
        let number = |key: &Key<'_>| key.scope().number(&limit("10/min"));
        assert_ne!(number(&one), number(&other));
    }

    #[test]
    fn check_accepts_one_to_thirty_two_limits() {
        assert_eq!(Check::new(&[]).unwrap_err(), CheckError::Empty);
        let names: Vec<String> = (0..33).map(|n| n.to_string()).collect();
        let demands: Vec<Demand<'_>> =
            names.iter().map(|name| Demand::new(limit("1/s"), Key::new(name).unwrap())).collect();
        assert_eq!(Check::new(&demands).unwrap_err(), CheckError::TooMany { count: 33 });
        assert!(Check::new(&demands[..32]).is_ok());
    }
}
