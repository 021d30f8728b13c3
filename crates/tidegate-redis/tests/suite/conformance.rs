//! The script decides as the oracle does, field for field, on both servers.

use tidegate_core::Algorithm;
use tidegate_testkit::conformance::{
    Redeeming, cases, long_traces, net_use, random_redemptions, random_traces_of, traces_from_env,
};
use tidegate_testkit::server::Brand;

use crate::on_server::OnServer;

const SEED: u64 = 0x1a_5c_41_97;

fn passes_every_named_case(brand: Brand) {
    let redis = OnServer::new(brand);
    assert!(cases::run_all(|| redis.verified().emptied()).expect_clean() > 80);
}

#[test]
fn redis_passes_every_named_case() {
    passes_every_named_case(Brand::Redis);
}

#[test]
fn valkey_passes_every_named_case() {
    passes_every_named_case(Brand::Valkey);
}

fn agrees_with_the_oracle(brand: Brand, algorithms: [Algorithm; 2]) {
    let redis = OnServer::new(brand);
    for algorithm in algorithms {
        if let Err(failure) = random_traces_of(algorithm, traces_from_env(400), SEED, || redis.verified().emptied()) {
            panic!("{algorithm:?}: {failure}");
        }
    }
}

#[test]
fn redis_agrees_with_the_oracle_on_logs() {
    agrees_with_the_oracle(Brand::Redis, [Algorithm::Sliding, Algorithm::SlidingLog]);
}

#[test]
fn redis_agrees_with_the_oracle_on_pairs() {
    agrees_with_the_oracle(Brand::Redis, [Algorithm::SlidingCounter, Algorithm::FixedWindow]);
}

#[test]
fn redis_agrees_with_the_oracle_on_buckets() {
    agrees_with_the_oracle(Brand::Redis, [Algorithm::TokenBucket, Algorithm::LeakyBucket]);
}

#[test]
fn valkey_agrees_with_the_oracle_on_logs() {
    agrees_with_the_oracle(Brand::Valkey, [Algorithm::Sliding, Algorithm::SlidingLog]);
}

#[test]
fn valkey_agrees_with_the_oracle_on_pairs() {
    agrees_with_the_oracle(Brand::Valkey, [Algorithm::SlidingCounter, Algorithm::FixedWindow]);
}

#[test]
fn valkey_agrees_with_the_oracle_on_buckets() {
    agrees_with_the_oracle(Brand::Valkey, [Algorithm::TokenBucket, Algorithm::LeakyBucket]);
}

/// Logs of hundreds and thousands of entries, which are chunked.
fn agrees_with_the_oracle_on_long_logs(brand: Brand) {
    let redis = OnServer::new(brand);
    if let Err(failure) = long_traces(traces_from_env(4_000) / 100, SEED, || redis.verified().emptied()) {
        panic!("{failure}");
    }
    assert!(redis.verified().chunks_seen() > 20, "{} chunks", redis.chunks_seen());
}

#[test]
fn redis_agrees_with_the_oracle_on_long_logs() {
    agrees_with_the_oracle_on_long_logs(Brand::Redis);
}

#[test]
fn valkey_agrees_with_the_oracle_on_long_logs() {
    agrees_with_the_oracle_on_long_logs(Brand::Valkey);
}

/// Refunds by redemption, and redemptions that charge.
fn redeems_as_the_oracle(brand: Brand) {
    let redis = OnServer::new(brand);
    let fresh = || Redeeming::new(redis.verified().emptied());
    assert!(cases::run_all(fresh).expect_clean() > 80);
    for algorithm in Algorithm::ALL {
        if let Err(failure) = random_traces_of(algorithm, traces_from_env(100), SEED, fresh) {
            panic!("{algorithm:?}: {failure}");
        }
    }
    if let Err(failure) = long_traces(traces_from_env(1_000) / 100, SEED, fresh) {
        panic!("{failure}");
    }
    random_redemptions(traces_from_env(100) as u64, SEED, || redis.verified().emptied()).unwrap();
}

#[test]
fn redis_redeems_as_the_oracle() {
    redeems_as_the_oracle(Brand::Redis);
}

#[test]
fn valkey_redeems_as_the_oracle() {
    redeems_as_the_oracle(Brand::Valkey);
}

/// What is charged and not refunded keeps the limit, whatever is refunded and in whichever order.
fn refunds_keep_the_limit(brand: Brand) {
    let redis = OnServer::new(brand);
    for algorithm in Algorithm::ALL {
        net_use::keeps_the_limit(algorithm, traces_from_env(20), SEED, || redis.verified().emptied())
            .unwrap_or_else(|violation| panic!("{violation}"));
    }
    for algorithm in [Algorithm::TokenBucket, Algorithm::LeakyBucket] {
        net_use::keeps_the_limit(algorithm, traces_from_env(5), SEED, || Redeeming::new(redis.emptied()))
            .unwrap_or_else(|violation| panic!("by redemptions: {violation}"));
    }
}

#[test]
fn refunds_on_redis_keep_the_limit() {
    refunds_keep_the_limit(Brand::Redis);
}

#[test]
fn refunds_on_valkey_keep_the_limit() {
    refunds_keep_the_limit(Brand::Valkey);
}

/// A short form: the script is the same as on a single server.
fn decides_as_the_oracle_through_sentinels(brand: Brand) {
    let redis = OnServer::through_sentinels(brand);
    assert!(cases::run_all(|| redis.emptied()).expect_clean() > 80);
    for algorithm in Algorithm::ALL {
        if let Err(failure) = random_traces_of(algorithm, traces_from_env(5), SEED, || redis.emptied()) {
            panic!("{algorithm:?}: {failure}");
        }
    }
    let stats = redis.store.stats();
    assert_eq!((stats.redirections, stats.failovers, stats.panics), (0, 0, 0), "{stats:?}");
}

#[test]
fn redis_decides_as_the_oracle_through_sentinels() {
    decides_as_the_oracle_through_sentinels(Brand::Redis);
}

#[test]
fn valkey_decides_as_the_oracle_through_sentinels() {
    decides_as_the_oracle_through_sentinels(Brand::Valkey);
}
