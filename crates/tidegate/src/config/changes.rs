//! The difference between two configurations: the parts that a reload removes, and those that it changes.
//!
//! A truncated file may still be valid, with fewer rules. So a reload compares the new configuration with the active
//! one. A part is removed if it is absent in the new one: a rule, a limit of a rule, a key, an entry of a list, a field
//! that falls back to its default. Everything else that differs is changed. Names are those of the configuration
//! (rules, plans, names of keys, fields); they contain no key, no address and no secret.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use super::forms::{LimitEntry, Limits, OneOrMany, Secret};
use super::load::Loaded;
use super::span::Spanned;
use super::types::{
    ApiKeyTable, BanEntry, BanKind, Config, Exempt, GatewayTable, KeySources, MatchTable, PlanSources, PlanTable,
    RuleTable, UpstreamTable,
};
use crate::identity::KeyDigest;

/// The kind of a [`Part`]. Its name, such as `rule`, is a metrics label.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum PartKind {
    /// A rule.
    Rule,
    /// A limit of a rule, a plan or a key.
    Limit,
    /// A plan.
    Plan,
    /// An API key.
    Key,
    /// A ban.
    Ban,
    /// An address, a key or a path that is exempt.
    Exemption,
    /// An upstream of the gateway.
    Upstream,
    /// A field of the file, of a rule, of a plan, of a key or of a limit. For an entry of a list, the name is the
    /// list's.
    Setting,
}

impl PartKind {
    /// All kinds.
    pub const ALL: [PartKind; 8] = [
        PartKind::Rule,
        PartKind::Limit,
        PartKind::Plan,
        PartKind::Key,
        PartKind::Ban,
        PartKind::Exemption,
        PartKind::Upstream,
        PartKind::Setting,
    ];

    /// Returns the name in metrics and in JSON, such as `rule`.
    pub const fn as_str(self) -> &'static str {
        match self {
            PartKind::Rule => "rule",
            PartKind::Limit => "limit",
            PartKind::Plan => "plan",
            PartKind::Key => "key",
            PartKind::Ban => "ban",
            PartKind::Exemption => "exemption",
            PartKind::Upstream => "upstream",
            PartKind::Setting => "setting",
        }
    }
}

impl fmt::Display for PartKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A rule, a key, a field or another part of a configuration that a reload removes or changes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Part {
    /// The kind of the part.
    pub kind: PartKind,
    /// The name of the part, such as `login` or `daily of rule export`. It never contains a key, an address or a
    /// secret.
    pub name: String,
}

/// The differences between a configuration and the one that it replaces. Empty if it replaces none.
///
/// Added parts are not listed, but [`is_empty`](Changes::is_empty) considers them. A rule, plan or key that has lost a
/// limit or a field is among `changed`, and the limit or the field is among `removed`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Changes {
    /// The parts that the replaced configuration has and the new one lacks, and fields that have their default again.
    pub removed: Vec<Part>,
    /// The parts that both have and that differ.
    pub changed: Vec<Part>,
    /// Whether anything was added or reordered. May also be set if parts were removed or changed.
    has_added: bool,
}

