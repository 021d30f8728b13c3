//! The doors of the Tollgate decision service, and the loop that holds them open.
//!
//! ```no_run
//! use tollgate::Limiter;
//! use tollgate_server::{Doors, Listeners, run};
//!
//! # async fn example() -> std::io::Result<()> {
//! let listeners = Listeners { http: Some(tokio::net::TcpListener::bind("127.0.0.1:8080").await?), ..Listeners::default() };
//! run(listeners, Doors::new(Limiter::memory()), async { std::future::pending().await }).await;
//! # Ok(())
//! # }
//! ```

pub mod doors;
mod run;

pub use run::{Doors, Listeners, run};
