//! A completion API that is limited by tokens, not by requests.
//!
//! The cost of a completion is known only when it is done. So an estimate is reserved before the work, and the actual
//! cost is settled after it (`budget.rs`). The model is a fake (`model.rs`); the rest is as in a real service.
//!
//! ```console
//! $ cargo run -p llm-tokens
//! $ curl -i -H 'x-api-key: demo-key' --json '{"prompt":"tell me more","max_tokens":500}' http://127.0.0.1:3003/v1/complete
//! ```

mod budget;
mod model;
mod routes;

use std::error::Error;
use std::ops::RangeInclusive;
use std::process::ExitCode;
use std::time::Duration;

use tidegate::{Limit, Limiter};
use tokio::net::TcpListener;

use crate::budget::Budget;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("llm-tokens: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Box<dyn Error>> {
    let limiter = Limiter::builder()
        .url(&variable("TIDEGATE_STORE", "memory"))
        .map_err(|error| format!("TIDEGATE_STORE: {error}"))?
        .deadline(Duration::from_millis(number("REDIS_DEADLINE_MS", "25", 1..=10_000)?.into()))
        // While Redis is unavailable, each instance grants its share of the budgets.
        .instances(number("INSTANCES", "1", 1..=10_000)?)
        .build();
    let per_minute = limit("TOKENS_PER_MINUTE", "2000", "min")?;
    let per_day = limit("TOKENS_PER_DAY", "20000", "day")?;
    let listener = TcpListener::bind(variable("LISTEN", "127.0.0.1:3003")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, routes::app(Budget::new(limiter, per_minute, per_day))).await?;
    Ok(())
}

/// Returns an environment variable, or the default if it is not set or empty.
fn variable(name: &str, otherwise: &str) -> String {
    std::env::var(name).ok().filter(|value| !value.is_empty()).unwrap_or_else(|| otherwise.to_owned())
}

fn number(name: &str, otherwise: &str, accepted: RangeInclusive<u32>) -> Result<u32, String> {
    let said = variable(name, otherwise);
    let number = said.parse().ok().filter(|number| accepted.contains(number));
    number.ok_or_else(|| format!("{name}: expected {} to {}, got {said:?}", accepted.start(), accepted.end()))
}

fn limit(name: &str, otherwise: &str, window: &str) -> Result<Limit, String> {
    format!("{}/{window}", variable(name, otherwise)).parse().map_err(|error| format!("{name}: {error}"))
}