impl Changes {
    /// Returns whether nothing was removed, changed, added or reordered. The order of keys does not matter.
    ///
    /// Layout, comments, `expect`, the names of keys, and the content of secret files and variables are not compared.
    pub fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.changed.is_empty() && !self.has_added
    }

    /// Returns the names of the removed parts of this kind. One name may occur several times, such as `by ip` of bans.
    pub fn removed_of(&self, kind: PartKind) -> impl Iterator<Item = &str> {
        self.removed.iter().filter(move |part| part.kind == kind).map(|part| part.name.as_str())
    }

    /// Compares the configuration `before` with the one that replaces it, including the keys of their keys files.
    pub(crate) fn between(before: &Loaded, after: &Loaded) -> Changes {
        let mut changes = Changes::default();
        changes.config(&before.config, &after.config);
        changes.keys(keys(before), keys(after).collect());
        changes
    }

    fn remove(&mut self, kind: PartKind, name: impl Into<String>) {
        self.removed.push(Part { kind, name: name.into() });
    }

    /// Records a difference in the field `name` of `owner`, such as `rule login`. An empty `owner` is the file itself.
    ///
    /// `Lost` adds a removed part, `Changed` a changed one. `Added` sets only the flag, and `None` does nothing.
    fn note(&mut self, difference: Difference, name: &str, owner: &str) {
        let name = if owner.is_empty() { name.to_owned() } else { format!("{name} of {owner}") };
        match difference {
            Difference::None => {}
            Difference::Lost => self.remove(PartKind::Setting, name),
            Difference::Changed => self.changed.push(Part { kind: PartKind::Setting, name }),
            Difference::Added => self.has_added = true,
        }
    }

    fn config(&mut self, before: &Config, after: &Config) {
        // The pattern names every field, so that a new one cannot be forgotten.
        let Config {
            expect: _, // checked by `reload`
            store,
            prefix,
            instances,
            deadline,
            on_failure,
            headers,
            body,
            expose_headers,
            shadow,
            kill_switch,
            path_bytes_max,
            method_override_headers,
            trusted_proxies,
            forwarding_header,
            ipv6_prefix,
            api_key_header,
            api_keys,
            anonymize,
            jwt,
            receipt_secret,
            receipt_secret_env,
            receipt_secret_file,
            exempt,
            bans,
            plans,
            keys: _, // with those of the keys file
            keys_file,
            key_sources: KeySources { redis_hash: key_hash },
            plan_sources,
            gateway,
            upstreams,
            rules,
        } = before;
        self.note(option(store, &after.store), "store", "");
        self.note(option(prefix, &after.prefix), "prefix", "");
        self.note(option(instances, &after.instances), "instances", "");
        self.note(option(deadline, &after.deadline), "deadline", "");
        self.note(value(on_failure, &after.on_failure), "on_failure", "");
        self.note(option(headers, &after.headers), "headers", "");
        self.note(option(body, &after.body), "body", "");
        self.note(value(expose_headers, &after.expose_headers), "expose_headers", "");
        self.note(value(shadow, &after.shadow), "shadow", "");
        self.note(value(kill_switch, &after.kill_switch), "kill_switch", "");
        self.note(option(path_bytes_max, &after.path_bytes_max), "path_bytes_max", "");
        self.note(list(method_override_headers, &after.method_override_headers), "method_override_headers", "");
        self.note(list(trusted_proxies, &after.trusted_proxies), "trusted_proxies", "");
        self.note(option(forwarding_header, &after.forwarding_header), "forwarding_header", "");
        self.note(option(ipv6_prefix, &after.ipv6_prefix), "ipv6_prefix", "");
        self.note(option(api_key_header, &after.api_key_header), "api_key_header", "");
        self.note(value(api_keys, &after.api_keys), "api_keys", "");
        self.note(value(anonymize, &after.anonymize), "anonymize", "");
        self.note(option(jwt, &after.jwt), "jwt", "");
        if let (Some(before), Some(after)) = (jwt, &after.jwt) {
            self.note(lost(&before.plan_claim, &after.plan_claim), "plan_claim", "jwt");
            self.note(lost(&before.issuer, &after.issuer), "issuer", "jwt");
            self.note(lost(&before.audience, &after.audience), "audience", "jwt");
        }
        self.note(option(receipt_secret, &after.receipt_secret), "receipt_secret", "");
        self.note(option(receipt_secret_env, &after.receipt_secret_env), "receipt_secret_env", "");
        self.note(option(receipt_secret_file, &after.receipt_secret_file), "receipt_secret_file", "");
        self.exempt(exempt, &after.exempt);
        self.bans(bans, &after.bans);
        self.plans(plans, &after.plans);
        self.note(option(keys_file, &after.keys_file), "keys_file", "");
        self.note(option(key_hash, &after.key_sources.redis_hash), "key_sources.redis_hash", "");
        self.plan_sources(plan_sources, &after.plan_sources);
        self.gateway(gateway, &after.gateway);
        self.upstreams(upstreams, &after.upstreams);
        self.rules(rules, &after.rules);
    }

    fn exempt(&mut self, before: &Exempt, after: &Exempt) {
        let Exempt { addresses, keys, paths } = before;
        for _ in missing(addresses.iter().map(|text| text.as_str()), after.addresses.iter().map(|text| text.as_str())) {
            self.remove(PartKind::Exemption, "an address");
        }
        for _ in missing(keys.iter().map(|key| key.reveal()), after.keys.iter().map(|key| key.reveal())) {
            self.remove(PartKind::Exemption, "a key");
        }
        for path in missing(paths.iter().map(|text| text.as_str()), after.paths.iter().map(|text| text.as_str())) {
            self.remove(PartKind::Exemption, format!("path {path}"));
        }
        self.has_added |= before != after;
    }

    fn bans(&mut self, before: &[Spanned<BanEntry>], after: &[Spanned<BanEntry>]) {
        let name = |ban: &BanEntry| match ban.by {
            BanKind::Ip => "by ip",
            BanKind::ApiKey => "by api_key",
            BanKind::User => "by user",
        };
        let values: HashMap<(&str, &str), &BanEntry> =
            after.iter().map(|ban| ((name(ban), ban.value.reveal()), &**ban)).collect();
        for ban in before {
            match values.get(&(name(ban), ban.value.reveal())) {
                None => self.remove(PartKind::Ban, name(ban)),
                Some(other) if other.until != ban.until => {
                    self.changed.push(Part { kind: PartKind::Ban, name: name(ban).to_owned() });
                }
                Some(_) => {}
            }
        }
        self.has_added |= before != after;
    }

    fn plans(&mut self, before: &BTreeMap<Spanned<String>, PlanTable>, after: &BTreeMap<Spanned<String>, PlanTable>) {
        for (name, plan) in before {
            let Some(other) = after.get(name) else {
                self.remove(PartKind::Plan, name.as_str());
                continue;
            };
            let owner = format!("plan {}", **name);
            self.limits(&plan.limits, &other.limits, &owner);
            self.note(lost(&plan.upgrade_url, &other.upgrade_url), "upgrade_url", &owner);
            if plan != other {
                self.changed.push(Part { kind: PartKind::Plan, name: name.to_string() });
            }
        }
        self.has_added |= before.len() < after.len();
    }

    fn plan_sources(&mut self, before: &PlanSources, after: &PlanSources) {
        let PlanSources { addresses, header, redis_hash } = before;
        self.note(list(addresses, &after.addresses), "plan_sources.addresses", "");
        self.note(option(header, &after.header), "plan_sources.header", "");
        self.note(option(redis_hash, &after.redis_hash), "plan_sources.redis_hash", "");
    }

    fn gateway(&mut self, before: &GatewayTable, after: &GatewayTable) {
        let GatewayTable {
            listen,
            proxy_protocol,
            access_log,
            header_bytes_max,
            headers_max,
            uri_bytes_max,
            streams_max,
            connections_per_address,
            body_timeout,
            body_rate_min,
            underscores_in_headers,
        } = before;
        self.note(option(listen, &after.listen), "gateway.listen", "");
        self.note(option(proxy_protocol, &after.proxy_protocol), "gateway.proxy_protocol", "");
        self.note(value(access_log, &after.access_log), "gateway.access_log", "");
        self.note(option(header_bytes_max, &after.header_bytes_max), "gateway.header_bytes_max", "");
        self.note(option(headers_max, &after.headers_max), "gateway.headers_max", "");
        self.note(option(uri_bytes_max, &after.uri_bytes_max), "gateway.uri_bytes_max", "");
        self.note(option(streams_max, &after.streams_max), "gateway.streams_max", "");
        let connections = option(connections_per_address, &after.connections_per_address);
        self.note(connections, "gateway.connections_per_address", "");
        self.note(option(body_timeout, &after.body_timeout), "gateway.body_timeout", "");
        self.note(option(body_rate_min, &after.body_rate_min), "gateway.body_rate_min", "");
        let underscores = value(underscores_in_headers, &after.underscores_in_headers);
        self.note(underscores, "gateway.underscores_in_headers", "");
    }

    fn upstreams(&mut self, before: &[Spanned<UpstreamTable>], after: &[Spanned<UpstreamTable>]) {
        for upstream in before {
            match after.iter().find(|other| other.name == upstream.name) {
                None => self.remove(PartKind::Upstream, upstream.name.as_str()),
                Some(other) if **other != **upstream => {
                    self.changed.push(Part { kind: PartKind::Upstream, name: upstream.name.to_string() });
                }
                Some(_) => {}
            }
        }
        self.has_added |= before != after;
    }

    fn keys<'k>(
        &mut self,
        before: impl Iterator<Item = (KeyDigest, &'k ApiKeyTable)>,
        after: HashMap<KeyDigest, &'k ApiKeyTable>,
    ) {
        let mut kept = 0;
        for (digest, key) in before {
            let name = key.name.as_deref().unwrap_or("(unnamed)");
            let Some(other) = after.get(&digest) else {
                self.remove(PartKind::Key, name);
                continue;
            };
            kept += 1;
            let owner = format!("key {name}");
            self.note(lost(&key.plan, &other.plan), "plan", &owner);
            self.note(lost(&key.limits, &other.limits), "limits", &owner);
            if let (Some(limits), Some(other)) = (&key.limits, &other.limits) {
                self.limits(limits, other, &owner);
            }
            self.note(lost_entries(&key.groups, &other.groups), "groups", &owner);
            self.note(lost_flag(key.exempt, other.exempt), "exempt", &owner);
            let parts = |key: &'k ApiKeyTable| (&key.plan, &key.limits, &key.groups, key.exempt);
            if parts(key) != parts(other) {
                self.changed.push(Part { kind: PartKind::Key, name: name.to_owned() });
            }
        }
        self.has_added |= kept < after.len();
    }

    fn rules(&mut self, before: &[Spanned<RuleTable>], after: &[Spanned<RuleTable>]) {
        let by_name: HashMap<&str, &RuleTable> = after.iter().map(|rule| (rule.name.as_str(), &**rule)).collect();
        for rule in before {
            match by_name.get(rule.name.as_str()) {
                None => self.remove(PartKind::Rule, rule.name.as_str()),
                Some(other) if **rule != **other => {
                    self.rule(rule, other);
                    self.changed.push(Part { kind: PartKind::Rule, name: rule.name.to_string() });
                }
                Some(_) => {}
            }
        }
        // The order of rules does not change decisions, but an answer may name another rule.
        self.has_added |= before != after;
    }

    fn rule(&mut self, before: &RuleTable, after: &RuleTable) {
        let RuleTable { name, matches, by, limits, mode, on_failure, charge, cost, headers, body, store } = before;
        let owner = format!("rule {}", **name);
        self.matches(matches, &after.matches, &owner);
        self.note(lost_entries(by, &after.by), "by", &owner);
        if let (Limits::Own(limits), Limits::Own(other)) = (&**limits, &*after.limits) {
            self.limits(limits, other, &owner);
        }
        self.note(value(mode, &after.mode).only_lost(), "mode", &owner);
        self.note(lost(on_failure, &after.on_failure), "on_failure", &owner);
        self.note(value(charge, &after.charge).only_lost(), "charge", &owner);
        self.note(lost(cost, &after.cost), "cost", &owner);
        self.note(lost(headers, &after.headers), "headers", &owner);
        self.note(lost(body, &after.body), "body", &owner);
        self.note(lost(store, &after.store), "store", &owner);
    }

    fn matches(&mut self, before: &MatchTable, after: &MatchTable, owner: &str) {
        let MatchTable { methods, path, host, groups, headers } = before;
        self.note(lost_entries(methods, &after.methods), "match.methods", owner);
        self.note(lost_entries(path, &after.path), "match.path", owner);
        self.note(lost_entries(host, &after.host), "match.host", owner);
        self.note(lost_entries(groups, &after.groups), "match.groups", owner);
        let is_lost = headers.keys().any(|name| !after.headers.contains_key(name));
        self.note(if is_lost { Difference::Lost } else { Difference::None }, "match.headers", owner);
    }

    fn limits(&mut self, before: &[Spanned<LimitEntry>], after: &[Spanned<LimitEntry>], owner: &str) {
        let after = numbered(after);
        for ((name, number), limit) in numbered(before) {
            let Some(other) = after.get(&(name, number)) else {
                self.remove(PartKind::Limit, format!("{name} of {owner}"));
                continue;
            };
            if let (LimitEntry::Table(table), LimitEntry::Table(other)) = (limit, other) {
                let owner = format!("limit {name} of {owner}");
                self.note(lost(&table.algorithm, &other.algorithm), "algorithm", &owner);
                self.note(lost(&table.burst, &other.burst), "burst", &owner);
                self.note(lost(&table.queue, &other.queue), "queue", &owner);
                self.note(lost(&table.count_denied, &other.count_denied), "count_denied", &owner);
            }
        }
    }
}

