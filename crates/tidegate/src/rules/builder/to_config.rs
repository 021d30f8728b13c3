//! Converts the builder's values to a [`Config`], the form that a configuration file is read into.
//!
//! It is then checked and compiled as if it came from a file. Instead of a position in a file, each value has a name,
//! such as ``rule `shorten`, limit `10/min` ``, with which [`Finding`](crate::config::Finding)s about it begin. Names
//! never contain a secret.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Rules;
use super::callers::{Ban, Banned, JwtSettings, ListedKey, Plan, SecretSource, SecretSourceKind};
use super::rule::{LimitText, Rule};
use crate::config::{
    AddressPlan, Anonymize, AnonymizeEntry, ApiKeyTable, BanEntry, BanKind, BodyEntry, Config, Exempt, HeaderTest, Jwt,
    KeySources, LimitEntry, LimitTable, Limits, MatchTable, OneOrMany, OptionalList, PlanSources, PlanTable, RuleStore,
    RuleTable, Secret, Span, Spanned, StoreEntry, StoreUrl, TimeText,
};
use crate::identity::Rotate;

/// The last second that RFC 3339 can express: 9999-12-31T23:59:59Z.
const RFC3339_SECS_MAX: u64 = 253_402_300_799;

/// The names of values, in the order in which they were added.
///
/// The span of a value, which in a file would be its position, is the index of its name in this list.
#[derive(Default)]
pub(super) struct ValueNames(Vec<String>);

impl ValueNames {
    /// Adds a name and returns the value with the span of that name.
    fn spanned<T>(&mut self, name: impl Into<String>, value: T) -> Spanned<T> {
        self.0.push(name.into());
        Spanned::new(value, Span::new(self.0.len() - 1, self.0.len()))
    }

    /// Adds a name for each text, made of the name of the list and the text, and returns the texts with their spans.
    fn spanned_texts(&mut self, list: &str, texts: Vec<String>) -> OneOrMany<Spanned<String>> {
        OneOrMany(texts.into_iter().map(|text| self.spanned(format!("{list} `{text}`"), text)).collect())
    }
}

/// Converts the rules to a configuration, and returns it with the names of its values. A span is an index of a name.
pub(super) fn to_config(rules: Rules) -> (Config, Vec<String>) {
    let mut value_names = ValueNames::default();
    let names = &mut value_names;
    let (receipt_secret, receipt_secret_env, receipt_secret_file) =
        rules.receipt_secret.map_or((None, None, None), SecretSource::into_fields);
    let config = Config {
        expect: None,
        store: rules.store.map(|url| names.spanned("store", StoreEntry::Url(StoreUrl(url)))),
        prefix: rules.prefix.map(|prefix| names.spanned("prefix", prefix)),
        instances: rules.instances.map(|instances| names.spanned("instances", instances)),
        deadline: rules.deadline.map(|deadline| names.spanned("deadline", TimeText(duration_text(deadline)))),
        on_failure: rules.on_failure,
        headers: rules.headers.map(|styles| names.spanned("headers", styles)),
        body: rules.body.map(BodyEntry::Format),
        expose_headers: rules.expose_headers,
        shadow: names.spanned("shadow", rules.shadow),
        kill_switch: names.spanned("kill_switch", rules.kill_switch),
        path_bytes_max: rules.path_bytes_max.map(|bytes| names.spanned("path_bytes_max", bytes)),
        method_override_headers: names.spanned_texts("method_override_headers", rules.method_override_headers),
        trusted_proxies: names.spanned_texts("trusted_proxies", rules.trusted_proxies),
        forwarding_header: rules.forwarding_header.map(|name| names.spanned("forwarding_header", name)),
        ipv6_prefix: rules.ipv6_prefix.map(|bits| names.spanned("ipv6_prefix", bits)),
        api_key_header: rules.api_key_header.map(|name| names.spanned("api_key_header", name)),
        api_keys: rules.api_keys,
        anonymize: anonymize(rules.anonymize, names),
        jwt: rules.jwt.map(|settings| jwt(settings, names)),
        receipt_secret: receipt_secret.map(|text| names.spanned("receipt_secret", text)),
        receipt_secret_env: receipt_secret_env.map(|name| names.spanned("receipt_secret", name)),
        receipt_secret_file: receipt_secret_file.map(|path| names.spanned("receipt_secret", path)),
        exempt: Exempt {
            addresses: names.spanned_texts("exempt address", rules.exempt_addresses),
            keys: rules.exempt_keys.into_iter().map(|key| names.spanned("exempt key", key)).collect(),
            paths: names.spanned_texts("exempt path", rules.exempt_paths),
        },
        bans: rules.bans.into_iter().enumerate().map(|(index, entry)| ban(entry, index, names)).collect(),
        plans: rules.plans.into_iter().map(|entry| plan(entry, names)).collect(),
        keys: OptionalList(Some(
            rules.keys.into_iter().enumerate().map(|(index, entry)| key(entry, index, names)).collect(),
        )),
        keys_file: rules.keys_file.map(|path| names.spanned("keys_file", path)),
        key_sources: KeySources { redis_hash: rules.key_hash.map(|name| names.spanned("key_hash", name)) },
        plan_sources: PlanSources {
            addresses: rules
                .address_plans
                .into_iter()
                .map(|(networks, plan)| AddressPlan {
                    networks: names.spanned_texts("address_plan", networks),
                    plan: names.spanned("address_plan", plan),
                })
                .collect(),
            header: rules.plan_header.map(|name| names.spanned("plan_header", name)),
            redis_hash: rules.plan_hash.map(|name| names.spanned("plan_hash", name)),
        },
        gateway: Default::default(),
        upstreams: OptionalList(Some(Vec::new())),
        rules: OptionalList(Some(rules.rules.into_iter().map(|entry| rule(entry, names)).collect())),
    };
    (config, value_names.0)
}

