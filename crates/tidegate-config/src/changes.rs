//! The difference between two configurations: the parts that a reload removes, and those that it changes.
//!
//! A truncated file may still be valid, with fewer rules. So a reload compares the new configuration with the active
//! one. A part is removed if it is absent in the new one: a rule, a limit of a rule, a key, an entry of a list, a field
//! that falls back to its default. Everything else that differs is changed. Names are those of the configuration
//! (rules, plans, names of keys, fields); they contain no key, no address and no secret.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::document::Document;
use super::forms::{LimitEntry, Secret};
use super::key_digest::KeyDigest;
use super::read::FieldValue;
use super::span::Spanned;
use super::table::{Table, joined};
use super::types::{ApiKeyTable, BanEntry, Exempt, PlanTable, RuleTable, UpstreamTable};

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
}

tidegate_core::__names! {
    "kind of part" PartKind {
        Rule = "rule",
        Limit = "limit",
        Plan = "plan",
        Key = "key",
        Ban = "ban",
        Exemption = "exemption",
        Upstream = "upstream",
        Setting = "setting",
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
    /// The names of the settings that differ and are read only at startup, such as `store`: they take effect after a
    /// restart.
    pub restart: Vec<String>,
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
    pub fn between(before: &Document, after: &Document) -> Changes {
        let mut changes = Changes::default();
        before.config.note_changes(&after.config, "", "", &mut changes);
        changes.keys(keys(before), keys(after).collect());
        let secret =
            |document: &Document| document.secret_file(document.config.receipt_secret_file.as_deref()?).cloned();
        if before.config.receipt_secret_file == after.config.receipt_secret_file && secret(before) != secret(after) {
            changes.restart.push("receipt_secret_file".to_owned());
        }
        changes
    }

    fn remove(&mut self, kind: PartKind, name: impl Into<String>) {
        self.removed.push(Part { kind, name: name.into() });
    }

    /// Adds a removed field: it, or an entry of it, is absent now, or it has its default again.
    ///
    /// `owner` is the part with the field, such as `rule login`, and empty for a setting of the file.
    pub(crate) fn lost_field(&mut self, name: &str, owner: &str) {
        self.remove(PartKind::Setting, joined(name, " of ", owner));
    }

    /// Adds a changed setting of the file. Does nothing for a field of a part, which is itself listed as changed.
    pub(crate) fn changed_field(&mut self, name: &str, owner: &str) {
        if owner.is_empty() {
            self.changed.push(Part { kind: PartKind::Setting, name: name.to_owned() });
        }
    }

    /// Records that a setting of the file was absent before, or that entries were added to it or reordered. Does nothing
    /// for a field of a part.
    pub(crate) fn added_field(&mut self, owner: &str) {
        self.has_added |= owner.is_empty();
    }

    pub(crate) fn exempt(&mut self, before: &Exempt, after: &Exempt) {
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

    pub(crate) fn bans(&mut self, before: &[Spanned<BanEntry>], after: &[Spanned<BanEntry>]) {
        let values: HashMap<(&str, &str), &BanEntry> =
            after.iter().map(|ban| ((ban.by.as_str(), ban.value.reveal()), &**ban)).collect();
        for ban in before {
            let name = format!("by {}", ban.by.as_str());
            match values.get(&(ban.by.as_str(), ban.value.reveal())) {
                None => self.remove(PartKind::Ban, name),
                Some(other) if other.until != ban.until => self.changed.push(Part { kind: PartKind::Ban, name }),
                Some(_) => {}
            }
        }
        self.has_added |= before != after;
    }

    pub(crate) fn plans(
        &mut self,
        before: &BTreeMap<Spanned<String>, PlanTable>,
        after: &BTreeMap<Spanned<String>, PlanTable>,
    ) {
        for (name, plan) in before {
            let Some(other) = after.get(name) else {
                self.remove(PartKind::Plan, name.as_str());
                continue;
            };
            plan.note_changes(other, "", &format!("plan {}", **name), self);
            if plan != other {
                self.changed.push(Part { kind: PartKind::Plan, name: name.to_string() });
            }
        }
        self.has_added |= before.len() < after.len();
    }

    pub(crate) fn upstreams(&mut self, before: &[Spanned<UpstreamTable>], after: &[Spanned<UpstreamTable>]) {
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
            key.note_changes(other, "", &format!("key {name}"), self);
            if key.has_listed_change(other) {
                self.changed.push(Part { kind: PartKind::Key, name: name.to_owned() });
            }
        }
        self.has_added |= kept < after.len();
    }

    pub(crate) fn rules(&mut self, before: &[Spanned<RuleTable>], after: &[Spanned<RuleTable>]) {
        let by_name: HashMap<&str, &RuleTable> = after.iter().map(|rule| (rule.name.as_str(), &**rule)).collect();
        for rule in before {
            match by_name.get(rule.name.as_str()) {
                None => self.remove(PartKind::Rule, rule.name.as_str()),
                Some(other) if **rule != **other => {
                    RuleTable::note_changes(rule, other, "", &format!("rule {}", *rule.name), self);
                    self.changed.push(Part { kind: PartKind::Rule, name: rule.name.to_string() });
                }
                Some(_) => {}
            }
        }
        // The order of rules does not change decisions, but an answer may name another rule.
        self.has_added |= before != after;
    }

    /// Compares the limits of `owner` by name; those without a name by window.
    pub(crate) fn limits(&mut self, before: &[Spanned<LimitEntry>], after: &[Spanned<LimitEntry>], owner: &str) {
        let after = numbered(after);
        for ((name, number), limit) in numbered(before) {
            let Some(other) = after.get(&(name, number)) else {
                self.remove(PartKind::Limit, format!("{name} of {owner}"));
                continue;
            };
            if let (LimitEntry::Table(table), LimitEntry::Table(other)) = (limit, other) {
                table.note_changes(other, "", &format!("limit {name} of {owner}"), self);
            }
        }
    }
}

/// Compares two lists. The field is removed if an entry is; entries that were added or reordered are only recorded.
pub(crate) fn note_list<T: PartialEq>(before: &[T], after: &[T], name: &str, owner: &str, changes: &mut Changes) {
    // The common beginning is skipped, so that the work for a long list is not quadratic.
    let same = before.iter().zip(after).take_while(|(before, after)| before == after).count();
    let (rest, others) = (&before[same..], &after[same..]);
    if rest.iter().any(|entry| !others.contains(entry)) {
        changes.lost_field(name, owner);
    } else if !others.is_empty() {
        changes.added_field(owner);
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
fn keys(document: &Document) -> impl Iterator<Item = (KeyDigest, &ApiKeyTable)> {
    let digest = |table: &ApiKeyTable| match (&table.key, &table.sha256) {
        (Some(key), _) => Some(KeyDigest::of(Secret::reveal(key))),
        (None, Some(digest)) => digest.reveal().parse().ok(),
        (None, None) => None,
    };
    let tables = document.config.keys.iter().chain(&document.keys_file.keys);
    tables.filter_map(move |table| Some((digest(table)?, &**table)))
}
