//! Reports to the limiter's observers what the limiter does not see: shields, bans, exemptions and reloads.

use tidegate_core::Wait;

use super::check_plan::LimitGroup;
use super::resolve::RequestContext;
use super::{Engine, Refusal};
use crate::identity::Identity;
use crate::observe::{BannedBy, BannedRequest, ExemptBy, ExemptRequest, Observers, ShieldRefusal};
use crate::rules::{Matched, RuleSet};

impl Engine {
    /// Reports to the observers that a group of shields has refused a request. Does nothing if two of its limits count
    /// on one counter.
    pub(super) fn observe_shield(&self, shield: &LimitGroup, context: &RequestContext, refusal: &Refusal) {
        let observers = self.observers();
        if observers.is_empty() {
            return;
        }
        let demands = shield.demands(context);
        if let Ok(check) = shield.check(&demands) {
            let refused = ShieldRefusal { check: &check, decision: refusal.decision() };
            observers.each(|observer| observer.shield_refused(&refused));
        }
    }

    /// Reports to the observers that a ban in the configuration or in the ban list has refused a request.
    ///
    /// `by` says whether the address or the caller is banned.
    pub(super) fn observe_ban(&self, identity: &Identity<'_>, by: BannedBy, remaining: Wait) {
        let request = BannedRequest { address: identity.address(), by, remaining };
        self.observers().each(|observer| observer.banned(&request));
    }

    /// Reports an exempt request to the observers. `rules` are those that apply to it.
    ///
    /// Call it only if no rule applies or the caller is exempt. Does nothing if no rule matches the request, exempt or
    /// not.
    pub(super) fn observe_exemption(&self, rules: &Matched<'_>, identity: &Identity<'_>) {
        if rules.is_exempt_path() || !rules.is_empty() {
            let by = if rules.is_exempt_path() { ExemptBy::Path } else { ExemptBy::Caller };
            let request = ExemptRequest { address: identity.address(), by };
            self.observers().each(|observer| observer.exempted(&request));
        }
    }

    /// Reports to the observers that the rules were replaced by `rules`.
    pub(super) fn observe_reload(&self, rules: &RuleSet) {
        self.observers().each(|observer| observer.reloaded(rules));
    }

    fn observers(&self) -> &Observers {
        self.0.limiter.observers()
    }
}
