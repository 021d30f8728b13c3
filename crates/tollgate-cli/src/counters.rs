//! The commands `check`, `inspect` and `reset`, on a store or a running instance.

use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tollgate::answer::Policy;
use tollgate::{Check, Cost, Demand, Key, Limit, LimitStatus, Wait};

use crate::admin::Admin;
use crate::{Failure, arguments, output};

/// Runs `tollgate check`: makes one check and prints the decision. Returns whether it was allowed.
pub(crate) async fn check(arguments: arguments::Check) -> Result<bool, Failure> {
    let limiter = arguments.counters.limiter()?;
    let demand = Demand::new(arguments.limit, Key::new(&arguments.key)?).cost(Cost::new(arguments.cost));
    let decision = limiter.check(&Check::one(&demand)).await?;
    for line in &decision.limits {
        let verdict = match (decision.ban, line.allowed) {
            (Some(_), _) => "banned",
            (None, true) => "allowed",
            (None, false) => "denied",
        };
        match arguments.json {
            true => {
                let mut json = to_json(&arguments.limit, line);
                json["banned"] = decision.ban.is_some().into();
                output::print_line(json)?;
            }
            false => output::print(told(verdict, &arguments.limit, line, false))?,
        }
    }
    Ok(decision.allowed())
}

/// Runs `tollgate inspect`: prints a counter without changing it.
pub(crate) async fn inspect(arguments: arguments::Inspect) -> Result<(), Failure> {
    if let Some(admin) = Admin::chosen(&arguments.admin)? {
        let seen = admin.ask("GET", &counters(&arguments), None).await?;
        return match arguments.json {
            true => output::print_line(seen),
            false => output::print(seen["counters"].as_array().into_iter().flatten().map(counter).collect::<String>()),
        };
    }
    let limiter = arguments.counters.shared_limiter()?;
    let limit = limit(&arguments)?;
    let line = limiter.inspect(&Demand::new(limit, Key::new(&arguments.key)?)).await?;
    output::print(told(Policy::of(limit).name(), &limit, &line, arguments.json))
}

/// Runs `tollgate reset`: deletes a counter.
pub(crate) async fn reset(arguments: arguments::Inspect) -> Result<(), Failure> {
    match Admin::chosen(&arguments.admin)? {
        Some(admin) => drop(admin.ask("DELETE", &counters(&arguments), None).await?),
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

fn limit(arguments: &arguments::Inspect) -> Result<Limit, Failure> {
    Ok(arguments.limit.as_deref().unwrap_or_default().parse()?)
}

/// Returns the path and query of the counters in the admin API.
fn counters(arguments: &arguments::Inspect) -> String {
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

/// Formats a counter from a response of the admin API.
fn counter(counter: &Value) -> String {
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

/// Formats a limit status, as JSON or as a table.
fn told(heading: &str, limit: &Limit, line: &LimitStatus, as_json: bool) -> String {
    if as_json {
        return format!("{}\n", to_json(limit, line));
    }
    let left = format!("{} of {}", line.remaining, line.quota);
    table(heading, &limit.to_string(), &left, [line.retry_after, line.next_after, line.reset_after])
}

fn to_json(limit: &Limit, line: &LimitStatus) -> Value {
    serde_json::json!({
        "allowed": line.allowed,
        "limit": limit.to_string(),
        "quota": line.quota,
        "remaining": line.remaining,
        "retry_after_ms": line.retry_after.as_millis_ceil(),
        "next_after_ms": line.next_after.as_millis_ceil(),
        "reset_after_ms": line.reset_after.as_millis_ceil(),
    })
}

/// Formats a table for people: a heading and a row per field.
fn table(heading: &str, limit: &str, left: &str, waits: [Wait; 3]) -> String {
    let [retry_after, next_after, reset_after] = waits.map(in_words);
    format!(
        "{heading}\n  limit        {limit}\n  remaining    {left}\n  retry after  {retry_after}\n  \
         next after   {next_after}\n  reset after  {reset_after}\n"
    )
}

fn in_words(wait: Wait) -> String {
    match wait.as_duration() {
        None => "never".to_owned(),
        Some(Duration::ZERO) => "0s".to_owned(),
        Some(duration) => format!("{duration:?}"),
    }
}