fn rule(rule: Rule, names: &mut ValueNames) -> Spanned<RuleTable> {
    let owner = format!("rule `{}`", rule.name);
    let list = |field: &str, texts: Vec<String>, names: &mut ValueNames| {
        let field = format!("{owner}, {field}");
        (!texts.is_empty()).then(|| {
            let texts = names.spanned_texts(&field, texts);
            names.spanned(field, texts)
        })
    };
    let methods = list("method", rule.methods, names);
    let path = list("path", rule.paths, names);
    let host = list("host", rule.hosts, names);
    let groups = list("group", rule.groups, names);
    let mut headers = BTreeMap::new();
    for (name, value) in rule.headers_required {
        let test = value.map_or(HeaderTest::Present, |value| HeaderTest::Equals(value.reveal().to_owned()));
        headers.insert(names.spanned(format!("{owner}, header `{name}`"), name), test);
    }
    let by: Vec<String> = rule.by.iter().map(ToString::to_string).collect();
    let by = list("by", by, names);

    let mut own = limits(&owner, rule.limits, names);
    let limits = match rule.is_by_plan {
        true if own.is_empty() => Limits::Plan,
        // The compiler reports it, as for a file with `plan` in a list of limits.
        true => {
            own.0.push(names.spanned(format!("{owner}, limits_from_plan"), LimitEntry::Text("plan".to_owned())));
            Limits::Own(own)
        }
        false => Limits::Own(own),
    };
    let table = RuleTable {
        name: names.spanned(owner.clone(), rule.name),
        matches: names.spanned(owner.clone(), MatchTable { methods, path, host, groups, headers }),
        by,
        limits: names.spanned(format!("{owner}, limits"), limits),
        mode: rule.mode,
        on_failure: rule.on_failure,
        charge: names.spanned(format!("{owner}, charge"), rule.charge),
        cost: rule.cost.map(|cost| names.spanned(format!("{owner}, cost"), cost.units())),
        headers: rule.headers.map(|styles| names.spanned(format!("{owner}, headers"), styles)),
        body: rule.body.map(BodyEntry::Format),
        store: rule.is_shield.then(|| names.spanned(format!("{owner}, shield"), RuleStore::Memory)),
    };
    names.spanned(owner, table)
}

fn plan(plan: Plan, names: &mut ValueNames) -> (Spanned<String>, PlanTable) {
    let owner = format!("plan `{}`", plan.name);
    let limits = limits(&owner, plan.limits, names);
    let table = PlanTable {
        limits: names.spanned(format!("{owner}, limits"), limits),
        upgrade_url: plan.upgrade_url.map(|url| names.spanned(format!("{owner}, upgrade_url"), url)),
    };
    (names.spanned(owner, plan.name), table)
}

