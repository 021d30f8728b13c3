//! Checks that name their keys and limits: what the configuration in use says about them.
//!
//! They need no rules. These settings of the configuration apply to them: `on_failure`, `headers`, `expose_headers`,
//! `kill_switch`, and bans in the store. The others need a request: an explicit check has no address, API key or path
//! that could be exempt, banned by the configuration or anonymized, and its response body is the decision.

use std::sync::Arc;

use tidegate_core::Demand;

use super::Engine;
use super::active_rules::ActiveRules;
use crate::answer::Policies;
use crate::limiter::CheckOptions;

/// Resolves checks that name their keys and limits, by the configuration that was in use when it was created.
///
/// Returned by [`Engine::explicit`].
#[derive(Clone)]
pub struct ExplicitResolver(Arc<ActiveRules>);

impl Engine {
    /// Returns the resolver of explicit checks, by the configuration in use. A reload does not change it.
    pub fn explicit(&self) -> ExplicitResolver {
        ExplicitResolver(self.0.active.load_full())
    }
}

impl ExplicitResolver {
    /// Returns the options of a check, with the failure policy of the configuration, or that of the limiter without a
    /// [configuration](crate::rules::RuleSet::is_configured). `refundable` is as in [`CheckOptions`].
    ///
    /// Returns `None` if the kill switch is on: the check is then admitted, and counted nowhere.
    pub fn options(&self, refundable: bool) -> Option<CheckOptions<'static>> {
        let rules = &self.0.rules;
        let on_failure = rules.is_configured().then(|| rules.on_failure());
        (!rules.is_off()).then_some(CheckOptions { on_failure, refundable, ..CheckOptions::default() })
    }

    /// Returns the policies of a check with these demands, in the same order, with the header styles of the
    /// configuration. Those of a check with one demand are cached.
    pub fn policies(&self, demands: &[Demand<'_>]) -> Arc<Policies> {
        self.0.explicit_policies(demands)
    }
}

impl std::fmt::Debug for ExplicitResolver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExplicitResolver").field("rules", &self.0.rules).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::{Key, Limit};

    use super::super::active_rules::LAYOUTS_MAX;
    use super::*;
    use crate::failure::OnFailure;
    use crate::limiter::Limiter;
    use crate::rules::{RuleSet, Rules};

    #[test]
    fn a_limit_is_rendered_once_and_a_full_cache_does_not_grow() {
        let engine = Engine::from(Limiter::memory());
        let key = Key::new("user:42").unwrap();
        let of =
            |quota: usize| engine.explicit().policies(&[Demand::new(format!("{quota}/min").parse().unwrap(), key)]);
        assert!(Arc::ptr_eq(&of(1), &of(1)));
        assert!(!Arc::ptr_eq(&of(1), &of(2)), "another quota is another policy");
        let together = ["1/min", "2/h"].map(|text| Demand::new(text.parse::<Limit>().unwrap(), key));
        let policies = engine.explicit().policies(&together);
        let names: Vec<&str> = policies.policies().map(|policy| policy.name()).collect();
        assert_eq!(names, ["per-minute", "per-hour"], "the first of two limits is cached alone");
        for quota in 1..=2 * LAYOUTS_MAX {
            let quotas: Vec<u32> = of(quota).policies().map(|policy| policy.limit().quota()).collect();
            assert_eq!(quotas, [quota as u32], "a limit beyond the cache has its own policy, too");
            assert!(engine.explicit().0.cached_policies() <= LAYOUTS_MAX);
        }
    }

    #[test]
    fn settings_are_those_of_the_configuration_in_use() {
        let engine = Engine::from(Limiter::memory());
        let options = |engine: &Engine| engine.explicit().options(true);
        assert_eq!(options(&engine).unwrap().on_failure, None, "the limiter's");
        engine.reload(Rules::new().on_failure(OnFailure::Deny).build().unwrap());
        let options_of_file = options(&engine).unwrap();
        assert_eq!((options_of_file.on_failure, options_of_file.refundable), (Some(OnFailure::Deny), true));
        engine.reload(Rules::new().kill_switch(true).build().unwrap());
        assert_eq!(options(&engine), None);
        assert!(!RuleSet::default().is_configured() && engine.rules().is_configured());
    }
}
