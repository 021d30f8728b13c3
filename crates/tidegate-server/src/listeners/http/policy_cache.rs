//! A cache of policies.
//!
//! An explicit check names its limit each time, and mostly one of the same few limits. What the headers say about a
//! limit is the same for all keys, so it is rendered once and kept. When the cache is full, further limits are rendered
//! for each request.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use foldhash::quality::RandomState;
use tidegate::answer::{Policies, Policy};
use tidegate::{Demand, Limit};

use crate::decider::ExplicitSettings;

/// The number of cached limits, some hundred bytes each. A service uses a few.
const POLICIES_MAX: usize = 1_024;

/// A cache of the policies of explicit checks, by limit and settings.
///
/// A policy is a limit with its name and the texts of its headers.
#[derive(Debug, Default)]
pub(super) struct PolicyCache(RwLock<HashMap<(Limit, ExplicitSettings), Arc<Policies>, RandomState>>);

impl PolicyCache {
    /// Returns the policies of the demands, in the same order, with the headers of these settings.
    ///
    /// Caches the policy of a single demand, while there are fewer than 1,024 entries. The policies of several demands
    /// are created anew by each call.
    pub(super) fn get(&self, demands: &[Demand<'_>], settings: ExplicitSettings) -> Arc<Policies> {
        let new = || {
            let policies = demands.iter().map(|demand| Policy::of(demand.limit).with_styles(settings.styles));
            Arc::new(Policies::new(policies).with_exposed_headers(settings.exposes_headers))
        };
        let [Demand { limit, .. }] = demands else { return new() };
        let key = (*limit, settings);
        if let Some(policies) = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return policies.clone();
        }
        let mut cache = self.0.write().unwrap_or_else(PoisonError::into_inner);
        match cache.len() < POLICIES_MAX {
            true => cache.entry(key).or_insert_with(new).clone(),
            false => new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate::Key;

    #[test]
    fn a_limit_is_rendered_once_and_a_full_cache_does_not_grow() {
        let cache = PolicyCache::default();
        let key = Key::new("user:42").unwrap();
        let of = |quota: usize| {
            let demand = Demand::new(format!("{quota}/min").parse().unwrap(), key);
            cache.get(&[demand], ExplicitSettings::default())
        };
        assert!(Arc::ptr_eq(&of(1), &of(1)));
        assert!(!Arc::ptr_eq(&of(1), &of(2)), "another quota is another policy");
        let together = ["1/min", "2/h"].map(|text| Demand::new(text.parse().unwrap(), key));
        let names: Vec<String> = cache
            .get(&together, ExplicitSettings::default())
            .policies()
            .map(|policy| policy.name().to_owned())
            .collect();
        assert_eq!(names, ["per-minute", "per-hour"], "the first of two limits is cached alone");
        (0..2 * POLICIES_MAX).for_each(|n| drop(of(n + 1)));
        assert_eq!(cache.0.read().unwrap().len(), POLICIES_MAX);
        for quota in [1, POLICIES_MAX, 2 * POLICIES_MAX] {
            let quotas: Vec<u32> = of(quota).policies().map(|policy| policy.limit().quota()).collect();
            assert_eq!(quotas, [quota as u32], "a limit beyond the cache has its own policy, too");
        }
    }
}
