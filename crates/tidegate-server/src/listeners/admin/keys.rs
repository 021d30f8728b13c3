//! `/v1/keys`: the counters of a key.
//!
//! ```text
//!   ?key=user:42&limit=10/min                      the counter of explicit checks
//!   ?key=203.0.113.9                               all counters of all rules, for the client at this address
//!   ?key=203.0.113.9&rule=shorten                  all counters of a rule, for this client
//!   ?key=acme&rule=api                             for the API key with this name, or for an API key itself
//!   ?key=user:42&rule=api&plan=pro                 for a subject that `explain` shows, with limits per plan
//!   ?key=203.0.113.9&rule=shorten&limit=main       one of them, by the name of the limit
//! ```
//!
//! **Which limits apply to a caller** is decided as for a request: by the API key or the address, and the lookups.
//! If these do not determine the plan, the `plan` parameter does. A reset does not depend on it. It deletes every
//! counter that the rule can have for the subject under any plan, and the key's own limits, so that it never reports success and leaves the
//! counter that denies.
//!
//! **A counter exists** while something is counted in it: until its `reset_after`, its state differs from that of a
//! counter that was never used. A key whose state is that of an unused counter may still be in the store for a while.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use http::StatusCode;
use serde::Serialize;
use tidegate::answer::Policy;
use tidegate::config::Loaded;
use tidegate::rules::{CompiledRule, LimitSet, Lookups, Mode};
use tidegate::{
    BAN_LIST_MAX, Clock, Demand, Limit, LimitStatus, Limiter, MemoryStore, StoreError, StoreErrorKind, SystemClock,
    Timestamp, Wait,
};

use super::{AdminListener, Answer, ErrorResponse, parameters};
use crate::client::{Client, OperatorRules};
use crate::explain::{PlanExplanation, ban_text, banned_in_store, demand};
use crate::listeners::http::connection::{json, problem};

/// Selects counters of one key or client: the parameters of a query to `/v1/keys`.
#[derive(Clone, Default)]
pub struct CounterQuery {
    /// The key of explicit checks. With `rule`, or without `limit`, a client: an address, an API key, the name of a key,
    /// a user, or a subject.
    pub key: Vec<u8>,
    /// The text of a limit such as `10/min`, for explicit checks. With `rule`, the name of one of its limits
    /// (`per-minute` or `search.per-minute`), or `None` for all of them.
    pub limit: Option<String>,
    /// The name of a rule. `None` for explicit checks and, without `limit`, for all rules.
    pub rule: Option<String>,
    /// The plan of the client, for a rule with limits per plan. Required only by [`inspect`](CounterQuery::inspect),
    /// and only if nothing else determines the plan.
    pub plan: Option<String>,
}

/// Counters, as [`CounterQuery::inspect`] found them. Its JSON is the response of `GET /v1/keys`.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct CounterReport {
    /// The key, or the subject under which the rule counts the client. Bytes that are not UTF-8 are replaced. For all
    /// rules, the client, such as `ip:203.0.113.9`.
    pub key: String,
    /// The client's plan and its source. `None` unless the rule has limits per plan.
    pub plan: Option<PlanExplanation>,
    /// Why the client is refused regardless of its counters: a ban in the configuration or in the store. `None` if it
    /// is not banned.
    pub banned: Option<String>,
    /// The address of the node that holds the counters, without user and password. `None` if the store is not a
    /// cluster, or the node is not known.
    pub node: Option<String>,
    /// The hash slot of the counters. `None` if the store is not a cluster.
    pub slot: Option<u32>,
    /// The counters, in the order of the rules and their limits.
    pub counters: Vec<CounterStatus>,
    /// For all rules, those that have no counter of this client alone, and why. Absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<SkippedRule>,
}

/// A rule of a [`CounterReport`] or [`ResetReport`] that has no counter of the client alone.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct SkippedRule {
    /// The name of the rule.
    pub rule: String,
    /// Why it was skipped, such as what it counts by.
    pub because: String,
}

