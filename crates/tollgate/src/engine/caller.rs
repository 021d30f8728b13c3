//! Who asks, and which rules are theirs: everything that is worked out before anybody is waited for.

use std::net::IpAddr;
use std::sync::Arc;

use tollgate_core::Timestamp;

use super::live::{Asked, Live, Terms};
use super::ruling::{Refusal, Ruling};
use super::{Asking, Begun, Engine, Passage, Refused};
use crate::identity::{Identity, Origin};
use crate::rules::{CompiledRule, LazyReadings, LimitSetId, PlanQuestion, RequestView};

/// Which limits are a caller's.
pub(super) enum Plan {
    Known(LimitSetId),
    /// Those of a plan that somebody else knows.
    Asked(PlanQuestion),
}

impl Engine {
    /// Decides a request as far as nobody has to be waited for.
    pub(crate) fn begin(&self, request: &RequestView<'_>, peer: IpAddr, terms: Terms) -> Begun {
        let live = self.0.live.load();
        let now = if live.tells_time { self.0.clock.now() } else { Timestamp::ZERO };
        let origin = Origin { peer, headers: request.headers(), path: "" };
        let identity: Identity<'_> = live.rules.identifier().identify_request(Some(request), origin, &live.rules, now);
        // What refuses without looking at more than the address comes first.
        if live.bans_addresses
            && let Some(ban) = live.rules.ban_of_address(&identity, now)
        {
            return Begun::Refuse(Box::new(Refused::banned(ban.until(), now)));
        }
        if request.is_received_path_longer_than(live.path_bytes_max) {
            return Begun::Refuse(Box::new(Refused::path_too_long(live.path_bytes_max)));
        }
        if let Some(uniform) = live.uniform().filter(|_| self.is_in_process()) {
            if let Some(refused) = live.refused_by_name(&identity, now) {
                return Begun::Refuse(refused);
            }
            if live.exempts(&identity) {
                return Begun::Pass(Passage::unlimited());
            }
            let mut asked = Asked::new(terms);
            asked.by(uniform.by.iter(), &identity);
            return self.rule_at_once(&uniform.bundle, &mut asked).begun(request);
        }
        self.begin_apart(&live, request, &identity, now, terms)
    }

    /// Decides a request whose address is not banned, where requests meet different rules.
    #[inline(never)] // so that its many words are not on the stack of those who need none of them
    fn begin_apart(
        &self,
        live: &Arc<Live>,
        request: &RequestView<'_>,
        identity: &Identity<'_>,
        now: Timestamp,
        terms: Terms,
    ) -> Begun {
        // Where routers are nested, the path that was sent is longer than the one that was received.
        if request.is_path_longer_than(live.path_bytes_max) {
            return Begun::Refuse(Box::new(Refused::path_too_long(live.path_bytes_max)));
        }
        let readings = LazyReadings::of(request.path());
        // Before anything is worked out that costs more than an address: a path to normalise (unless a shield looks at paths), a key to
        // hash, a token to verify, a plan to ask for.
        if live.has_shields
            && let Some(refusal) = self.refused_by_shield(live, request, &readings, identity, terms)
        {
            return Begun::Refuse(Box::new(refusal.told(request.headers())));
        }
        let matched = live.rules.matching_read(request, &readings);
        if let Some(refused) = live.refused_by_name(identity, now) {
            return Begun::Refuse(refused);
        }
        if matched.is_empty() || live.exempts(identity) {
            return Begun::Pass(Passage::unlimited());
        }
        let mut asked = Asked::new(terms);
        asked.by(matched.iter().map(CompiledRule::by), identity);
        let plan = self.plan(live, identity, matched.iter().any(CompiledRule::is_by_plan));
        match plan {
            Plan::Known(limit_set) if self.is_in_process() => {
                self.rule_at_once(&live.bundle_of(matched.into_indices(), limit_set), &mut asked).begun(request)
            }
            plan => {
                let (engine, rules) = (self.clone(), matched.into_indices());
                Begun::Asking(Box::new(Asking { engine, live: live.clone(), rules, plan, asked }))
            }
        }
    }

    /// Returns the refusal of the shields, if they have no room and the request is not exempt. Else they are asked again with the
    /// other rules, and charged then. Exemptions are looked at only if the shields would refuse.
    fn refused_by_shield(
        &self,
        live: &Live,
        request: &RequestView<'_>,
        readings: &LazyReadings<'_>,
        identity: &Identity<'_>,
        terms: Terms,
    ) -> Option<Box<Refusal>> {
        let shields = live.rules.matching_shields(request, readings);
        if shields.is_empty() {
            return None;
        }
        let mut asked = Asked::new(terms);
        asked.by(shields.iter().map(CompiledRule::by), identity);
        let bundle = live.bundle_of(shields.into_indices(), live.rules.default_limit_set(false));
        let is_exempt = || live.exempts(identity) || live.rules.is_exempt_path(readings);
        self.refused_without_room(&bundle, &asked, is_exempt)
    }

    fn plan(&self, live: &Live, identity: &Identity<'_>, matters: bool) -> Plan {
        if !matters {
            // Rules that are not by plan have the same limits under every limit_set.
            return Plan::Known(live.rules.default_limit_set(false));
        }
        if let Some(limit_set) = live.rules.limit_set(identity) {
            return Plan::Known(limit_set);
        }
        let question = PlanQuestion::about(identity);
        match self.0.lookups.is_empty() {
            true => Plan::Known(live.rules.default_limit_set(question.is_identified())),
            false => Plan::Asked(question),
        }
    }
}

impl Live {
    /// Returns the refusal of a request that shows a banned key or is made by a banned user.
    #[inline]
    fn refused_by_name(&self, identity: &Identity<'_>, now: Timestamp) -> Option<Box<Refused>> {
        let ban = self.bans_callers.then(|| self.rules.ban_of_caller(identity, now)).flatten()?;
        Some(Box::new(Refused::banned(ban.until(), now)))
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
