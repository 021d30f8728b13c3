//! The commands `check`, `inspect` and `reset`, on a store or a running instance.

use serde_json::{Value, to_value};
use tidegate::{Check, Cost, Demand, Key, Limit, LimitStatus, Wait};
use tidegate_server::{CounterQuery, format_wait};

use crate::admin::{ask_or, with_query};
use crate::output::{items, print_report, text};
use crate::store::OperatorStore;
use crate::{Failure, arguments};

/// Runs `tidegate check`: makes one check, which charges its cost if it is allowed, and prints the decision.
///
/// Returns whether the check was allowed: `false` if the limit denied it or its key is banned.
///
/// # Errors
/// If the options are invalid, the store does not answer, or the output cannot be written.
pub(crate) async fn check(arguments: arguments::CheckArguments) -> Result<bool, Failure> {
    let limiter = arguments.counters.limiter()?;
    let demand = Demand::new(arguments.limit, Key::new(&arguments.key)?).cost(Cost::new(arguments.cost));
    let decision = limiter.check(&Check::one(&demand)).await?;
    for status in &decision.limits {
        let verdict = match (decision.ban, status.allowed) {
            (Some(_), _) => "banned",
            (None, true) => "allowed",
            (None, false) => "denied",
        };
        let mut json = to_json(&arguments.limit, status);
        json["banned"] = decision.ban.is_some().into();
        print_report(&json, arguments.json, |_| format_status(verdict, &arguments.limit, status))?;
    }
    Ok(decision.allowed())
}

/// Runs `tidegate inspect`: prints a counter of explicit checks, or the counters of a client in one rule or in all rules,
/// without changing them.
///
/// Returns whether something is counted in at least one of them.
///
/// # Errors
/// If the options are invalid, the instance or the store does not answer, the store is the memory store, or the output
/// cannot be written.
pub(crate) async fn inspect(arguments: arguments::Inspect) -> Result<bool, Failure> {
    let report = ask_or(&arguments.admin, ("GET", &counters_path(&arguments), None), async || {
        let (query, store) = open(&arguments)?;
        Ok(to_value(query.inspect(&store.limiter, store.rules()).await?)?)
    })
    .await?;
    print_report(&report, arguments.json, |report| format_report(report, &arguments))?;
    Ok(items(&report["counters"]).any(exists))
}

/// Runs `tidegate reset`: deletes a counter of explicit checks, or the counters of a client in one rule or in all rules,
/// and prints how many.
///
/// Returns whether at least one of them existed.
///
/// # Errors
/// Fails in the same cases as [`inspect`]. Some counters may have been deleted if the store fails.
pub(crate) async fn reset(arguments: arguments::Inspect) -> Result<bool, Failure> {
    let report = ask_or(&arguments.admin, ("DELETE", &counters_path(&arguments), None), async || {
        let (query, store) = open(&arguments)?;
        Ok(to_value(query.reset(&store.limiter, store.rules()).await?)?)
    })
    .await?;
    print_report(&report, arguments.json, |report| match report["counters"].as_u64().unwrap_or_default() {
        0 => no_such_counter(report, &arguments),
        1 => "the counter was reset\n".to_owned(),
        count => format!("{count} counters were reset\n"),
    })?;
    Ok(report["reset"] == true)
}

/// Returns the query of the arguments, and opens the store that `--store` and `--config` choose, with the rules of
/// `--config` unless the query is about explicit checks.
///
/// # Errors
/// If there is no configuration for the rules, or in the cases of [`OperatorStore::open`].
fn open(arguments: &arguments::Inspect) -> Result<(CounterQuery, OperatorStore), Failure> {
    let arguments::Inspect { counters, key, limit, rule, plan, .. } = arguments;
    let (limit, rule, plan) = (limit.clone(), rule.clone(), plan.clone());
    let query = CounterQuery { key: key.clone().into_bytes(), limit, rule, plan };
    let store = match (&counters.config, &query.rule, &query.limit) {
        (_, None, Some(_)) => OperatorStore::without_rules(counters)?,
        (Some(file), ..) => OperatorStore::open(file, &counters.store)?,
        (None, Some(_), _) => return Err(Failure::RuleWithoutConfiguration),
        (None, None, None) => return Err(Failure::ClientWithoutConfiguration),
    };
    Ok((query, store))
}

/// Returns the path and query of the counters in the admin API, such as `/v1/keys?key=user%3A42&limit=10%2Fmin`.
fn counters_path(arguments: &arguments::Inspect) -> String {
    let arguments::Inspect { key, limit, rule, plan, .. } = arguments;
    let parameters =
        [("key", Some(&**key)), ("limit", limit.as_deref()), ("rule", rule.as_deref()), ("plan", plan.as_deref())];
    with_query("/v1/keys", &parameters)
}

/// Returns whether something is counted in a counter of a report.
fn exists(counter: &Value) -> bool {
    counter["exists"] == true
}

