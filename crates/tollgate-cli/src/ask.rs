//! One question to a store, or to a running instance: `check`, `inspect`, `reset`.

use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tollgate::answer::Policy;
use tollgate::{Check, Cost, Demand, Key, Limit, Line, Wait};

use crate::Failure;
use crate::admin::Admin;
use crate::arguments;

/// Decides once. Whether it was allowed.
pub(crate) async fn check(arguments: arguments::Check) -> Result<bool, Failure> {
    let limiter = arguments.store.for_command()?;
    let demand = Demand::new(arguments.limit, Key::new(&arguments.key)?).cost(Cost::new(arguments.cost));
    let decision = limiter.check(&Check::one(&demand)).await?;
    for line in &decision.lines {
        let verdict = if line.allowed { "allowed" } else { "denied" };
        print_line(verdict, &arguments.limit, line, arguments.json);
    }
    Ok(decision.allowed())
}

pub(crate) async fn inspect(arguments: arguments::Inspect) -> Result<(), Failure> {
    if let Some(admin) = Admin::chosen(&arguments.admin)? {
        let seen = admin.ask("GET", &counters(&arguments), None).await?;
        match arguments.json {
            true => println!("{seen}"),
            false => seen["counters"].as_array().into_iter().flatten().for_each(print_counter),
        }
        return Ok(());
    }
    let limiter = arguments.store.for_command()?;
    let limit = limit(&arguments)?;
    let line = limiter.inspect(&Demand::new(limit, Key::new(&arguments.key)?)).await?;
    print_line(Policy::of(limit).name(), &limit, &line, arguments.json);
    Ok(())
}

pub(crate) async fn reset(arguments: arguments::Inspect) -> Result<(), Failure> {
    match Admin::chosen(&arguments.admin)? {
        Some(admin) => drop(admin.ask("DELETE", &counters(&arguments), None).await?),
        None => {
            let limiter = arguments.store.for_command()?;
            limiter.reset(&Demand::new(limit(&arguments)?, Key::new(&arguments.key)?)).await?;
        }
    }
    match arguments.json {
        true => println!("{}", serde_json::json!({ "reset": true })),
        false => println!("forgotten"),
    }
    Ok(())
}

fn limit(arguments: &arguments::Inspect) -> Result<Limit, Failure> {
    Ok(arguments.limit.as_deref().unwrap_or_default().parse()?)
}

/// Where the admin door has the counters that are meant.
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

fn print_counter(counter: &Value) {
    let in_words = |field: &str| match counter[field].as_u64() {
        Some(ms) => in_words(Wait::from_micros(ms.saturating_mul(1_000))),
        None => "never".to_owned(),
    };
    let text = |field: &str| counter[field].as_str().unwrap_or_default().to_owned();
    println!("{}", [text("rule"), text("name")].join(" ").trim_start());
    println!("  limit        {}", text("limit"));
    println!("  remaining    {} of {}", counter["remaining"], counter["quota"]);
    for (word, field) in
        [("retry after", "retry_after_ms"), ("next after", "next_after_ms"), ("reset after", "reset_after_ms")]
    {
        println!("  {word:<11}  {}", in_words(field));
    }
}

fn print_line(heading: &str, limit: &Limit, line: &Line, as_json: bool) {
    if as_json {
        let json = serde_json::json!({
            "allowed": line.allowed,
            "limit": limit.to_string(),
            "quota": line.quota,
            "remaining": line.remaining,
            "retry_after_ms": line.retry_after.as_millis_ceil(),
            "next_after_ms": line.next_after.as_millis_ceil(),
            "reset_after_ms": line.reset_after.as_millis_ceil(),
        });
        println!("{json}");
        return;
    }
    println!("{heading}");
    println!("  limit        {limit}");
    println!("  remaining    {} of {}", line.remaining, line.quota);
    println!("  retry after  {}", in_words(line.retry_after));
    println!("  next after   {}", in_words(line.next_after));
    println!("  reset after  {}", in_words(line.reset_after));
}

fn in_words(wait: Wait) -> String {
    match wait.as_duration() {
        None => "never".to_owned(),
        Some(Duration::ZERO) => "0s".to_owned(),
        Some(duration) => format!("{duration:?}"),
    }
}
