//! From the builder's values to the form that a configuration file is read into.
//!
//! That form is checked and compiled as if it came from a file. Each value gets a name in place of a position in a file,
//! such as ``rule `shorten`, limit `10/min` ``, which [`Finding`](crate::config::Finding)s then begin with. Names never
//! contain a secret.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Rules;
use super::callers::{Ban, Banned, JwtSettings, ListedKey, Plan, SecretSource, Source};
use super::rule::{LimitText, Rule};
use crate::config::{
    AddressPlan, Anonymize, AnonymizeEntry, ApiKeyTable, BanEntry, BanKind, Config, Exempt, HeaderTest, Jwt,
    LimitEntry, LimitTable, Limits, MatchTable, OneOrMany, OptionalList, PlanSources, PlanTable, RuleStore, RuleTable,
    Secret, Span, Spanned, StoreUrl,
};
use crate::identity::Rotate;

/// The last second that RFC 3339 can express: 9999-12-31T23:59:59Z.
const RFC3339_SECS_MAX: u64 = 253_402_300_799;

/// The names of values, in the order in which they were added. A value's span is its place in this list.
#[derive(Default)]
pub(super) struct Places(Vec<String>);

impl Places {
    fn name<T>(&mut self, name: impl Into<String>, value: T) -> Spanned<T> {
        self.0.push(name.into());
        Spanned::new(value, Span::new(self.0.len() - 1, self.0.len()))
    }

    /// Names each text of a list by the list and the text.
    fn texts(&mut self, list: &str, texts: Vec<String>) -> OneOrMany<Spanned<String>> {
        OneOrMany(texts.into_iter().map(|text| self.name(format!("{list} `{text}`"), text)).collect())
    }
}

/// Converts the rules, and returns the names of their values.
pub(super) fn lower(rules: Rules) -> (Config, Vec<String>) {
    let mut places = Places::default();
    let at = &mut places;
    let config = Config {
        expect: None,
        store: rules.store.map(|url| at.name("store", StoreUrl(url))),
        prefix: rules.prefix.map(|prefix| at.name("prefix", prefix)),
        instances: rules.instances.map(|instances| at.name("instances", instances)),
        deadline: rules.deadline.map(|deadline| at.name("deadline", time(deadline))),
        on_failure: rules.on_failure,
        headers: rules.headers.map(|styles| at.name("headers", styles)),
        expose_headers: rules.expose_headers,
        shadow: at.name("shadow", rules.shadow),
        kill_switch: at.name("kill_switch", rules.kill_switch),
        path_bytes_max: rules.path_bytes_max.map(|bytes| at.name("path_bytes_max", bytes)),
        method_override_headers: at.texts("method_override_headers", rules.method_override_headers),
        trusted_proxies: at.texts("trusted_proxies", rules.trusted_proxies),
        forwarding_header: rules.forwarding_header.map(|name| at.name("forwarding_header", name)),
        ipv6_prefix: rules.ipv6_prefix.map(|bits| at.name("ipv6_prefix", bits)),
        api_key_header: rules.api_key_header.map(|name| at.name("api_key_header", name)),
        api_keys: rules.api_keys,
        anonymize: anonymize(rules.anonymize, at),
        jwt: rules.jwt.map(|settings| jwt(settings, at)),
        exempt: Exempt {
            addresses: at.texts("exempt address", rules.exempt_addresses),
            keys: rules.exempt_keys.into_iter().map(|key| at.name("exempt key", key)).collect(),
            paths: at.texts("exempt path", rules.exempt_paths),
        },
        bans: rules.bans.into_iter().enumerate().map(|(index, entry)| ban(entry, index, at)).collect(),
        plans: rules.plans.into_iter().map(|entry| plan(entry, at)).collect(),
        keys: OptionalList(Some(
            rules.keys.into_iter().enumerate().map(|(index, entry)| key(entry, index, at)).collect(),
        )),
        keys_file: rules.keys_file.map(|path| at.name("keys_file", path)),
        plan_sources: PlanSources {
            addresses: rules
                .address_plans
                .into_iter()
                .map(|(networks, plan)| AddressPlan {
                    networks: at.texts("address_plan", networks),
                    plan: at.name("address_plan", plan),
                })
                .collect(),
            header: rules.plan_header.map(|name| at.name("plan_header", name)),
            redis_hash: rules.plan_hash.map(|name| at.name("plan_hash", name)),
        },
        rules: OptionalList(Some(rules.rules.into_iter().map(|entry| rule(entry, at)).collect())),
    };
    (config, places.0)
}

fn rule(rule: Rule, places: &mut Places) -> Spanned<RuleTable> {
    let place = format!("rule `{}`", rule.name);
    let list = |field: &str, texts: Vec<String>, places: &mut Places| {
        let field = format!("{place}, {field}");
        (!texts.is_empty()).then(|| {
            let texts = places.texts(&field, texts);
            places.name(field, texts)
        })
    };
    let methods = list("method", rule.methods, places);
    let path = list("path", rule.paths, places);
    let host = list("host", rule.hosts, places);
    let mut headers = BTreeMap::new();
    for (name, value) in rule.headers_required {
        let test = value.map_or(HeaderTest::Present, |value| HeaderTest::Equals(value.reveal().to_owned()));
        headers.insert(places.name(format!("{place}, header `{name}`"), name), test);
    }
    let by: Vec<String> = rule.by.iter().map(ToString::to_string).collect();
    let by = list("by", by, places);

    let mut own = limits(&place, rule.limits, places);
    let limits = match rule.is_by_plan {
        true if own.is_empty() => Limits::Plan,
        // As in a file, where `plan` stands alone: the compiler reports it.
        true => {
            own.0.push(places.name(format!("{place}, limits_from_plan"), LimitEntry::Text("plan".to_owned())));
            Limits::Own(own)
        }
        false => Limits::Own(own),
    };
    let table = RuleTable {
        name: places.name(place.clone(), rule.name),
        matches: places.name(place.clone(), MatchTable { methods, path, host, headers }),
        by,
        limits: places.name(format!("{place}, limits"), limits),
        mode: rule.mode,
        on_failure: rule.on_failure,
        charge: places.name(format!("{place}, charge"), rule.charge),
        cost: rule.cost.map(|cost| places.name(format!("{place}, cost"), cost.units())),
        headers: rule.headers.map(|styles| places.name(format!("{place}, headers"), styles)),
        body: rule.body,
        store: rule.is_shield.then(|| places.name(format!("{place}, shield"), RuleStore::Memory)),
    };
    places.name(place, table)
}

