//! Compiles the rules.

use std::collections::HashMap;
use std::sync::Arc;

use http::HeaderName;
use tidegate_config::{Code, ConfigTable, Finding, Limits, RuleTable, Spanned, complete};
use tidegate_core::{Algorithm, Cost};

use super::Compiler;
use super::keys::LimitSets;
use super::limits::NamedLimit;
use super::policy_names;
use crate::answer::{BodyFormat, Policy, Styles, is_rule_name};
use crate::identity::{Subject, Subjects};
use crate::rules::matcher::Matcher;
use crate::rules::method::MethodNames;
use crate::rules::{CompiledRule, Mode, Overlaps, RuleLimits};

/// The default maximum length of a path: common servers accept request lines of this length.
const PATH_BYTES_MAX_DEFAULT: usize = 8 * 1024;
/// The longest path that `http::Uri` can hold.
const PATH_BYTES_MAX: u32 = 65_534;

/// The headers and the body in which a rule's limits are reported to clients.
struct AnswerFormat {
    styles: Styles,
    format: BodyFormat,
}

impl Compiler<'_> {
    /// Compiles the rules. Returns them in their order, a matcher of all rules, and a matcher of the enforced shields.
    ///
    /// `styles` are the header styles of rules without their own.
    ///
    /// Both matchers use the indices of the returned list. Rules with the mode `off`, or with an empty list of methods,
    /// paths or hosts, never match. Adds an error for each invalid value, for a name that two rules have, and if the
    /// number of rules is not the expected one.
    pub(super) fn rules(
        &mut self,
        config: &ConfigTable,
        styles: Styles,
        limit_sets: &LimitSets,
    ) -> (Vec<CompiledRule>, Matcher, Matcher) {
        let format = config.body.as_ref().and_then(|body| self.body(body));
        let expect = config.expect.as_ref().and_then(|expect| expect.rules.as_ref());
        self.note_if(complete::check_count(expect, config.rules.len(), "rule"));
        self.check_rule_names(&config.rules);
        let mut names = MethodNames::default();
        let mut rules = Vec::with_capacity(config.rules.len());
        let mut conditions = Vec::with_capacity(config.rules.len());
        for table in &config.rules {
            let (condition, can_be_met) = self.conditions(&table.matches, &mut names);
            let rule = self.rule(table, config, (styles, format.as_ref()), limit_sets);
            let is_met = can_be_met && rule.mode != Mode::Off;
            conditions.push((condition, is_met));
            rules.push(rule);
        }
        let overrides = &config.method_override_headers;
        let overrides: Vec<HeaderName> = overrides.iter().filter_map(|name| self.header_name(name)).collect();
        policy_names::qualify(&mut rules, &conditions, &config.rules, !overrides.is_empty());
        let mut matcher = Matcher::new(names.clone(), overrides.clone());
        let mut shields = Matcher::new(names, overrides);
        for ((condition, is_met), rule) in conditions.into_iter().zip(&rules) {
            let is_shield = rule.is_shield && rule.mode == Mode::Enforce;
            shields.push(condition.clone(), is_met && is_shield);
            matcher.push(condition, is_met);
        }
        (rules, matcher, shields)
    }

    /// Returns the maximum length of a path in bytes. Defaults to 8,192. Adds an error if it is not 1 to 65,534, and
    /// returns it nevertheless.
    pub(super) fn path_bytes_max(&mut self, config: &ConfigTable) -> usize {
        let Some(bytes) = &config.path_bytes_max else { return PATH_BYTES_MAX_DEFAULT };
        if !(1..=PATH_BYTES_MAX).contains(&**bytes) {
            let message = format!("the maximum length of a path must be from 1 to {PATH_BYTES_MAX} bytes");
            self.note(Finding::new(Code::InvalidValue, message).at(bytes.span()));
        }
        usize::try_from(**bytes).unwrap_or(usize::MAX)
    }

    fn check_rule_names(&mut self, rules: &[Spanned<RuleTable>]) {
        let mut seen: HashMap<&str, ()> = HashMap::new();
        for rule in rules {
            let name = &rule.name;
            if !is_rule_name(name) {
                let message = "the name of a rule must be 1 to 64 letters, digits or - _ .";
                self.note(Finding::new(Code::InvalidName, message).at(name.span()));
            }
            if seen.insert(name, ()).is_some() {
                let message = format!("two rules are named `{}`", **name);
                let help = "the name is part of the counters' keys, so give each rule its own";
                self.note(Finding::new(Code::DuplicateRule, message).help(help).label("second rule").at(name.span()));
            }
        }
    }

    /// Compiles a rule. `defaults` are the header styles and the body format of rules without their own.
    fn rule(
        &mut self,
        table: &RuleTable,
        config: &ConfigTable,
        defaults: (Styles, Option<&BodyFormat>),
        limit_sets: &LimitSets,
    ) -> CompiledRule {
        let (styles, default_format) = defaults;
        let is_shield = table.store.is_some();
        let own_format = table.body.as_ref().and_then(|body| self.body(body));
        let format = match (own_format, default_format, is_shield) {
            (Some(format), ..) => format,
            (None, Some(format), _) => format.clone(),
            (None, None, true) => BodyFormat::Text,
            (None, None, false) => BodyFormat::Json,
        };
        let answer = AnswerFormat { styles: self.styles(table.headers.as_ref()).unwrap_or(styles), format };
        let cost = self.cost(table);
        let mode = match table.mode {
            Mode::Enforce if *config.shadow => Mode::Shadow,
            mode => mode,
        };
        CompiledRule {
            name: table.name.as_str().into(),
            groups: self.rule_groups(table),
            by: self.subject(table, is_shield),
            limits: self.rule_limits(table, &answer, cost, limit_sets),
            mode,
            on_failure: table.on_failure.unwrap_or(config.on_failure),
            charge: *table.charge,
            cost,
            is_shield,
            overlaps: Overlaps::default(),
        }
    }

    /// Compiles the groups of a rule. Adds an error for each invalid name, and if the rule is a shield, which is decided
    /// before the caller is known.
    fn rule_groups(&mut self, table: &RuleTable) -> Box<[Arc<str>]> {
        let Some(list) = &table.matches.groups else { return Box::default() };
        if table.store.is_some() {
            let message = "a shield is decided before the groups of the caller are known";
            let finding = Finding::new(Code::ShieldNotByAddress, message);
            self.note(finding.help("remove `groups`, or remove `store = \"memory\"`").at(list.span()));
        }
        let source = self.source.clone();
        self.groups(list, &source).to_vec().into()
    }

    fn cost(&mut self, table: &RuleTable) -> Cost {
        let Some(cost) = &table.cost else { return Cost::ONE };
        if **cost == 0 {
            let finding = Finding::new(Code::InvalidValue, "a cost of 0 would count nothing");
            let finding = finding.help("omit it for 1, or turn the rule off with `mode = \"off\"`");
            let in_code = "leave `cost` out for 1, or turn the rule off with `mode(Mode::Off)`";
            self.note(finding.help_in_code(in_code).at(cost.span()));
        }
        Cost::new(**cost)
    }

    fn subject(&mut self, table: &RuleTable, is_shield: bool) -> Subjects {
        let by_address = || Subjects::parse(["ip"]).unwrap_or_default();
        let Some(by) = &table.by else {
            return if is_shield { by_address() } else { Subjects::default() };
        };
        let before = self.findings.len();
        let parse = |text: &Spanned<String>| {
            let parsed = text.parse::<Subject>();
            self.accept(parsed, Code::InvalidSubject, text.span())
        };
        let kinds: Vec<Subject> = by.iter().filter_map(parse).collect();
        if self.findings.len() > before {
            return Subjects::default();
        }
        let kinds = self.accept(Subjects::new(kinds), Code::InvalidSubject, by.span()).unwrap_or_default();
        if is_shield && kinds != by_address() && self.findings.len() == before {
            let message = "a shield counts by address, because it is decided before callers are identified";
            let help = "write `by = [\"ip\"]`, or omit `store = \"memory\"`";
            let in_code = "count by `Subject::Ip`, or leave `shield` out";
            let finding = Finding::new(Code::ShieldNotByAddress, message).help(help).help_in_code(in_code);
            self.note(finding.at(by.span()));
        }
        kinds
    }

    fn rule_limits(
        &mut self,
        table: &RuleTable,
        answer: &AnswerFormat,
        cost: Cost,
        limit_sets: &LimitSets,
    ) -> RuleLimits {
        let source = self.source.clone();
        let name: Arc<str> = table.name.as_str().into();
        match &*table.limits {
            Limits::Own(list) => {
                let limits = self.limits(list, &source);
                if list.is_empty() {
                    let finding = Finding::new(Code::LimitsMissing, "a rule needs at least one limit");
                    let in_code = "add one, for example with `limit(\"10/min\")`";
                    let finding = finding.help("for example `limits = [\"10/min\"]`").help_in_code(in_code);
                    self.note(finding.at(table.limits.span()));
                }
                self.check_redundancy(&limits, &format!("`{}`", *table.name), table.limits.span(), &source);
                self.check_spacing(table, &limits);
                self.check_cost(table, cost, &limits, None);
                RuleLimits::Own(limits.iter().map(|limit| answer.policy(limit, &name, None, None)).collect())
            }
            Limits::Plan => {
                if table.store.is_some() {
                    let finding =
                        Finding::new(Code::ShieldNotByAddress, "a shield needs its own limits, not those of plans");
                    let in_code = "add a limit with `limit` instead of `limits_from_plan`, or leave `shield` out";
                    self.note(finding.help_in_code(in_code).at(table.limits.span()));
                }
                self.check_plans(table, limit_sets);
                let mut by_limit_set: Vec<Box<[Arc<Policy>]>> = Vec::new();
                for limit_set in limit_sets.iter() {
                    self.check_cost(table, cost, limit_set.limits, Some(limit_set.plan));
                    let policy = |limit| answer.policy(limit, &name, Some(limit_set.plan), limit_set.upgrade_url);
                    by_limit_set.push(limit_set.limits.iter().map(policy).collect());
                }
                RuleLimits::Plan(by_limit_set.into())
            }
        }
    }

    fn check_plans(&mut self, table: &RuleTable, limit_sets: &LimitSets) {
        let span = table.limits.span();
        if limit_sets.is_empty() {
            let finding = Finding::new(Code::PlansMissing, "this rule takes its limits from plans, but there are none");
            let in_code = "add one to the rules, for example with `plan(Plan::new(\"default\").limit(\"60/min\"))`";
            self.note(finding.help("add `[plans.default]` with limits").help_in_code(in_code).at(span));
        }
    }

    fn check_spacing(&mut self, table: &RuleTable, limits: &[NamedLimit]) {
        let is_spaced = |limit: &&NamedLimit| limit.limit.algorithm() == Algorithm::LeakyBucket;
        if table.store.is_some()
            && let Some(limit) = limits.iter().find(is_spaced)
        {
            let message = "a shield never delays a request, so a leaky bucket has no effect";
            let help = "use `token-bucket` for bursts, or omit `store = \"memory\"`";
            let in_code = "use `token-bucket` for bursts, or leave `shield` out";
            let finding = Finding::new(Code::ShieldNotSpaced, message).help(help).help_in_code(in_code);
            self.note(finding.at(limit.span));
        }
    }

    fn check_cost(&mut self, table: &RuleTable, cost: Cost, limits: &[NamedLimit], plan: Option<&str>) {
        let Some(limit) = limits.iter().find(|limit| cost.units() > limit.limit.cost_max()) else { return };
        let of_plan = plan.map(|plan| format!(" of plan `{plan}`")).unwrap_or_default();
        let (name, most) = (&limit.name, limit.limit.cost_max());
        let message =
            format!("a cost of {cost} never fits within limit `{name}`{of_plan}, which allows at most {most} at once");
        let span = table.cost.as_ref().map_or(limit.span, |cost| cost.span());
        self.note(Finding::new(Code::CostNeverFits, message).help("raise the limit or lower the cost").at(span));
    }
}

impl AnswerFormat {
    fn policy(
        &self,
        limit: &NamedLimit,
        rule: &Arc<str>,
        plan: Option<&str>,
        upgrade_url: Option<&str>,
    ) -> Arc<Policy> {
        // An invalid name was noted as an error, so a policy without it is never used.
        let unnamed = || Policy::of(limit.limit);
        let policy = Policy::new(&limit.name, limit.limit).unwrap_or_else(|_| unnamed());
        let policy = policy.with_rule(rule.clone()).unwrap_or_else(|_| unnamed());
        let policy = policy.with_styles(self.styles).with_format(self.format.clone());
        let policy = match plan {
            Some(plan) => policy.with_plan(plan),
            None => policy,
        };
        Arc::new(match upgrade_url {
            Some(url) => policy.with_upgrade_url(url),
            None => policy,
        })
    }
}