/// Formats the line for a report without counters. It names the limit and the rule that were asked for, because others
/// may have counted the same key.
fn no_such_counter(report: &Value, arguments: &arguments::Inspect) -> String {
    let key = text(&report["key"]);
    let by = match (&arguments.rule, &arguments.limit) {
        (Some(rule), Some(limit)) => format!(" under limit {limit} of rule {rule}"),
        (Some(rule), None) => format!(" under rule {rule}"),
        (None, Some(limit)) => format!(" under the limit {limit}"),
        (None, None) => " under any rule".to_owned(),
    };
    format!("no such counter: nothing is counted for {key}{by}\n")
}

/// Formats a [`CounterReport`](tidegate_server::CounterReport): the client with its plan, its ban and its
/// node of a cluster, as far as it has them, then a table per counter, or one line if there is no counter.
fn format_report(report: &Value, arguments: &arguments::Inspect) -> String {
    let mut lines = String::new();
    if let Some(plan) = report["plan"].as_object() {
        lines += &format!("  plan         {} ({})\n", text(&plan["name"]), text(&plan["source"]));
    }
    if let Some(reason) = report["banned"].as_str() {
        lines += &format!("  refused      {reason}\n");
    }
    if let Some(slot) = report["slot"].as_u64() {
        let node = report["node"].as_str().unwrap_or("not known");
        lines += &format!("  node         {node} (slot {slot})\n");
    }
    if !lines.is_empty() {
        lines = format!("{}\n{lines}", text(&report["key"]));
    }
    let is_of_all_rules = arguments.rule.is_none() && arguments.limit.is_none();
    if items(&report["counters"]).any(exists) {
        lines += &items(&report["counters"]).map(format_counter).collect::<String>()
    } else {
        lines += &no_such_counter(report, arguments)
    }
    for skipped in items(&report["skipped"]).filter(|_| is_of_all_rules) {
        lines += &format!("skipped {}: {}\n", text(&skipped["rule"]), text(&skipped["because"]));
    }
    lines
}

/// Formats a counter of a report as a table. A wait of `null` is printed as `never`.
fn format_counter(counter: &Value) -> String {
    let wait = |field: &str| match counter[field].as_u64() {
        Some(ms) => Wait::from_micros(ms.saturating_mul(1_000)),
        None => Wait::NEVER,
    };
    let [rule, name, limit] = ["rule", "name", "limit"].map(|field| text(&counter[field]));
    let heading = [rule, name].join(" ");
    if !exists(counter) {
        return format!("{}\n  limit        {limit}\n  no such counter\n", heading.trim_start());
    }
    let left = format!("{} of {}", counter["remaining"], counter["quota"]);
    let waits = ["retry_after_ms", "next_after_ms", "reset_after_ms"].map(wait);
    table(heading.trim_start(), limit, &left, waits)
}

/// Formats a limit status as a table under `heading`.
fn format_status(heading: &str, limit: &Limit, status: &LimitStatus) -> String {
    let left = format!("{} of {}", status.remaining, status.quota);
    table(heading, &limit.to_string(), &left, [status.retry_after, status.next_after, status.reset_after])
}

/// Converts a limit status to JSON. Waits are in milliseconds, rounded up; `null` means never.
fn to_json(limit: &Limit, status: &LimitStatus) -> Value {
    serde_json::json!({
        "allowed": status.allowed,
        "limit": limit.to_string(),
        "quota": status.quota,
        "remaining": status.remaining,
        "retry_after_ms": status.retry_after.as_millis_ceil(),
        "next_after_ms": status.next_after.as_millis_ceil(),
        "reset_after_ms": status.reset_after.as_millis_ceil(),
    })
}

/// Formats a table: a heading and a row per field. `left` is the remaining units; `waits` are retry, next and reset
/// after.
fn table(heading: &str, limit: &str, left: &str, waits: [Wait; 3]) -> String {
    let [retry_after, next_after, reset_after] = waits.map(format_wait);
    format!(
        "{heading}\n  limit        {limit}\n  remaining    {left}\n  retry after  {retry_after}\n  \
         more after   {next_after}\n  reset after  {reset_after}\n"
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::arguments::{Arguments, Command};

    #[test]
    fn counter_that_does_not_exist_is_named_by_what_was_asked_for() {
        for (line, expected) in [
            ("tidegate inspect user:42 10/min", "user:42 under the limit 10/min\n"),
            ("tidegate inspect user:42 --rule api", "user:42 under rule api\n"),
            ("tidegate inspect user:42 per-minute --rule api", "user:42 under limit per-minute of rule api\n"),
        ] {
            let Some(Command::Inspect(arguments)) = Arguments::try_parse_from(line.split(' ')).unwrap().command else {
                panic!("{line}");
            };
            let text = no_such_counter(&json!({ "key": "user:42", "counters": [] }), &arguments);
            assert_eq!(text, format!("no such counter: nothing is counted for {expected}"));
        }
    }
}
