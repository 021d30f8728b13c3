//! Limiters on one store count each other, on every kind of store and with the intervals of production.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tidegate::{Limit, Limiter, Source};
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

/// Returns how many of many checks of this key the instances admit, and asserts their source.
async fn admitted(limiters: &[Limiter], key: &str, source: Source) -> u32 {
    let limit: Limit = "10/h".parse().unwrap();
    let mut admitted = 0;
    for _ in 0..20 {
        for limiter in limiters {
            let decision = limiter.check_key(&limit, key).await.unwrap();
            assert_eq!(decision.source, source, "{decision:?}");
            admitted += u32::from(decision.allowed());
        }
    }
    admitted
}

/// The bounds of an outage hold for keys on every master of a cluster, with the number of instances that they counted.
#[tokio::test]
async fn outage_of_a_whole_cluster_admits_no_more_than_the_bound() {
    for brand in Brand::ALL {
        let cluster = Cluster::start(brand);
        let limiter = || {
            let store = RedisStore::builder(cluster.url()).prefix(PREFIX).call_timeout(PATIENCE).build().unwrap();
            // Longer than a busy machine needs, so that no decision is local before the outage. Cached denials would hold
            // for a second of the outage.
            Limiter::builder().store(Arc::new(store)).deadline(PATIENCE).deny_cache(false).build()
        };
        let limiters = [(); 3].map(|()| limiter());
        until_counted(&limiters, &cluster.url()).await;
        let mut keys = HashMap::new();
        for key in (0..).map(|number| format!("user:{number}")) {
            keys.entry(limiters[0].locate(key.as_bytes()).unwrap().node).or_insert(key);
            if keys.len() == 3 {
                break;
            }
        }
        let mut before = Vec::new();
        for key in keys.values() {
            before.push(admitted(&limiters, key, Source::Store).await);
        }
        cluster.nodes().iter().for_each(|node| node.kill9());
        for (key, before) in keys.values().zip(before) {
            let in_outage = admitted(&limiters, key, Source::Local).await;
            assert_eq!((before, in_outage), (10, 12), "{brand}: the quota, and 3 × ⌈10 / 3⌉");
            assert!(in_outage < 10 + 3 && before + in_outage < 2 * 10 + 3, "{brand}");
        }
    }
}