/// One counter of a [`CounterReport`]. Times are in milliseconds, rounded up; `None` means never.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct CounterStatus {
    /// The rule; `None` for explicit checks.
    pub rule: Option<String>,
    /// The key, or the subject under which the rule counts the client. Bytes that are not UTF-8 are replaced.
    pub key: String,
    /// The name of the limit.
    pub name: String,
    /// The limit as text, such as `10/min`.
    pub limit: String,
    /// Whether there is such a counter: something is counted in it.
    pub exists: bool,
    /// Always `true`, since a counter is read with a cost of 0.
    pub allowed: bool,
    /// The quota of the limit.
    pub quota: u32,
    /// The units that are left.
    pub remaining: u32,
    /// The time until one unit is admitted.
    pub retry_after_ms: Option<u64>,
    /// The time until one more unit comes back.
    pub next_after_ms: Option<u64>,
    /// The time until nothing is counted any more.
    pub reset_after_ms: Option<u64>,
}

/// The result of [`CounterQuery::reset`]. Its JSON is the response of `DELETE /v1/keys`.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct ResetReport {
    /// The key, or the subject under which the rule counts the client. Bytes that are not UTF-8 are replaced.
    pub key: String,
    /// Whether at least one counter existed and was deleted.
    pub reset: bool,
    /// The number of counters that existed and were deleted.
    pub counters: usize,
    /// For all rules, those that have no counter of this client alone, and why. Absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<SkippedRule>,
}

/// The error of a [`CounterQuery`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CounterError {
    /// The query selects no counter. The message says what is wrong and what is accepted.
    #[error("{0}")]
    Invalid(String),
    /// The ban list is full.
    #[error("there are {BAN_LIST_MAX} bans, the maximum; lift one with `tidegate unban`, or ban a network")]
    BanListFull,
    /// The store failed. During a reset, some counters may have been deleted.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What a query selects.
struct Selected<'r> {
    /// The key, the subject, or for all rules the client.
    key: String,
    /// The client of a rule or of all rules.
    client: Option<Client>,
    /// The counters, by key: those of one key, or of each rule.
    groups: Vec<CounterGroup<'r>>,
    skipped: Vec<SkippedRule>,
}

/// The counters that a query selects of one key.
struct CounterGroup<'r> {
    key: Vec<u8>,
    plan: Option<PlanExplanation>,
    /// The limits of the counters; at least one. Each counts in its rule, or in explicit checks if it has none.
    counters: Vec<Arc<Policy>>,
    /// The store with the counters; `None` for that of the limiter.
    shield: Option<&'r MemoryStore>,
}

/// The counters that a query selects of a rule with limits per plan.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Selection {
    /// The counters of the limits that apply to the caller.
    Applying,
    /// The counters of the limits of all plans.
    All,
}

/// Answers with the status of the counters that the query selects, without changing them.
///
/// The answer is 400 if the query is invalid, and 503 if the store fails.
pub(super) async fn inspect(listener: &AdminListener, query: &str) -> Answer {
    let (query, loaded) = (CounterQuery::parse(query)?, listener.reloader.loaded());
    Ok(json(StatusCode::OK, &query.inspect(listener.limiter(), listener.rules(loaded.as_deref())).await?))
}

/// Deletes the counters that the query selects, of all plans, and answers with the number of those that existed.
///
/// Logs the number. The answer is 400 if the query is invalid, and 503 if the store fails; some counters may then be
/// deleted already.
pub(super) async fn reset(listener: &AdminListener, query: &str) -> Answer {
    let (query, loaded) = (CounterQuery::parse(query)?, listener.reloader.loaded());
    let report = query.reset(listener.limiter(), listener.rules(loaded.as_deref())).await?;
    tracing::info!(counters = report.counters, "the operator reset counters");
    Ok(json(StatusCode::OK, &report))
}

