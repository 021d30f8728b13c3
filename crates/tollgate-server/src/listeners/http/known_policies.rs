//! Policies of limits that were asked before.
//!
//! A question names its limit each time, and mostly the same few. What the headers say of a limit, whoever asks, is rendered
//! once and kept. A client that invents limits finds no more room after a while, and is answered as before, only dearer.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use foldhash::quality::RandomState;
use tollgate::answer::{Policies, Policy};
use tollgate::{Demand, Limit};

/// A service asks for a few; some hundred bytes each.
const KNOWN_MAX: usize = 1_024;

#[derive(Debug, Default)]
pub(super) struct KnownPolicies(RwLock<HashMap<Limit, Arc<Policies>, RandomState>>);

impl KnownPolicies {
    /// What to say of these demands, in their order.
    pub(super) fn policies(&self, demands: &[Demand<'_>]) -> Arc<Policies> {
        let new = || Arc::new(Policies::new(demands.iter().map(|demand| Policy::of(demand.limit))));
        let [Demand { limit, .. }] = demands else { return new() };
        if let Some(policies) = self.0.read().unwrap_or_else(PoisonError::into_inner).get(limit) {
            return policies.clone();
        }
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        match known.len() < KNOWN_MAX {
            true => known.entry(*limit).or_insert_with(new).clone(),
            false => new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate::Key;

    #[test]
    fn a_limit_is_rendered_once_and_invented_ones_find_no_room_at_last() {
        let known = KnownPolicies::default();
        let key = Key::new("user:42").unwrap();
        let of = |quota: usize| {
            let demand = Demand::new(format!("{quota}/min").parse().unwrap(), key);
            known.policies(&[demand])
        };
        assert!(Arc::ptr_eq(&of(1), &of(1)));
        assert!(!Arc::ptr_eq(&of(1), &of(2)), "another quota is another policy");
        (0..2 * KNOWN_MAX).for_each(|n| drop(of(n + 1)));
        assert_eq!(known.0.read().unwrap().len(), KNOWN_MAX);
        assert_eq!(of(2 * KNOWN_MAX).policies().len(), 1, "it is answered all the same");
    }
}
