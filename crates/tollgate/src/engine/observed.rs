//! Reports to the limiter's observers what the limiter does not see: shields, bans, exemptions and reloads.

use super::check_plan::LimitGroup;
use super::request::RequestContext;
use super::{Engine, Refusal};
use crate::identity::Identity;
use crate::observe::{BannedBy, BannedRequest, ExemptBy, ExemptRequest, Observers, ShieldRefusal};
use crate::rules::{Matched, RuleSet};

impl Engine {
    /// Reports that shields have refused a request.
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

    /// Reports that a ban of the configuration has refused a request.
    pub(super) fn observe_ban(&self, identity: &Identity<'_>, by: BannedBy, refusal: &Refusal) {
        let Refusal::Banned { remaining, .. } = *refusal else { return };
        let observers = self.observers();
        if !observers.is_empty() {
            let request = BannedRequest { address: identity.address(), by, remaining };
            observers.each(|observer| observer.banned(&request));
        }
    }

    /// Reports that a request is not limited, unless the reason is that no rule matches it.
    pub(super) fn observe_exemption(&self, rules: &Matched<'_>, identity: &Identity<'_>) {
        let observers = self.observers();
        let by = match rules.is_exempt_path() {
            true => ExemptBy::Path,
            false if rules.is_empty() => return,
            false => ExemptBy::Caller,
        };
        if !observers.is_empty() {
            let request = ExemptRequest { address: identity.address(), by };
            observers.each(|observer| observer.exempted(&request));
        }
    }

    /// Reports that the rules were replaced.
    pub(super) fn observe_reload(&self, rules: &RuleSet) {
        self.observers().each(|observer| observer.reloaded(rules));
    }

    fn observers(&self) -> &Observers {
        self.0.limiter.observers()
    }
}