impl From<CounterError> for ErrorResponse {
    /// Returns the 400, 409 or 503 response for the error of a query.
    fn from(error: CounterError) -> ErrorResponse {
        match error {
            CounterError::Invalid(message) => message.into(),
            CounterError::BanListFull => problem(StatusCode::CONFLICT, "ban_list_full", &error.to_string()).into(),
            CounterError::Store(error) => error.into(),
        }
    }
}

impl CounterStatus {
    fn new(policy: &Policy, key: &[u8], status: &LimitStatus) -> CounterStatus {
        CounterStatus {
            rule: policy.rule().map(str::to_owned),
            key: String::from_utf8_lossy(key).into_owned(),
            name: policy.name().to_owned(),
            limit: policy.limit().to_string(),
            exists: status.reset_after != Wait::ZERO,
            allowed: status.allowed,
            quota: status.quota,
            remaining: status.remaining,
            retry_after_ms: status.retry_after.as_millis_ceil(),
            next_after_ms: status.next_after.as_millis_ceil(),
            reset_after_ms: status.reset_after.as_millis_ceil(),
        }
    }
}

impl CounterGroup<'_> {
    /// Returns the demand for one unit of a limit on its counter.
    fn demand<'a>(&'a self, policy: &'a Policy) -> Result<Demand<'a>, CounterError> {
        demand(policy, &self.key).map_err(|error| CounterError::Invalid(error.to_string()))
    }

    /// Reads a counter, without changing it.
    async fn inspect(&self, limiter: &Limiter, policy: &Policy) -> Result<LimitStatus, CounterError> {
        let demand = self.demand(policy)?;
        match self.shield {
            Some(shield) => Ok(shield.inspect(&demand)),
            None => Ok(limiter.inspect(&demand).await?),
        }
    }

    /// Deletes a counter.
    async fn reset(&self, limiter: &Limiter, policy: &Policy) -> Result<(), CounterError> {
        let demand = self.demand(policy)?;
        match self.shield {
            Some(shield) => shield.reset(&demand),
            None => limiter.reset(&demand).await?,
        }
        Ok(())
    }
}

impl CounterQuery {
    /// Reads the selected counters, without changing them.
    ///
    /// For a rule with limits per plan, reads those of the client's plan, which is looked up if necessary. `limiter`
    /// must have the store with the counters. `rules` may be `None` if the query names no rule.
    ///
    /// # Errors
    /// Returns [`CounterError::Invalid`] if the query selects no counter, and [`CounterError::Store`] if the store
    /// fails.
    pub async fn inspect(
        &self,
        limiter: &Limiter,
        rules: Option<OperatorRules<'_>>,
    ) -> Result<CounterReport, CounterError> {
        let Selected { key, client, groups, skipped } = self.select(rules, Selection::Applying).await?;
        let banned = self.banned(limiter, rules, client.as_ref(), &groups).await?;
        let (mut plan, mut counters) = (None, Vec::new());
        // Subjects of several rules may be on several nodes.
        let is_one_key = groups.iter().all(|group| group.key == groups[0].key && group.shield.is_none());
        let location = groups.first().filter(|_| is_one_key).and_then(|group| limiter.locate(&group.key));
        for group in groups {
            for policy in &group.counters {
                counters.push(CounterStatus::new(policy, &group.key, &group.inspect(limiter, policy).await?));
            }
            plan = plan.or(group.plan);
        }
        let slot = location.as_ref().map(|location| location.slot);
        let node = location.and_then(|location| location.node);
        Ok(CounterReport { key, plan, banned, node, slot, counters, skipped })
    }

