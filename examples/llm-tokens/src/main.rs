//! A completion API that is limited by tokens and not by requests.
//!
//! What a completion costs is known when it is done. So an estimate is reserved before the work, and the real cost settled
//! after it (`budget.rs`). The model is a fake (`model.rs`); the rest is as a real service would have it.
//!
//! ```console
//! $ cargo run -p llm-tokens
//! $ curl -i -H 'x-api-key: demo-key' --json '{"prompt":"tell me more","max_tokens":500}' http://127.0.0.1:3003/v1/complete
//! ```

mod budget;
mod model;
mod routes;

use std::error::Error;

use tokio::net::TcpListener;
use tollgate::Limiter;

use crate::budget::Budget;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let variable = |name: &str, otherwise: &str| std::env::var(name).unwrap_or_else(|_| otherwise.to_owned());
    let limiter = Limiter::builder().url(&variable("TOLLGATE_STORE", "memory"))?.build();
    let per_minute = format!("{}/min", variable("TOKENS_PER_MINUTE", "2000")).parse()?;
    let per_day = format!("{}/day", variable("TOKENS_PER_DAY", "20000")).parse()?;
    let listener = TcpListener::bind(variable("LISTEN", "127.0.0.1:3003")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, routes::app(Budget::new(limiter, per_minute, per_day))).await?;
    Ok(())
}