fn key(key: ListedKey, index: usize, names: &mut ValueNames) -> Spanned<ApiKeyTable> {
    let owner = match &key.name {
        Some(name) => format!("key `{name}`"),
        None => format!("key {}", index + 1),
    };
    let limits = limits(&owner, key.limits, names);
    let groups = names.spanned_texts(&format!("{owner}, group"), key.groups);
    let (text, sha256) = match key.key {
        Ok(text) => (Some(names.spanned(owner.clone(), text)), None),
        Err(digest) => (None, Some(names.spanned(owner.clone(), digest))),
    };
    let table = ApiKeyTable {
        key: text,
        sha256,
        name: key.name,
        plan: key.plan.map(|plan| names.spanned(format!("{owner}, plan"), plan)),
        limits: (!limits.is_empty()).then(|| names.spanned(format!("{owner}, limits"), limits)),
        groups: (!groups.is_empty()).then(|| names.spanned(format!("{owner}, group"), groups)),
        exempt: key.is_exempt,
    };
    names.spanned(owner, table)
}

fn ban(ban: Ban, index: usize, names: &mut ValueNames) -> Spanned<BanEntry> {
    let owner = format!("ban {}", index + 1);
    let (by, value) = match ban.banned {
        Banned::Network(network) => (BanKind::Ip, Secret::new(network)),
        Banned::ApiKey(key) => (BanKind::ApiKey, key),
        Banned::User(user) => (BanKind::User, Secret::new(user)),
    };
    let table = BanEntry {
        by,
        value: names.spanned(owner.clone(), value),
        until: ban.until.map(|until| names.spanned(format!("{owner}, until"), rfc3339(until))),
        reason: ban.reason,
    };
    names.spanned(owner, table)
}

fn limits(
    owner: &str,
    limits: Vec<(Option<String>, LimitText)>,
    names: &mut ValueNames,
) -> OneOrMany<Spanned<LimitEntry>> {
    let entry = |(name, LimitText(text)): (Option<String>, LimitText)| {
        let owner = format!("{owner}, limit `{text}`");
        let entry = match name {
            None => LimitEntry::Text(text),
            Some(name) => LimitEntry::Table(Box::new(LimitTable {
                name: Some(names.spanned(owner.clone(), name)),
                limit: Some(names.spanned(owner.clone(), text)),
                ..LimitTable::default()
            })),
        };
        names.spanned(owner, entry)
    };
    OneOrMany(limits.into_iter().map(entry).collect())
}

fn anonymize(settings: Option<(Rotate, Option<SecretSource>)>, names: &mut ValueNames) -> Spanned<AnonymizeEntry> {
    let entry = match settings {
        None => AnonymizeEntry::Off,
        Some((rotate, secret)) => {
            let (secret, secret_env, secret_file) = secret.map_or((None, None, None), SecretSource::into_fields);
            AnonymizeEntry::On(Box::new(Anonymize {
                secret: secret.map(|text| names.spanned("anonymize, secret", text)),
                secret_env: secret_env.map(|name| names.spanned("anonymize, secret", name)),
                secret_file: secret_file.map(|path| names.spanned("anonymize, secret", path)),
                rotate,
            }))
        }
    };
    names.spanned("anonymize", entry)
}

fn jwt(settings: JwtSettings, names: &mut ValueNames) -> Spanned<Jwt> {
    let (key, key_env, key_file) = settings.key.into_fields();
    let table = Jwt {
        algorithm: settings.algorithm,
        key: key.map(|text| names.spanned("jwt, key", text)),
        key_env: key_env.map(|name| names.spanned("jwt, key", name)),
        key_file: key_file.map(|path| names.spanned("jwt, key", path)),
        plan_claim: settings.plan_claim,
        issuer: settings.issuer,
        audience: settings.audience,
    };
    names.spanned("jwt", table)
}

impl SecretSource {
    /// Returns the text, the name of the variable and the path of the file, of which exactly one is `Some`.
    fn into_fields(self) -> (Option<Secret>, Option<Secret>, Option<String>) {
        match self.0 {
            SecretSourceKind::Text(text) => (Some(text), None, None),
            SecretSourceKind::Variable(name) => (None, Some(name), None),
            SecretSourceKind::File(path) => (None, None, Some(path)),
        }
    }
}

fn duration_text(duration: Duration) -> String {
    format!("{}us", duration.as_micros())
}

/// Formats an instant as RFC 3339. One before 1970 or after 9999 becomes the first or last second of these years.
fn rfc3339(instant: SystemTime) -> String {
    let since_epoch = instant.duration_since(UNIX_EPOCH).unwrap_or_default();
    let expressible = since_epoch.min(Duration::from_secs(RFC3339_SECS_MAX));
    humantime::format_rfc3339(UNIX_EPOCH + expressible).to_string()
}
