//! The cluster decides as the oracle does, field for field, for checks of one subject.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::{Algorithm, Check, Decision, Demand, ManualClock, Redeemed, Redemption, Store, Timestamp};
use tidegate_redis::{RedisStore, acl_rules};
use tidegate_testkit::conformance::{
    Abilities, Implementation, Redeem, Redeeming, cases, long_traces, random_traces_of, traces_from_env,
};
use tidegate_testkit::server::{Brand, Cluster, Config, Server};
use tokio::runtime::{Builder, Runtime};

const SEED: u64 = 0x1a_5c_41_97;

/// A store on a cluster of its own, with a clock that the test sets, as a user with the least permissions.
struct OnCluster {
    cluster: Cluster,
    store: RedisStore,
    clock: Arc<ManualClock>,
    runtime: Runtime,
}

impl OnCluster {
    fn new(brand: Brand) -> OnCluster {
        let rules = acl_rules("tidegate", None, None).unwrap();
        let cluster = Cluster::with(&Config::new(brand).only_user("tidegate", "sesame", &rules));
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let clock = Arc::new(ManualClock::default());
        let _context = runtime.enter();
        let url = cluster.url().replace("://", "://tidegate:sesame@");
        let builder = RedisStore::builder(url).call_timeout(Duration::from_secs(5)).bans(true);
        let store = builder.clock_override(clock.clone()).build().unwrap();
        drop(_context);
        OnCluster { cluster, store, clock, runtime }
    }

    fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Deletes all keys.
    fn emptied(&self) -> &OnCluster {
        self.cluster.nodes()[..3].iter().for_each(|master: &Server| drop(master.command(&["FLUSHALL"])));
        self
    }
}

impl Implementation for &OnCluster {
    fn abilities(&self) -> Abilities {
        Abilities { several_subjects: false, ..Abilities::default() }
    }

    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        self.clock.set(now);
        self.wait(self.store.decide(&[*check])).expect("a decision").remove(0)
    }

    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        self.clock.set(now);
        self.wait(self.store.refund(check, decision)).expect("a refund");
    }

    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        self.clock.set(now);
        self.wait(self.store.reset(demand)).expect("a reset");
    }
}

impl Redeem for &OnCluster {
    fn redeem(&mut self, now: Timestamp, redemption: &Redemption<'_>) -> Redeemed {
        self.clock.set(now);
        self.wait(self.store.redeem(redemption)).expect("an outcome")
    }
}

fn decides_as_the_oracle(brand: Brand) {
    let redis = OnCluster::new(brand);
    assert!(cases::run_all(|| redis.emptied()).expect_clean() > 60);
    for algorithm in Algorithm::ALL {
        if let Err(failure) = random_traces_of(algorithm, traces_from_env(40), SEED, || redis.emptied()) {
            panic!("{algorithm:?}: {failure}");
        }
    }
    if let Err(failure) = long_traces(traces_from_env(400) / 100, SEED, || redis.emptied()) {
        panic!("{failure}");
    }
    assert!(cases::run_all(|| Redeeming::new(redis.emptied())).expect_clean() > 60);
    let stats = redis.store.stats();
    assert_eq!((stats.redirections, stats.panics), (0, 0), "{stats:?}");
}

#[test]
fn redis_cluster_decides_as_the_oracle() {
    decides_as_the_oracle(Brand::Redis);
}

#[test]
fn valkey_cluster_decides_as_the_oracle() {
    decides_as_the_oracle(Brand::Valkey);
}
