//! Who asks, and which rules are theirs: everything that is worked out before anybody is waited for.

use std::net::IpAddr;
use std::sync::Arc;

use tollgate_core::Timestamp;

use super::live::{Asked, Live, Terms};
use super::ruling::{Refusal, Ruling};
use super::{Asking, Begun, Engine, Passage, Refused};
use crate::identity::{Identity, Origin};
use crate::rules::{Indices, Matched, Mode, PlanQuestion, RequestView, Rule, Tariff};

/// Which limits are a caller's.
pub(super) enum Plan {
    Known(Tariff),
    /// Those of a plan that somebody else knows.
    Asked(PlanQuestion),
}

impl Engine {
    /// Decides a request as far as nobody has to be waited for.
    pub(crate) fn begin(&self, request: &RequestView<'_>, peer: IpAddr, terms: Terms) -> Begun {
        let live = self.0.live.load();
        let now = if live.tells_time { self.0.clock.now() } else { Timestamp::ZERO };
        let path = live.counts_paths.then(|| request.canonical_path());
        let origin = Origin { peer, headers: request.headers(), path: path.as_deref().unwrap_or_default() };
        let identity: Identity<'_> = live.rules.identifier().identify(origin, &live.rules, now);
        if live.has_bans
            && let Some(ban) = live.rules.ban(&identity, now)
        {
            return Begun::Refuse(Box::new(Refused::banned(ban.until(), now)));
        }
        if let Some(uniform) = live.uniform().filter(|_| self.is_in_process()) {
            if live.exempts(&identity) {
                return Begun::Pass(Passage::unlimited());
            }
            let mut asked = Asked::new(terms);
            asked.by(uniform.by.iter(), &identity);
            return self.rule_at_once(&uniform.bundle, &mut asked).begun(request);
        }
        self.begin_apart(&live, request, &identity, terms)
    }

    /// The same for a caller who is not banned, where requests meet different rules.
    #[inline(never)] // so that its many words are not on the stack of those who need none of them
    fn begin_apart(&self, live: &Arc<Live>, request: &RequestView<'_>, identity: &Identity<'_>, terms: Terms) -> Begun {
        let matched = live.rules.matching(request);
        if matched.is_empty() || live.exempts(identity) {
            return Begun::Pass(Passage::unlimited());
        }
        // Before anything is worked out that costs more than an address: a token to verify (unless a ban names a user, and had
        // to know), a plan to ask for.
        if live.has_shields
            && let Some(refusal) = self.refused_by_shield(live, &matched, identity, terms)
        {
            return Begun::Refuse(Box::new(refusal.told(request.headers())));
        }
        let mut asked = Asked::new(terms);
        asked.by(matched.iter().map(Rule::by), identity);
        let plan = self.plan(live, identity, matched.iter().any(Rule::is_by_plan));
        match plan {
            Plan::Known(tariff) if self.is_in_process() => {
                self.rule_at_once(&live.bundle_of(matched.into_indices(), tariff), &mut asked).begun(request)
            }
            plan => {
                let (engine, rules) = (self.clone(), matched.into_indices());
                Begun::Asking(Box::new(Asking { engine, live: live.clone(), rules, plan, asked }))
            }
        }
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
        let bundle = live.bundle_of(rules, live.rules.tariff_otherwise(false));
        let mut asked = Asked::new(terms);
        asked.by(shields().map(|(rule, _)| rule.by()), identity);
        self.refused_without_room(&bundle, &asked)
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

impl Ruling {
    #[inline]
    fn begun(self, request: &RequestView<'_>) -> Begun {
        match self {
            Ruling::Pass(passage) => Begun::Pass(passage),
            Ruling::Refuse(refusal) => Begun::Refuse(Box::new(refusal.told(request.headers()))),
        }
    }
}
