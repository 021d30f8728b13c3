//! Which plan a caller has, and where that is said.

use tollgate::config::Loaded;
use tollgate::identity::{Identity, Networks};
use tollgate::rules::Tariff;

use super::PlanSaid;

/// The tariff by which the caller is held, and the plan in words. The plan is none if no rule goes by plans.
pub(super) fn of(loaded: &Loaded, identity: &Identity<'_>) -> (Tariff, Option<PlanSaid>) {
    let rules = &loaded.rules;
    let is_identified = identity.api_key().is_some() || identity.user().is_some();
    let known = rules.needs_tariff().then(|| rules.tariff(identity)).flatten();
    let tariff = known.unwrap_or_else(|| rules.tariff_otherwise(is_identified));
    if !rules.needs_tariff() {
        return (tariff, None);
    }
    let Some(plan) = rules.plan(tariff) else { return (tariff, None) };
    let source = match known {
        Some(tariff) => source(loaded, identity, tariff),
        None if loaded.settings.plan_hash.is_some() && is_identified => "default, unless the Redis hash says another",
        None if is_identified => "default, since nothing says another",
        None => "anonymous, since nobody knows the caller",
    };
    (tariff, Some(PlanSaid { name: plan.name().to_string(), source }))
}

/// The first source that has an answer, in the order in which they are asked.
fn source(loaded: &Loaded, identity: &Identity<'_>, tariff: Tariff) -> &'static str {
    let rules = &loaded.rules;
    let entry = identity.api_key().and_then(|(digest, _)| rules.key(&digest));
    let is_own = !rules.plans().iter().any(|plan| rules.tariff_named(plan.name()) == Some(tariff));
    if is_own {
        return "limits of the key's own";
    }
    if entry.is_some_and(|entry| entry.plan().is_some()) {
        return "the API key";
    }
    let sources = &loaded.config.plan_sources;
    let holds = |networks: &[tollgate::config::Spanned<String>]| {
        let networks = Networks::parse(networks.iter().map(|text| text.as_str()));
        networks.is_ok_and(|networks| networks.contains(identity.address()))
    };
    if sources.addresses.iter().any(|entry| holds(&entry.networks)) {
        return "the address";
    }
    let header = sources.header.as_ref().and_then(|name| name.parse::<http::HeaderName>().ok());
    let said = header.and_then(|name| identity.trusted_header(&name)).and_then(|said| std::str::from_utf8(said).ok());
    if said.is_some_and(|plan| rules.tariff_named(plan).is_some()) {
        return "the trusted proxy's header";
    }
    "the token's claim"
}
