//! A rule, compiled.

use std::sync::Arc;

use tollgate_core::Cost;

use super::plan::Tariff;
use crate::answer::Policy;
use crate::failure::OnFailure;
use crate::identity::SubjectKinds;

/// Whether a rule refuses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Mode {
    /// It refuses.
    #[default]
    Enforce,
    /// It never vetoes. It is charged only if it would itself have passed and the request was admitted.
    Shadow,
    /// It is as if it were not there.
    Off,
}

impl Mode {
    /// The name in configuration and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Enforce => "enforce",
            Mode::Shadow => "shadow",
            Mode::Off => "off",
        }
    }
}

/// Whether a request's units are given back by its response. They are always taken at the start, and stay taken if there is no
/// response: the client left, or the service panicked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Charge {
    /// They are kept.
    #[default]
    Always,
    /// They are given back after a response that is a success: for logins.
    OnFailure,
    /// They are given back after a response that is a failure.
    OnSuccess,
}

impl Charge {
    /// The name in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Charge::Always => "always",
            Charge::OnFailure => "on_failure",
            Charge::OnSuccess => "on_success",
        }
    }

    /// Whether units may be given back at all.
    pub const fn is_refundable(self) -> bool {
        !matches!(self, Charge::Always)
    }

    /// Whether the units are given back after a request that ended so.
    pub const fn refunds(self, succeeded: bool) -> bool {
        match self {
            Charge::Always => false,
            Charge::OnFailure => succeeded,
            Charge::OnSuccess => !succeeded,
        }
    }
}

/// Which requests, counted by which subject, against which limits.
#[derive(Clone, Debug)]
pub struct Rule {
    pub(crate) name: Arc<str>,
    pub(crate) by: SubjectKinds,
    pub(crate) limits: RuleLimits,
    pub(crate) mode: Mode,
    pub(crate) on_failure: OnFailure,
    pub(crate) charge: Charge,
    pub(crate) cost: Cost,
    pub(crate) is_shield: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum RuleLimits {
    Own(Box<[Arc<Policy>]>),
    /// By [`Tariff`].
    Plan(Box<[Box<[Arc<Policy>]>]>),
}

impl Rule {
    /// Its name: in metrics and logs, and part of the counters' names.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// What is counted.
    pub fn by(&self) -> &SubjectKinds {
        &self.by
    }

    /// The limits that it holds a caller to, each as the caller is told of it. A limit counts on (rule, limit name):
    /// see [`Scope::Rule`](crate::Scope::Rule).
    pub fn policies(&self, tariff: Tariff) -> &[Arc<Policy>] {
        match &self.limits {
            RuleLimits::Own(policies) => policies,
            RuleLimits::Plan(by_tariff) => by_tariff.get(tariff.0 as usize).map_or(&[], |policies| policies),
        }
    }

    /// The limits that it holds anybody to, by whatever plan or of their own. Many of them may be alike.
    pub fn policies_of_all(&self) -> impl Iterator<Item = &Arc<Policy>> {
        let (own, by_tariff) = match &self.limits {
            RuleLimits::Own(policies) => (&policies[..], &[][..]),
            RuleLimits::Plan(by_tariff) => (&[][..], &by_tariff[..]),
        };
        own.iter().chain(by_tariff.iter().flatten())
    }

    /// Whether the limits are those of the caller's plan.
    pub fn is_by_plan(&self) -> bool {
        matches!(self.limits, RuleLimits::Plan(_))
    }

    /// Whether it refuses. Shadow mode for all is already in here.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// What happens when the store does not answer.
    pub fn on_failure(&self) -> OnFailure {
        self.on_failure
    }

    /// Whether units are given back by how a request ends.
    pub fn charge(&self) -> Charge {
        self.charge
    }

    /// The units that a request takes.
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// Whether it is decided in process memory before everything else.
    pub fn is_shield(&self) -> bool {
        self.is_shield
    }
}
