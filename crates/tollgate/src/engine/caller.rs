//! Who asks, and which rules are theirs: everything that is worked out before anybody is waited for.

use std::net::IpAddr;

use tollgate_core::Timestamp;

use super::Engine;
use super::live::{Asked, Live, Subjects, Terms};
use super::refused::Refused;
use super::ruling::Refusal;
use crate::identity::{Identity, Origin};
use crate::rules::{Indices, Matched, Mode, PlanQuestion, RequestView, Rule, Tariff};

#[allow(clippy::large_enum_variant)] // nearly every request is a caller's, and a box would cost it an allocation
pub(super) enum Known {
    /// No rule matches, or the caller is exempt.
    Nothing,
    Banned(Box<Refused>),
    /// A shield refuses, whoever it is.
    Shielded(Box<Refusal>),
    Caller(KnownCaller),
}

pub(super) struct KnownCaller {
    /// The rules that match.
    rules: Indices,
    /// Whom each of them counts.
    subjects: Subjects,
    pub(super) plan: Plan,
}

/// Which limits are the caller's.
pub(super) enum Plan {
    Known(Tariff),
    /// Those of a plan that somebody else knows.
    Asked(PlanQuestion),
}

impl Engine {
    pub(super) fn identify(&self, live: &Live, request: &RequestView<'_>, peer: IpAddr, terms: Terms) -> Known {
        let now = if live.tells_time { self.0.clock.now() } else { Timestamp::ZERO };
        let matched = live.rules.matching(request);
        let path = live.counts_paths.then(|| request.canonical_path());
        let origin = Origin { peer, headers: request.headers(), path: path.as_deref().unwrap_or_default() };
        let identity: Identity<'_> = live.rules.identifier().identify(origin, &live.rules, now);
        if let Some(ban) = live.rules.ban(&identity, now) {
            return Known::Banned(Box::new(Refused::banned(ban.until(), now)));
        }
        if matched.is_empty() || live.rules.is_exempt(&identity) {
            return Known::Nothing;
        }
        // Before anything is worked out that costs more than an address: a token to verify (unless a ban names a user, and had
        // to know), a plan to ask for.
        if live.has_shields
            && let Some(refusal) = self.refused_by_shield(live, &matched, &identity, terms)
        {
            return Known::Shielded(refusal);
        }
        let subjects = matched.iter().map(|rule| identity.subject(rule.by())).collect();
        let plan = self.plan(live, &identity, matched.iter().any(Rule::is_by_plan));
        Known::Caller(KnownCaller { rules: matched.into_indices(), subjects, plan })
    }

    /// What the shields say, if they refuse. Else they are asked again with the others, and charged then.
    fn refused_by_shield(
        &self,
        live: &Live,
        matched: &Matched<'_>,
        identity: &Identity<'_>,
        terms: Terms,
    ) -> Option<Box<Refusal>> {
        let is_shield = |rule: &Rule| rule.is_shield() && rule.mode() == Mode::Enforce;
        let shields = || matched.iter().zip(matched.indices()).filter(|(rule, _)| is_shield(rule));
        let rules: Indices = shields().map(|(_, index)| *index).collect();
        if rules.is_empty() {
            return None;
        }
        let subjects = shields().map(|(rule, _)| identity.subject(rule.by())).collect();
        let bundle = live.bundle_of(rules, live.rules.tariff_otherwise(false));
        let asked = Asked { bundle, subjects, terms };
        match self.would_pass_shield(&asked) {
            true => None,
            false => self.hear_shield(&asked).into_refusal(),
        }
    }

    fn plan(&self, live: &Live, identity: &Identity<'_>, matters: bool) -> Plan {
        if !matters {
            // Rules that are not by plan have the same limits under every tariff.
            return Plan::Known(live.rules.tariff_otherwise(false));
        }
        if let Some(tariff) = live.rules.tariff(identity) {
            return Plan::Known(tariff);
        }
        let question = PlanQuestion::about(identity);
        match self.0.lookups.is_empty() {
            true => Plan::Known(live.rules.tariff_otherwise(question.is_identified())),
            false => Plan::Asked(question),
        }
    }
}

impl KnownCaller {
    /// What the caller asks of its rules.
    pub(super) fn asks(self, live: &Live, tariff: Tariff, terms: Terms) -> Asked {
        Asked { bundle: live.bundle(self.rules, tariff), subjects: self.subjects, terms }
    }
}