fn plan(plan: Plan, places: &mut Places) -> (Spanned<String>, PlanTable) {
    let place = format!("plan `{}`", plan.name);
    let limits = limits(&place, plan.limits, places);
    let table = PlanTable {
        limits: places.name(format!("{place}, limits"), limits),
        upgrade_url: plan.upgrade_url.map(|url| places.name(format!("{place}, upgrade_url"), url)),
    };
    (places.name(place, plan.name), table)
}

fn key(key: ListedKey, index: usize, places: &mut Places) -> Spanned<ApiKeyTable> {
    let place = match &key.name {
        Some(name) => format!("key `{name}`"),
        None => format!("key {}", index + 1),
    };
    let limits = limits(&place, key.limits, places);
    let (text, sha256) = match key.key {
        Ok(text) => (Some(places.name(place.clone(), text)), None),
        Err(digest) => (None, Some(places.name(place.clone(), digest))),
    };
    let table = ApiKeyTable {
        key: text,
        sha256,
        name: key.name,
        plan: key.plan.map(|plan| places.name(format!("{place}, plan"), plan)),
        limits: (!limits.is_empty()).then(|| places.name(format!("{place}, limits"), limits)),
        exempt: key.is_exempt,
    };
    places.name(place, table)
}

fn ban(ban: Ban, index: usize, places: &mut Places) -> Spanned<BanEntry> {
    let place = format!("ban {}", index + 1);
    let (by, value) = match ban.banned {
        Banned::Network(network) => (BanKind::Ip, Secret::new(network)),
        Banned::ApiKey(key) => (BanKind::ApiKey, key),
        Banned::User(user) => (BanKind::User, Secret::new(user)),
    };
    let table = BanEntry {
        by,
        value: places.name(place.clone(), value),
        until: ban.until.map(|until| places.name(format!("{place}, until"), instant(until))),
        reason: ban.reason,
    };
    places.name(place, table)
}

fn limits(
    place: &str,
    limits: Vec<(Option<String>, LimitText)>,
    places: &mut Places,
) -> OneOrMany<Spanned<LimitEntry>> {
    let entry = |(name, LimitText(text)): (Option<String>, LimitText)| {
        let place = format!("{place}, limit `{text}`");
        let entry = match name {
            None => LimitEntry::Text(text),
            Some(name) => LimitEntry::Table(Box::new(LimitTable {
                name: Some(places.name(place.clone(), name)),
                limit: Some(places.name(place.clone(), text)),
                ..LimitTable::default()
            })),
        };
        places.name(place, entry)
    };
    OneOrMany(limits.into_iter().map(entry).collect())
}

fn anonymize(settings: Option<(Rotate, Option<SecretSource>)>, places: &mut Places) -> Spanned<AnonymizeEntry> {
    let entry = match settings {
        None => AnonymizeEntry::Off,
        Some((rotate, secret)) => {
            let (secret, secret_env, secret_file) = secret.map_or((None, None, None), SecretSource::into_ways);
            AnonymizeEntry::On(Box::new(Anonymize {
                secret: secret.map(|text| places.name("anonymize, secret", text)),
                secret_env: secret_env.map(|name| places.name("anonymize, secret", name)),
                secret_file: secret_file.map(|path| places.name("anonymize, secret", path)),
                rotate,
            }))
        }
    };
    places.name("anonymize", entry)
}

fn jwt(settings: JwtSettings, places: &mut Places) -> Spanned<Jwt> {
    let (key, key_env, key_file) = settings.key.into_ways();
    let table = Jwt {
        algorithm: settings.algorithm,
        key: key.map(|text| places.name("jwt, key", text)),
        key_env: key_env.map(|name| places.name("jwt, key", name)),
        key_file: key_file.map(|path| places.name("jwt, key", path)),
        plan_claim: settings.plan_claim,
        issuer: settings.issuer,
        audience: settings.audience,
    };
    places.name("jwt", table)
}

impl SecretSource {
    /// Returns the text, the variable and the file, of which exactly one is set.
    fn into_ways(self) -> (Option<Secret>, Option<Secret>, Option<String>) {
        match self.0 {
            Source::Text(text) => (Some(text), None, None),
            Source::Variable(name) => (None, Some(name), None),
            Source::File(path) => (None, None, Some(path)),
        }
    }
}

fn time(time: Duration) -> String {
    format!("{}us", time.as_micros())
}

/// Returns the instant in RFC 3339. One before 1970 or after 9999 becomes the nearest that can be expressed.
fn instant(instant: SystemTime) -> String {
    let since_epoch = instant.duration_since(UNIX_EPOCH).unwrap_or_default();
    let expressible = since_epoch.min(Duration::from_secs(RFC3339_SECS_MAX));
    humantime::format_rfc3339(UNIX_EPOCH + expressible).to_string()
}
