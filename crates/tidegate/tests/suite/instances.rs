//! Limiters on one store count each other, on every kind of store and with the intervals of production.

use std::sync::Arc;
use std::time::Duration;

use tidegate::Limiter;
use tidegate_redis::RedisStore;
use tidegate_testkit::server::{Brand, Cluster, Config, SentinelGroup};
use tokio::time::sleep;

const PATIENCE: Duration = Duration::from_secs(10);
const PREFIX: &str = "counted";

fn limiter(url: &str) -> Limiter {
    let store = RedisStore::builder(url).prefix(PREFIX).call_timeout(PATIENCE).build().unwrap();
    Limiter::builder().store(Arc::new(store)).build()
}

/// Waits until every limiter knows that there are as many instances.
async fn until_counted(limiters: &[Limiter], what: &str) {
    for _ in 0..1_200 {
        if limiters.iter().all(|limiter| limiter.stats().instances as usize == limiters.len()) {
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
    panic!("{what}: {:?}", limiters.iter().map(|limiter| limiter.stats().instances).collect::<Vec<_>>());
}

async fn assert_counted(url: &str, what: &str) {
    let mut limiters: Vec<Limiter> = (0..3).map(|_| limiter(url)).collect();
    until_counted(&limiters, what).await;
    limiters.push(limiter(url));
    until_counted(&limiters, what).await;
    drop(limiters.pop());
    until_counted(&limiters, what).await;
    limiters.pop().unwrap().withdraw().await;
    until_counted(&limiters, what).await;
}

#[tokio::test]
async fn limiters_on_one_store_count_each_other() {
    for brand in Brand::ALL {
        let (server, cluster) = (Config::new(brand).start(), Cluster::shared(brand));
        let sentinels = SentinelGroup::shared(brand);
        tokio::join!(
            assert_counted(&server.url(), "a server"),
            assert_counted(&cluster.url(), "a cluster"),
            assert_counted(&sentinels.url(), "Sentinels"),
        );
    }
}