    /// Returns the ban that refuses the client or the key, as text; `None` if there is none.
    ///
    /// # Errors
    /// If the store fails.
    async fn banned(
        &self,
        limiter: &Limiter,
        rules: Option<OperatorRules<'_>>,
        client: Option<&Client>,
        groups: &[CounterGroup<'_>],
    ) -> Result<Option<String>, CounterError> {
        if let Some((OperatorRules { loaded, .. }, client)) = rules.zip(client) {
            let now = SystemClock::new().now();
            let ban = client.ban(&loaded.rules, limiter, now, |ban| ban_text(ban, now, true)).await?;
            if ban.is_some() {
                return Ok(ban);
            }
        }
        let mut keys: Vec<&[u8]> = groups.iter().map(|group| &*group.key).collect();
        keys.dedup();
        for key in keys {
            match limiter.ban_of(key).await {
                Ok(Some(ban)) => return Ok(Some(banned_in_store(&String::from_utf8_lossy(key), ban))),
                Ok(None) => {}
                // The store has no bans.
                Err(error) if error.kind() == StoreErrorKind::Forbidden => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    /// Deletes the selected counters. For a rule with limits per plan, deletes those of all plans.
    ///
    /// `limiter` and `rules` are as for [`inspect`](CounterQuery::inspect).
    ///
    /// # Errors
    /// Returns [`CounterError::Invalid`] if the query selects no counter, and [`CounterError::Store`] if the store
    /// fails. In the second case some counters may have been deleted.
    pub async fn reset(
        &self,
        limiter: &Limiter,
        rules: Option<OperatorRules<'_>>,
    ) -> Result<ResetReport, CounterError> {
        let Selected { key, groups, skipped, .. } = self.select(rules, Selection::All).await?;
        let mut count = 0;
        for group in &groups {
            // Limits of one name share a counter, and a limit with a short window may find nothing in it.
            let mut existing = HashSet::new();
            for policy in &group.counters {
                let status = group.inspect(limiter, policy).await?;
                existing.extend((status.reset_after != Wait::ZERO).then_some(policy.limit_name()));
            }
            // Limits that share a counter are reset one by one, because the deny cache is keyed by the limit.
            for policy in &group.counters {
                group.reset(limiter, policy).await?;
            }
            count += existing.len();
        }
        Ok(ResetReport { key, reset: count > 0, counters: count, skipped })
    }

    /// Returns the counters that the query selects, under the key of the client.
    async fn select<'r>(
        &self,
        rules: Option<OperatorRules<'r>>,
        selection: Selection,
    ) -> Result<Selected<'r>, CounterError> {
        let invalid = |message: &str| CounterError::Invalid(message.to_owned());
        let found = |rule: &str| {
            let rules = rules.ok_or_else(|| invalid("this instance has no rules; start it with --config FILE"))?;
            let known = rules.loaded.rules.rules().iter().find(|known| &**known.name() == rule);
            let names =
                || rules.loaded.rules.rules().iter().map(|known| &**known.name()).collect::<Vec<&str>>().join(", ");
            known
                .ok_or_else(|| invalid(&format!("unknown rule; expected one of {}", names())))
                .map(|rule| (rules, rule))
        };
        if self.key.is_empty() {
            return Err(invalid("the key is empty"));
        }
        match (&self.rule, &self.limit) {
            (None, Some(limit)) => {
                let limit: Limit = limit.parse().map_err(|error| CounterError::Invalid(format!("limit: {error}")))?;
                let counters = vec![Arc::new(Policy::of(limit))];
                let key = String::from_utf8_lossy(&self.key).into_owned();
                let group = CounterGroup { key: self.key.clone(), plan: None, counters, shield: None };
                Ok(Selected { key, client: None, groups: vec![group], skipped: Vec::new() })
            }
            (Some(rule), _) => {
                let (rules, rule) = found(rule)?;
                let client = self.client(rules).await?;
                let group =
                    self.select_of_rule(rules, rule, &client, selection).await.map_err(CounterError::Invalid)?;
                let key = String::from_utf8_lossy(&group.key).into_owned();
                Ok(Selected { key, client: Some(client), groups: vec![group], skipped: Vec::new() })
            }
            (None, None) => {
                let missing = "expected ?key=…&limit=10/min, or ?key=…&rule=NAME: this instance has no rules";
                let rules = rules.ok_or_else(|| invalid(missing))?;
                self.select_of_all_rules(rules, selection).await
            }
        }
    }

    /// Returns the client that the query names.
    async fn client(&self, rules: OperatorRules<'_>) -> Result<Client, CounterError> {
        Client::parse(&rules.loaded.rules, rules.lookups, &self.key).await.map_err(CounterError::Invalid)
    }

    /// Returns the counters of the client in all rules that are not off.
    ///
    /// # Errors
    /// If the query names no client, or no rule has a counter of it.
    async fn select_of_all_rules<'r>(
        &self,
        rules: OperatorRules<'r>,
        selection: Selection,
    ) -> Result<Selected<'r>, CounterError> {
        let client = self.client(rules).await?;
        let set = &rules.loaded.rules;
        let (mut groups, mut skipped) = (Vec::new(), Vec::new());
        for rule in set.rules().iter().filter(|rule| rule.mode() != Mode::Off) {
            match self.select_of_rule(rules, rule, &client, selection).await {
                Ok(group) => groups.push(group),
                Err(because) => skipped.push(SkippedRule { rule: rule.name().to_string(), because }),
            }
        }
        if groups.is_empty() {
            let reasons: Vec<String> =
                skipped.iter().map(|skipped| format!("{}: {}", skipped.rule, skipped.because)).collect();
            let reasons = if reasons.is_empty() { "there are no rules".to_owned() } else { reasons.join("; ") };
            return Err(CounterError::Invalid(format!("no rule counts this client ({reasons})")));
        }
        let part = client.part(set.identifier().prefixes());
        let key = part.unwrap_or_else(|| String::from_utf8_lossy(&self.key).into_owned());
        Ok(Selected { key, client: Some(client), groups, skipped })
    }

