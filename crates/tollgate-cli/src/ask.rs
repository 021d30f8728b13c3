//! One question to a store: `check`, `inspect`, `reset`.

use tollgate::{Check, Cost, Demand, Key, Limit, Line, Wait};

use crate::Failure;
use crate::arguments;

/// Decides once. Whether it was allowed.
pub(crate) async fn check(arguments: arguments::Check) -> Result<bool, Failure> {
    let limiter = arguments.store.for_command()?;
    let demand = Demand::new(arguments.limit, Key::new(&arguments.key)?).cost(Cost::new(arguments.cost));
    let decision = limiter.check(&Check::one(&demand)).await?;
    for line in &decision.lines {
        print_line(&arguments.limit, line, arguments.json);
    }
    Ok(decision.allowed())
}

pub(crate) async fn inspect(arguments: arguments::Inspect) -> Result<(), Failure> {
    let limiter = arguments.store.for_command()?;
    let demand = Demand::new(arguments.limit, Key::new(&arguments.key)?);
    let line = limiter.inspect(&demand).await?;
    print_line(&arguments.limit, &line, arguments.json);
    Ok(())
}

pub(crate) async fn reset(arguments: arguments::Inspect) -> Result<(), Failure> {
    let limiter = arguments.store.for_command()?;
    let demand = Demand::new(arguments.limit, Key::new(&arguments.key)?);
    limiter.reset(&demand).await?;
    match arguments.json {
        true => println!("{}", serde_json::json!({ "reset": true })),
        false => println!("forgotten"),
    }
    Ok(())
}

fn print_line(limit: &Limit, line: &Line, as_json: bool) {
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
    println!("{}", if line.allowed { "allowed" } else { "denied" });
    println!("  limit        {limit}");
    println!("  remaining    {} of {}", line.remaining, line.quota);
    println!("  retry after  {}", in_words(line.retry_after));
    println!("  next after   {}", in_words(line.next_after));
    println!("  reset after  {}", in_words(line.reset_after));
}

fn in_words(wait: Wait) -> String {
    match wait.as_duration() {
        None => "never".to_owned(),
        Some(duration) => format!("{duration:?}"),
    }
}