/// How a value differs from the one in the replaced configuration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Difference {
    /// The values are equal.
    None,
    /// The value, or an entry of it, is absent now; or the value is its default again.
    Lost,
    /// The value is another one, and not its default.
    Changed,
    /// The value was absent before; or entries were added to a list or reordered, and none was removed.
    Added,
}

impl Difference {
    /// Returns `Lost` if this is `Lost`, else `None`. For fields of a part, such as a rule, that is itself listed as
    /// changed.
    fn only_lost(self) -> Difference {
        if self == Difference::Lost { Difference::Lost } else { Difference::None }
    }
}

fn option<T: PartialEq>(before: &Option<T>, after: &Option<T>) -> Difference {
    match (before, after) {
        (Some(_), None) => Difference::Lost,
        (None, Some(_)) => Difference::Added,
        _ if before == after => Difference::None,
        _ => Difference::Changed,
    }
}

fn lost<T: PartialEq>(before: &Option<T>, after: &Option<T>) -> Difference {
    option(before, after).only_lost()
}

fn lost_flag(before: bool, after: bool) -> Difference {
    if before && !after { Difference::Lost } else { Difference::None }
}

fn value<T: PartialEq + Default>(before: &T, after: &T) -> Difference {
    match before == after {
        true => Difference::None,
        false if *after == T::default() => Difference::Lost,
        false => Difference::Changed,
    }
}

