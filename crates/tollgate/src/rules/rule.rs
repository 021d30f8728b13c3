//! The compiled form of a rule.

use std::sync::Arc;

use tollgate_core::Cost;

use super::plan::LimitSetId;
use crate::answer::Policy;
use crate::failure::OnFailure;
use crate::identity::Subjects;

/// The mode of a rule. Defaults to `enforce`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Mode {
    /// The rule denies requests over its limits.
    #[default]
    Enforce,
    /// The rule never denies. It is charged only if it would have passed and the request was admitted.
    Shadow,
    /// The rule is ignored.
    Off,
}

tollgate_core::__names! {
    "mode" Mode {
        Enforce = "enforce",
        Shadow = "shadow",
        Off = "off",
    }
}

/// Which requests a rule charges, by their response.
///
/// Units are always charged at the start of a request. They are refunded by its response if that is not to be charged.
/// Without a response (the client disconnected, or the service panicked) the charge stays. Defaults to `always`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Charge {
    /// Every request is charged.
    #[default]
    Always,
    /// Only failed requests are charged, for example failed logins: a success refunds.
    OnFailure,
    /// Only successful requests are charged: a failure refunds.
    OnSuccess,
}

tollgate_core::__names! {
    "charge" Charge {
        Always = "always",
        OnFailure = "on_failure",
        OnSuccess = "on_success",
    }
}

impl Charge {
    /// Returns whether units may be refunded: `false` only for `Always`.
    pub const fn is_refundable(self) -> bool {
        !matches!(self, Charge::Always)
    }

    /// Returns whether the units of a request with this outcome are refunded.
    pub const fn refunds(self, succeeded: bool) -> bool {
        match self {
            Charge::Always => false,
            Charge::OnFailure => succeeded,
            Charge::OnSuccess => !succeeded,
        }
    }
}

/// A rule: by which subject its requests are counted, and against which limits.
///
/// Which requests it applies to is determined by [`RuleSet::matching`](super::RuleSet::matching).
#[derive(Clone, Debug)]
pub struct CompiledRule {
    pub(crate) name: Arc<str>,
    pub(crate) by: Subjects,
    pub(crate) limits: RuleLimits,
    pub(crate) mode: Mode,
    pub(crate) on_failure: OnFailure,
    pub(crate) charge: Charge,
    pub(crate) cost: Cost,
    pub(crate) is_shield: bool,
}

/// The limits of a rule.
#[derive(Clone, Debug)]
pub(crate) enum RuleLimits {
    /// The limits of the rule itself, for all callers.
    Own(Box<[Arc<Policy>]>),
    /// The limits of the caller's plan, indexed by [`LimitSetId`].
    Plan(Box<[Box<[Arc<Policy>]>]>),
}

impl CompiledRule {
    /// Returns the name. It appears in metrics and logs and is part of the counters' names.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the kinds of subject by which requests are counted.
    pub fn by(&self) -> &Subjects {
        &self.by
    }

    /// Returns the policies that apply to a caller with this limit_set.
    ///
    /// The limit_set matters only if the limits are those of the caller's plan; an unknown limit_set then has no policies.
    /// A limit counts on (rule, limit name): see [`Scope::Rule`](crate::Scope::Rule).
    pub fn policies(&self, limit_set: LimitSetId) -> &[Arc<Policy>] {
        match &self.limits {
            RuleLimits::Own(policies) => policies,
            RuleLimits::Plan(by_limit_set) => by_limit_set.get(limit_set.0 as usize).map_or(&[], |policies| policies),
        }
    }

    /// Iterates over the policies of all limit_sets, those of keys with limits of their own included.
    ///
    /// Equal policies may occur several times.
    pub fn policies_of_all(&self) -> impl Iterator<Item = &Arc<Policy>> {
        let (own, by_limit_set) = match &self.limits {
            RuleLimits::Own(policies) => (&policies[..], &[][..]),
            RuleLimits::Plan(by_limit_set) => (&[][..], &by_limit_set[..]),
        };
        own.iter().chain(by_limit_set.iter().flatten())
    }

    /// Returns whether the limits are those of the caller's plan.
    pub fn is_by_plan(&self) -> bool {
        matches!(self.limits, RuleLimits::Plan(_))
    }

    /// Returns the mode. The global shadow mode is already applied to it.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the failure policy, used when the store does not answer.
    pub fn on_failure(&self) -> OnFailure {
        self.on_failure
    }

    /// Returns which requests are charged, by their outcome.
    pub fn charge(&self) -> Charge {
        self.charge
    }

    /// Returns the cost of a request.
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// Returns whether the rule is a shield: decided in process memory, before all other rules.
    pub fn is_shield(&self) -> bool {
        self.is_shield
    }
}
