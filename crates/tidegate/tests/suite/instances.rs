//! Limiters on one store count each other, on every kind of store and with the intervals of production.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
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
async fn until_counted(limiters: &[Limiter], url: &str) {
    for _ in 0..1_200 {
        if limiters.iter().all(|limiter| limiter.stats().instances as usize == limiters.len()) {
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
    panic!("{url}: {:?}", limiters.iter().map(|limiter| limiter.stats().instances).collect::<Vec<_>>());
}

async fn assert_counted(url: &str) {
    let mut limiters: Vec<Limiter> = (0..3).map(|_| limiter(url)).collect();
    until_counted(&limiters, url).await;
    limiters.push(limiter(url));
    until_counted(&limiters, url).await;
    drop(limiters.pop());
    until_counted(&limiters, url).await;
    limiters.pop().unwrap().withdraw().await;
    until_counted(&limiters, url).await;
}

#[tokio::test]
async fn limiters_on_one_store_count_each_other() {
    for brand in Brand::ALL {
        let (server, cluster) = (Config::new(brand).start(), Cluster::shared(brand));
        let sentinels = SentinelGroup::shared(brand);
        let urls = [server.url(), cluster.url(), sentinels.url()];
        join_all(urls.iter().map(|url| assert_counted(url))).await;
    }
}
