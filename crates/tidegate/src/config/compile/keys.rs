//! Compiles plans, and their assignment to keys and addresses.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use tidegate_config::{
    ApiKeyTable, Code, ConfigSource, ConfigTable, Finding, KeysFile, Limits, RuleTable, Secret, Spanned, complete,
    nearest,
};

use super::Compiler;
use super::limits::NamedLimit;
use crate::answer::is_rule_name;
use crate::identity::{API_KEY_BYTES_MAX, ApiKey, KeyDigest, Networks};
use crate::rules::{CompiledPlan, KeyEntry, LimitSetId};

/// The limit sets that callers can have. The index of a set is its [`LimitSetId`].
///
/// A limit set is the list of limits that a caller has in rules with `limits = "plan"`. First come those of the plans,
/// sorted by name, then those of keys with their own limits.
#[derive(Default)]
pub(super) struct LimitSets {
    plans: Vec<CompiledPlan>,
    /// The limits of each set, with the index of the plan to which the set belongs.
    limits: Vec<(usize, Vec<NamedLimit>)>,
    /// The names of the plans that keys or addresses have.
    assigned: Vec<Arc<str>>,
}

/// A limit set, and the plan to which it belongs.
pub(super) struct LimitSetView<'t> {
    pub(super) plan: &'t str,
    pub(super) upgrade_url: Option<&'t str>,
    pub(super) limits: &'t [NamedLimit],
}

impl LimitSets {
    pub(super) fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = LimitSetView<'_>> {
        self.limits.iter().map(|(plan, limits)| {
            let plan = &self.plans[*plan];
            LimitSetView { plan: plan.name(), upgrade_url: plan.upgrade_url(), limits }
        })
    }

    /// Returns the ids of the limit sets of the plans `default` and `anonymous`, in this order.
    ///
    /// Without a plan `anonymous`, the second is the first. Without `default`, the first is 0, the first plan by name.
    pub(super) fn fallbacks(&self) -> (LimitSetId, LimitSetId) {
        let default = self.index_of("default").unwrap_or(0);
        let anonymous = self.index_of("anonymous").unwrap_or(default);
        (limit_set(default), limit_set(anonymous))
    }

    pub(super) fn plan_of_limit_set(&self) -> Vec<u32> {
        self.limits.iter().map(|(plan, _)| limit_set(*plan).0).collect()
    }

    pub(super) fn assigned_plans(&self) -> Vec<Arc<str>> {
        self.assigned.clone()
    }

    pub(super) fn into_plans(self) -> Vec<CompiledPlan> {
        self.plans
    }

    fn index_of(&self, plan: &str) -> Option<usize> {
        self.plans.binary_search_by(|known| (**known.name()).cmp(plan)).ok()
    }

    /// Returns the limit set for a key's own limits, and adds it if there is none. Keys with equal limits and the same
    /// plan share one.
    ///
    /// `plan` is the index of the plan to which the set belongs.
    fn own(&mut self, plan: usize, limits: Vec<NamedLimit>) -> LimitSetId {
        let is_same = |(other_plan, other): &(usize, Vec<NamedLimit>)| {
            *other_plan == plan
                && other.len() == limits.len()
                && other.iter().zip(&limits).all(|(a, b)| a.name == b.name && a.limit == b.limit)
        };
        // Limit sets of plans are never shared: the key's own limits stay when the plan changes.
        let place = self.limits.iter().skip(self.plans.len()).position(is_same);
        let place = place.map_or(self.limits.len(), |place| place + self.plans.len());
        if place == self.limits.len() {
            self.limits.push((plan, limits));
        }
        limit_set(place)
    }
}

fn limit_set(place: usize) -> LimitSetId {
    LimitSetId(u32::try_from(place).expect("fewer than 2^32 plans and keys"))
}