fn list<T: PartialEq>(before: &[T], after: &[T]) -> Difference {
    // The common beginning is skipped, so that the work for a long list is not quadratic.
    let same = before.iter().zip(after).take_while(|(before, after)| before == after).count();
    let (rest, others) = (&before[same..], &after[same..]);
    match rest.iter().all(|entry| others.contains(entry)) {
        true if rest.is_empty() && others.is_empty() => Difference::None,
        true => Difference::Added,
        false => Difference::Lost,
    }
}

type Texts = Option<Spanned<OneOrMany<Spanned<String>>>>;

fn lost_entries(before: &Texts, after: &Texts) -> Difference {
    match (before, after) {
        (Some(before), Some(after)) => list(before, after).only_lost(),
        _ => lost(before, after),
    }
}

/// Returns the texts of `before` that are not in `after`, in their order.
fn missing<'t>(before: impl Iterator<Item = &'t str>, after: impl Iterator<Item = &'t str>) -> Vec<&'t str> {
    let after: BTreeSet<&str> = after.collect();
    before.filter(|text| !after.contains(text)).collect()
}

/// Returns the limits of a list, each with a key that identifies it: its name, or its window if it has no name; and the
/// number of earlier limits in the list with the same name or window.
fn numbered(limits: &[Spanned<LimitEntry>]) -> BTreeMap<(&str, usize), &LimitEntry> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    let mut by_name = BTreeMap::new();
    for limit in limits {
        let name = limit_name(limit);
        let number = counts.entry(name).or_default();
        by_name.insert((name, *number), &**limit);
        *number += 1;
    }
    by_name
}

