//! What one request must pass: every (limit, key, cost) of it, decided together.

use std::fmt;

use crate::key::{Key, Scope};
use crate::limit::Limit;

/// The most limits one check may name. Enough for any stack of rules, few enough to lock together.
pub const DEMANDS_MAX: usize = 32;

/// The units a request takes. 0 is a **peek**: it changes nothing and is never denied.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cost(u32);

impl Cost {
    /// One unit: what a request costs unless said otherwise.
    pub const ONE: Cost = Cost(1);
    /// No unit: only look.
    pub const PEEK: Cost = Cost(0);

    /// So many units. More than a limit can ever hold is not an error here: the decision says *never*.
    pub const fn new(units: u32) -> Cost {
        Cost(units)
    }

    /// The number of units.
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

/// One line of a check: this key, against this limit, for this many units.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// What must hold.
    pub limit: Limit,
    /// Who is counted.
    pub key: Key<'a>,
    /// How much is asked for.
    pub cost: Cost,
}

impl<'a> Demand<'a> {
    /// One unit of `limit` for `key`.
    pub fn new(limit: Limit, key: Key<'a>) -> Demand<'a> {
        Demand { limit, key, cost: Cost::ONE }
    }

    /// The same for another number of units.
    #[must_use]
    pub fn cost(self, cost: impl Into<Cost>) -> Demand<'a> {
        Demand { cost: cost.into(), ..self }
    }
}

/// A demand that waits for its subject: all that stays the same from one request to the next, worked out once.
///
/// See [`MemoryStore::admit`](crate::MemoryStore::admit).
#[derive(Clone, Copy, Debug)]
pub struct StandingDemand {
    pub(crate) limit: Limit,
    /// Which of a subject's counters.
    pub(crate) scope: u64,
    pub(crate) cost: Cost,
}

impl StandingDemand {
    /// So many units of `limit`, on this of the subject's counters.
    pub fn new(limit: Limit, scope: Scope<'_>, cost: Cost) -> StandingDemand {
        StandingDemand { limit, scope: scope.number(&limit), cost }
    }
}

/// All demands of one request: it passes every one of them, or is charged by none.
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    demands: &'a [Demand<'a>],
}

/// Why a list of demands is no check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// There is nothing to decide.
    #[error("a check needs at least one limit")]
    Empty,
    /// More than [`DEMANDS_MAX`].
    #[error("a check has at most {DEMANDS_MAX} limits, this one has {count}")]
    TooMany {
        /// How many there are.
        count: usize,
    },
    /// One counter cannot be decided twice at the same moment.
    #[error(
        "limits {first} and {second} (counted from 0) count on the same counter; merge them or give them different keys"
    )]
    SameCounter {
        /// Where it stands first.
        first: usize,
        /// Where it stands again.
        second: usize,
    },
}

impl<'a> Check<'a> {
    /// A check of these demands, answered in this order.
    ///
    /// # Errors
    /// When there are none, too many, or two that count on the same counter.
    pub fn new(demands: &'a [Demand<'a>]) -> Result<Check<'a>, CheckError> {
        match demands.len() {
            0 => return Err(CheckError::Empty),
            1 => return Ok(Check { demands }),
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
        Ok(Check { demands })
    }

    /// A check of one or more demands, no more than [`DEMANDS_MAX`], whose counters are known to be different, so that nobody has to
    /// look at each pair of them again. Whatever counts on one counter twice is charged there twice.
    pub fn of_distinct(demands: &'a [Demand<'a>]) -> Check<'a> {
        debug_assert!(Check::new(demands).is_ok(), "{:?}", Check::new(demands).err());
        Check { demands }
    }

    /// A check of a single demand, which cannot be wrong.
    pub const fn one(demand: &'a Demand<'a>) -> Check<'a> {
        Check { demands: std::slice::from_ref(demand) }
    }

    /// The demands, in order.
    pub const fn demands(&self) -> &'a [Demand<'a>] {
        self.demands
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(text: &str) -> Limit {
        text.parse().unwrap()
    }

    #[test]
    fn the_same_counter_twice_is_refused_and_a_changed_quota_is_the_same_counter() {
        let key = Key::new("user:42").unwrap();
        let demands = [Demand::new(limit("10/min"), key), Demand::new(limit("20/min"), key)];
        assert_eq!(Check::new(&demands).unwrap_err(), CheckError::SameCounter { first: 0, second: 1 });
        let demands = [Demand::new(limit("10/min"), key), Demand::new(limit("20/h"), key)];
        assert!(Check::new(&demands).is_ok());
    }

    #[test]
    fn parts_of_a_rule_key_cannot_be_shifted_into_each_other() {
        let one = Key::scoped("s", Scope::rule("a", "b_c")).unwrap();
        let other = Key::scoped("s", Scope::rule("a_b", "c")).unwrap();
        let demands = [Demand::new(limit("10/min"), one), Demand::new(limit("10/min"), other)];
        assert!(Check::new(&demands).is_ok());
        let number = |key: &Key<'_>| key.scope().number(&limit("10/min"));
        assert_ne!(number(&one), number(&other));
    }

    #[test]
    fn a_check_has_one_to_thirty_two_limits() {
        assert_eq!(Check::new(&[]).unwrap_err(), CheckError::Empty);
        let names: Vec<String> = (0..33).map(|n| n.to_string()).collect();
        let demands: Vec<Demand<'_>> =
            names.iter().map(|name| Demand::new(limit("1/s"), Key::new(name).unwrap())).collect();
        assert_eq!(Check::new(&demands).unwrap_err(), CheckError::TooMany { count: 33 });
        assert!(Check::new(&demands[..32]).is_ok());
    }
}