    /// Returns the counters of `rule` that the query selects for the client.
    ///
    /// # Errors
    /// If it selects none. The message says why.
    async fn select_of_rule<'r>(
        &self,
        OperatorRules { loaded, lookups, shield }: OperatorRules<'r>,
        rule: &CompiledRule,
        client: &Client,
        selection: Selection,
    ) -> Result<CounterGroup<'r>, String> {
        let rules = &loaded.rules;
        let shield = shield.filter(|_| rule.is_shield());
        if rule.is_shield() && shield.is_none() {
            let message = "the counters of a shield rule are in the memory of the instance that received the request; \
                           use --admin URL to query that instance";
            return Err(message.to_owned());
        }
        let now = SystemClock::new().now();
        let key = client.subject(rules, rule, now)?;
        let limits = match (rule.is_by_plan(), selection) {
            (false, _) => Some((rules.default_limit_set(false), None)),
            (true, Selection::All) => self.named_limit_set(loaded).map(|_| None)?,
            (true, Selection::Applying) => {
                let (limit_set, plan) = self.limit_set(loaded, lookups, rule, client, now).await?;
                Some((limit_set, Some(plan)))
            }
        };
        let (policies, plan): (Vec<Arc<Policy>>, _) = match limits {
            Some((limit_set, plan)) => (rule.policies(&limit_set).into_owned(), plan),
            None => (rule.policies_of_all().cloned().chain(client.own_policies(rules, rule, now)).collect(), None),
        };
        let (mut counters, mut seen) = (policies.clone(), HashSet::new());
        counters.retain(|policy| {
            let is_named = self.limit.as_ref().is_none_or(|name| policy.name() == name || policy.limit_name() == name);
            is_named && seen.insert((policy.limit_name().to_owned(), *policy.limit()))
        });
        if counters.is_empty() {
            let names: BTreeSet<&str> = policies.iter().map(|policy| policy.name()).collect();
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            Err(format!("the rule has no limit with this name; expected one of {names}"))
        } else {
            Ok(CounterGroup { key, plan, counters, shield })
        }
    }

    /// Returns the set of limits of the plan that the query names, or `None` if it names none.
    ///
    /// # Errors
    /// If there is no plan with this name. The message lists the plans.
    fn named_limit_set(&self, loaded: &Loaded) -> Result<Option<LimitSet>, String> {
        let Some(plan) = &self.plan else { return Ok(None) };
        let rules = &loaded.rules;
        rules.limit_set_named(plan).map(Some).ok_or_else(|| {
            let names: Vec<&str> = rules.plans().iter().map(|plan| &**plan.name()).collect();
            format!("unknown plan; expected one of {}", names.join(", "))
        })
    }

    /// Returns the set of limits that applies to the client in a rule with limits per plan, and the client's plan, which
    /// is looked up if necessary.
    ///
    /// # Errors
    /// If the plan of the query is unknown, is missing, or is not the plan of the client.
    async fn limit_set(
        &self,
        loaded: &Loaded,
        lookups: &Lookups,
        rule: &CompiledRule,
        client: &Client,
        now: Timestamp,
    ) -> Result<(LimitSet, PlanExplanation), String> {
        let given = |limit_set: LimitSet, name: &str| {
            (limit_set, PlanExplanation { name: name.to_owned(), source: "given".into() })
        };
        let named = self.plan.as_deref().zip(self.named_limit_set(loaded)?);
        let facts = client.facts(&loaded.rules, None, now).filter(|_| client.determines_plan(rule));
        let Some(mut facts) = facts else {
            let missing = "this rule has limits per plan: add --plan NAME (in a request: plan=NAME)";
            return named.map(|(name, limit_set)| given(limit_set, name)).ok_or_else(|| missing.to_owned());
        };
        let plan = facts.plan(lookups).await;
        let explained = PlanExplanation::new(loaded, &plan);
        match named {
            Some((name, _)) if name != explained.name && plan.source.is_assigned() => {
                let (what, plan) = (if matches!(client, Client::Key(..)) { "key" } else { "address" }, explained.name);
                Err(format!("the plan does not apply: this {what} has the plan {plan}; omit plan to use it"))
            }
            Some((name, limit_set)) if name != explained.name => Ok(given(limit_set, name)),
            _ => Ok((plan.limit_set, explained)),
        }
    }
}