fn limit_name(limit: &LimitEntry) -> &str {
    match limit {
        LimitEntry::Text(text) => window_of(text),
        LimitEntry::Table(table) => match (&table.name, &table.limit, &table.window) {
            (Some(name), ..) => name,
            (None, Some(limit), _) => window_of(limit),
            (None, None, Some(window)) => window,
            (None, None, None) => "(unnamed)",
        },
    }
}

/// Returns the window in the text of a limit: `min` for `10/min token-bucket`.
fn window_of(limit: &str) -> &str {
    let behind_quota = limit.split_once('/').map_or(limit, |(_, rest)| rest);
    behind_quota.split_whitespace().next().unwrap_or(limit)
}

/// Returns all keys of the configuration and of its keys file, each with its digest.
fn keys(loaded: &Loaded) -> impl Iterator<Item = (KeyDigest, &ApiKeyTable)> {
    let digest = |table: &ApiKeyTable| match (&table.key, &table.sha256) {
        (Some(key), _) => Some(KeyDigest::of(Secret::reveal(key))),
        (None, Some(digest)) => digest.reveal().parse().ok(),
        (None, None) => None,
    };
    let tables = loaded.config.keys.iter().chain(&loaded.keys_file.keys);
    tables.filter_map(move |table| Some((digest(table)?, &**table)))
}
