//! The commands `check`, `inspect` and `reset`, on a store or a running instance.

use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tollgate::answer::Policy;
use tollgate::{Check, Cost, Demand, Key, Limit, LimitStatus, Wait};

use crate::admin::Admin;
use crate::{Failure, arguments, output};

/// Runs `tollgate check`: makes one check, which charges its cost if it is allowed, and prints the decision.
///
/// Returns whether the check was allowed: `false` if the limit denied it or its key is banned.
///
/// # Errors
/// If the options are invalid, the store does not answer, or the output cannot be written.
pub(crate) async fn check(arguments: arguments::Check) -> Result<bool, Failure> {
    let limiter = arguments.counters.limiter()?;
    let demand = Demand::new(arguments.limit, Key::new(&arguments.key)?).cost(Cost::new(arguments.cost));
    let decision = limiter.check(&Check::one(&demand)).await?;
    for status in &decision.limits {
        let verdict = match (decision.ban, status.allowed) {
            (Some(_), _) => "banned",
            (None, true) => "allowed",
            (None, false) => "denied",
        };
        match arguments.json {
            true => {
                let mut json = to_json(&arguments.limit, status);
                json["banned"] = decision.ban.is_some().into();
                output::print_line(json)?;
            }
            false => output::print(format_status(verdict, &arguments.limit, status, false))?,
        }
    }
    Ok(decision.allowed())
}

/// Runs `tollgate inspect`: prints a counter without changing it, or with `--rule` the counters of a rule.
///
/// # Errors
/// If the options are invalid, the instance or the store does not answer, the store is the memory store, or the output
/// cannot be written.
pub(crate) async fn inspect(arguments: arguments::Inspect) -> Result<(), Failure> {
    if let Some(admin) = Admin::from_options(&arguments.admin)? {
        let response = admin.send("GET", &counters_path(&arguments), None).await?;
        return match arguments.json {
            true => output::print_line(response),
            false => output::print(
                response["counters"].as_array().into_iter().flatten().map(format_counter).collect::<String>(),
            ),
        };
    }
    let limiter = arguments.counters.shared_limiter()?;
    let limit = limit(&arguments)?;
    let status = limiter.inspect(&Demand::new(limit, Key::new(&arguments.key)?)).await?;
    output::print(format_status(Policy::of(limit).name(), &limit, &status, arguments.json))
}

/// Runs `tollgate reset`: deletes a counter, or with `--rule` the counters of a rule, and prints that.
///
/// # Errors
/// As [`inspect`]. A counter that does not exist is not an error.
pub(crate) async fn reset(arguments: arguments::Inspect) -> Result<(), Failure> {
    match Admin::from_options(&arguments.admin)? {
        Some(admin) => drop(admin.send("DELETE", &counters_path(&arguments), None).await?),
        None => {
            let limiter = arguments.counters.shared_limiter()?;
            limiter.reset(&Demand::new(limit(&arguments)?, Key::new(&arguments.key)?)).await?;
        }
    }
    match arguments.json {
        true => output::print_line(serde_json::json!({ "reset": true })),
        false => output::print_line("the counter was reset"),
    }
}

/// Parses the argument LIMIT, such as `10/min`. Returns an error if it is missing or not a limit. Not for a command
/// with `--rule`, where LIMIT is a name.
fn limit(arguments: &arguments::Inspect) -> Result<Limit, Failure> {
    Ok(arguments.limit.as_deref().unwrap_or_default().parse()?)
}

/// Returns the path and query of the counters in the admin API, such as `/v1/keys?key=user%3A42&limit=10%2Fmin`.
fn counters_path(arguments: &arguments::Inspect) -> String {
    let parts = [("limit", &arguments.limit), ("rule", &arguments.rule), ("plan", &arguments.plan)];
    let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let mut path = format!("/v1/keys?key={}", encode(&arguments.key));
    for (name, value) in parts {
        if let Some(value) = value {
            path += &format!("&{name}={}", encode(value));
        }
    }
    path
}

/// Formats a counter from a response of the admin API as a table. A wait of `null` is printed as `never`.
fn format_counter(counter: &Value) -> String {
    let wait = |field: &str| match counter[field].as_u64() {
        Some(ms) => Wait::from_micros(ms.saturating_mul(1_000)),
        None => Wait::NEVER,
    };
    let text = |field: &str| counter[field].as_str().unwrap_or_default().to_owned();
    let heading = [text("rule"), text("name")].join(" ");
    let left = format!("{} of {}", counter["remaining"], counter["quota"]);
    let waits = ["retry_after_ms", "next_after_ms", "reset_after_ms"].map(wait);
    table(heading.trim_start(), &text("limit"), &left, waits)
}

/// Formats a limit status as a line of JSON, without `heading`, or as a table under `heading`. Both end with a newline.
fn format_status(heading: &str, limit: &Limit, status: &LimitStatus, as_json: bool) -> String {
    if as_json {
        return format!("{}\n", to_json(limit, status));
    }
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
         next after   {next_after}\n  reset after  {reset_after}\n"
    )
}

/// Formats a wait, such as `1.5s`, `0s` or `never`.
fn format_wait(wait: Wait) -> String {
    match wait.as_duration() {
        None => "never".to_owned(),
        Some(Duration::ZERO) => "0s".to_owned(),
        Some(duration) => format!("{duration:?}"),
    }
}