impl Compiler<'_> {
    pub(super) fn plans(&mut self, config: &ConfigTable) -> LimitSets {
        let source = self.source.clone();
        let mut limit_sets = LimitSets::default();
        // The map is sorted by name, so plans are found by binary search.
        for (place, (name, table)) in config.plans.iter().enumerate() {
            if !is_rule_name(name) {
                let message = "the name of a plan must be 1 to 64 letters, digits or - _ .";
                self.note(Finding::new(Code::InvalidName, message).at(name.span()));
            }
            if table.limits.is_empty() {
                let finding = Finding::new(Code::LimitsMissing, "a plan needs at least one limit");
                let in_code =
                    "add one, for example with `limit(\"60/min\")`; to leave callers unlimited, exempt their keys";
                let finding = finding.help("to leave callers unlimited, use `exempt`").help_in_code(in_code);
                self.note(finding.at(table.limits.span()));
            }
            if let Some(url) = &table.upgrade_url
                && url.parse::<http::Uri>().is_err()
            {
                self.note(Finding::new(Code::InvalidValue, "expected a URL").at(url.span()));
            }
            let upgrade_url = table.upgrade_url.as_ref().map(|url| url.as_str().into());
            limit_sets.plans.push(CompiledPlan { name: name.as_str().into(), upgrade_url });
            let limits = self.limits(&table.limits, &source);
            self.check_redundancy(&limits, &format!("plan `{}`", **name), table.limits.span(), &source);
            limit_sets.limits.push((place, limits));
        }
        limit_sets
    }

    pub(super) fn address_plans(
        &mut self,
        config: &ConfigTable,
        limit_sets: &LimitSets,
    ) -> Vec<(Networks, LimitSetId)> {
        let source = self.source.clone();
        let mut plans = Vec::new();
        for entry in &config.plan_sources.addresses {
            let networks = self.networks(&entry.networks);
            if let Some(place) = self.plan_index(&entry.plan, limit_sets, &source) {
                plans.push((networks, limit_set(place)));
            }
        }
        plans
    }

    /// Compiles the API keys of the configuration, of its keys file, and of `exempt.keys`. Reads the keys file.
    ///
    /// Returns the keys by digest, and the content of the keys file. `limit_sets` must have the plans already. Adds the
    /// own limits of keys to it, and the names of the plans that keys and addresses have.
    ///
    /// Adds an error for each invalid or repeated key, for a keys file that cannot be read, and if the number of keys
    /// is not the expected one; and a warning if own limits have no effect.
    pub(super) fn keys(
        &mut self,
        config: &ConfigTable,
        limit_sets: &mut LimitSets,
    ) -> (HashMap<KeyDigest, KeyEntry>, KeysFile) {
        let mut keys = HashMap::new();
        let source = self.source.clone();
        let mut with_limits = None;
        for table in &config.keys {
            with_limits = with_limits.or_else(|| Some((table.limits.as_ref()?.span(), source.clone())));
            self.key(table, &source, limit_sets, &mut keys);
        }
        let expect = config.expect.as_ref().and_then(|expect| expect.keys.as_ref());
        let keys_file = config.keys_file.as_ref().map(|name| self.keys_file(name));
        // The number of keys in a keys file that cannot be read as a whole is unknown.
        if keys_file.as_ref().is_none_or(|file| file.as_ref().is_some_and(|(file, _)| file.is_whole)) {
            let in_file = keys_file.iter().flatten().map(|(file, _)| file.keys.len()).sum::<usize>();
            self.note_if(complete::check_count(expect, config.keys.len() + in_file, "key"));
        }
        let mut of_file = KeysFile::default();
        if let Some((file, file_source)) = keys_file.flatten() {
            for table in &file.keys {
                with_limits = with_limits.or_else(|| Some((table.limits.as_ref()?.span(), file_source.clone())));
                self.key(table, &file_source, limit_sets, &mut keys);
            }
            if expect.is_some() {
                self.findings.extend(complete::check_line_end(&file_source));
            }
            of_file = file;
        }
        let is_by_plan = |rule: &Spanned<RuleTable>| matches!(*rule.limits, Limits::Plan);
        if let Some((span, source)) = with_limits
            && !config.rules.iter().any(is_by_plan)
        {
            let message = "the key's own limits have no effect, because no rule takes its limits from plans";
            let help = "write `limits = \"plan\"` in the rules that should use them";
            let in_code = "use `limits_from_plan` in the rules that should apply them";
            let finding = Finding::new(Code::KeyLimitsUnused, message).help(help).help_in_code(in_code);
            self.note_in(&source, finding.at(span));
        }
        for exempt in &config.exempt.keys {
            let digest = self.key_or_digest(exempt);
            let unlisted =
                || KeyEntry { name: None, plan: None, limit_set: None, groups: Arc::default(), is_exempt: true };
            keys.entry(digest).or_insert_with(unlisted).is_exempt = true;
        }
        limit_sets.assigned.extend(config.plan_sources.addresses.iter().map(|entry| entry.plan.as_str().into()));
        (keys, of_file)
    }

    fn keys_file(&mut self, name: &Spanned<String>) -> Option<(KeysFile, Arc<ConfigSource>)> {
        let path = self.loader.path(name);
        let shown = path.display().to_string();
        let (text, format) = match self.loader.read_file(&path) {
            Ok((text, format, metadata)) => {
                self.files.push((path, metadata));
                (text, format)
            }
            Err(finding) => {
                self.note(finding.at(name.span()));
                return None;
            }
        };
        let (file, source, errors) = KeysFile::read(&shown, &text, format);
        self.findings.extend(errors);
        Some((file?, source))
    }

    fn key(
        &mut self,
        table: &Spanned<ApiKeyTable>,
        source: &Arc<ConfigSource>,
        limit_sets: &mut LimitSets,
        keys: &mut HashMap<KeyDigest, KeyEntry>,
    ) {
        let (digest, span) = match (&table.key, &table.sha256) {
            (Some(key), None) if !key.reveal().is_empty() => {
                self.check_key(key, source);
                (Some(KeyDigest::of(key.reveal())), key.span())
            }
            (None, Some(digest)) => {
                let parsed = digest.reveal().parse::<KeyDigest>();
                if let Err(error) = &parsed {
                    self.note_in(source, Finding::new(Code::InvalidKey, error.to_string()).at(digest.span()));
                }
                (parsed.ok(), digest.span())
            }
            _ => {
                let message = if source.is_code() {
                    "the key is empty"
                } else {
                    "expected either `key` or `sha256`, and not an empty one"
                };
                let finding = Finding::new(Code::InvalidKey, message);
                let help = "`printf %s KEY | sha256sum` prints the digest";
                let in_code = "pass the key to `ListedKey::new`, or its digest to `ListedKey::sha256`";
                self.note_in(source, finding.help(help).help_in_code(in_code).at(table.span()));
                (None, table.span())
            }
        };
        let place = table.plan.as_ref().and_then(|plan| self.plan_index(plan, limit_sets, source));
        if let Some(list) = &table.limits
            && list.is_empty()
        {
            let finding = Finding::new(Code::LimitsMissing, "the key's own limits are empty");
            let help = "omit them to use those of the plan; for a key without limits, set `exempt = true`";
            self.note_in(source, finding.help(help).at(list.span()));
        }
        let own = table.limits.as_ref().map(|list| {
            let limits = self.limits(list, source);
            self.check_redundancy(&limits, "this key", list.span(), source);
            limits
        });
        let plan = place.map(|place| limit_sets.plans[place].name.clone());
        if let Some(plan) = &plan
            && !limit_sets.assigned.contains(plan)
        {
            limit_sets.assigned.push(plan.clone());
        }
        let limit_set = match (own, place) {
            (Some(limits), _) if !limit_sets.is_empty() => {
                let default = limit_sets.index_of("default").unwrap_or(0);
                Some(limit_sets.own(place.unwrap_or(default), limits))
            }
            (_, Some(place)) => Some(limit_set(place)),
            _ => None,
        };
        let groups = table.groups.as_ref().map(|list| self.groups(list, source)).unwrap_or_default();
        let name = table.name.as_deref().map(Arc::from);
        let entry = KeyEntry { name, plan, limit_set, groups, is_exempt: table.exempt };
        match digest.map(|digest| keys.entry(digest)) {
            Some(Entry::Vacant(vacant)) => drop(vacant.insert(entry)),
            Some(Entry::Occupied(_)) => {
                let finding = Finding::new(Code::DuplicateKey, "this key is listed twice");
                self.note_in(source, finding.help("remove one of the entries").label("second entry").at(span));
            }
            None => {}
        }
    }

    /// Compiles the names of groups. Adds an error for each invalid one.
    pub(super) fn groups(&mut self, list: &[Spanned<String>], source: &Arc<ConfigSource>) -> Arc<[Arc<str>]> {
        for name in list.iter().filter(|name| !is_rule_name(name)) {
            let message = "the name of a group must be 1 to 64 letters, digits or - _ .";
            self.note_in(source, Finding::new(Code::InvalidName, message).at(name.span()));
        }
        list.iter().map(|name| name.as_str().into()).collect()
    }

    /// Adds an error if no request can carry this key: it is empty, too long, has characters other than visible ASCII
    /// and spaces, or begins or ends with a space.
    pub(super) fn check_key(&mut self, key: &Spanned<Secret>, source: &Arc<ConfigSource>) {
        if !ApiKey::can_be(key.reveal()) {
            let message = "no request can carry this key";
            let help = format!(
                "a key must be 1 to {API_KEY_BYTES_MAX} visible ASCII characters, without leading or trailing spaces"
            );
            self.note_in(source, Finding::new(Code::InvalidKey, message).help(help).at(key.span()));
        }
    }

    fn plan_index(
        &mut self,
        plan: &Spanned<String>,
        limit_sets: &LimitSets,
        source: &Arc<ConfigSource>,
    ) -> Option<usize> {
        let place = limit_sets.index_of(plan);
        if place.is_none() {
            let names = || limit_sets.plans.iter().map(|known| &**known.name());
            let help = match nearest(plan, names()) {
                Some(name) => format!("did you mean `{name}`?"),
                None if limit_sets.is_empty() => format!("add `[plans.{}]`", **plan),
                None => format!("existing plans: {}", names().collect::<Vec<_>>().join(", ")),
            };
            let finding = Finding::new(Code::UnknownPlan, format!("there is no plan `{}`", **plan)).help(help);
            let finding = if limit_sets.is_empty() {
                finding.help_in_code(format!("add it to the rules with `plan(Plan::new(\"{}\").limit(…))`", **plan))
            } else {
                finding
            };
            self.note_in(source, finding.at(plan.span()));
        }
        place
    }
}