impl CounterQuery {
    /// Parses a percent-encoded query. `Err` is the message of the 400 response.
    fn parse(text: &str) -> Result<CounterQuery, String> {
        let mut query = CounterQuery::default();
        let mut has_key = false;
        for (name, value) in parameters(text) {
            let utf8 = |bytes| String::from_utf8(bytes).map_err(|_| format!("{name}: expected UTF-8"));
            match name {
                "key" => (query.key, has_key) = (value, true),
                "limit" => query.limit = Some(utf8(value)?),
                "rule" => query.rule = Some(utf8(value)?),
                "plan" => query.plan = Some(utf8(value)?),
                _ => return Err("unknown parameter; expected key, limit, rule or plan".to_owned()),
            }
        }
        if !has_key {
            return Err("expected ?key=…".to_owned());
        }
        Ok(query)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_decoded_and_unknown_parameters_are_rejected() {
        let query = CounterQuery::parse("key=user%3A42%00%ff&limit=10/min+token-bucket%20burst=3").unwrap();
        assert_eq!(query.key, b"user:42\0\xff");
        assert_eq!(query.limit.as_deref(), Some("10/min token-bucket burst=3"));
        for (query, phrase) in
            [("", "key="), ("limit=1/s", "key="), ("key=a&kye=b", "unknown parameter"), ("key=a&rule=%ff", "UTF-8")]
        {
            assert!(CounterQuery::parse(query).is_err_and(|message| message.contains(phrase)), "{query}");
        }
    }
}
