//! A store that is milliseconds away, or that fails, in virtual time.
//!
//! The server and the network are simulated, and tokio's clock is paused. So times, shares and batch sizes are exact, and
//! the speed of the machine has no influence. The chaos scenario `latency` runs the same matrix on a real server.

mod in_flight;
mod matrix;
mod outages;
mod plans;

use std::time::Duration;

use tidegate_redis::{RedisStore, RedisStoreBuilder};
use tidegate_testkit::simulated::SimulatedRedis;

pub(super) fn ms(ms: f64) -> Duration {
    Duration::from_secs_f64(ms / 1_000.0)
}

/// Connects a store to the server.
async fn connected(
    server: &SimulatedRedis,
    configure: impl FnOnce(RedisStoreBuilder) -> RedisStoreBuilder,
) -> RedisStore {
    let dial = server.clone();
    let connector = move |_: &str, _| std::future::ready(Ok(dial.connect()));
    let store = configure(RedisStore::builder("redis://simulated").connector(connector)).build().unwrap();
    store.command(&["PING"]).await.unwrap();
    store
}
