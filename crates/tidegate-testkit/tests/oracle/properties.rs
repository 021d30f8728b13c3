//! The guarantees of each algorithm on random traces, for the oracle and the memory store.

use tidegate_core::Algorithm;
use tidegate_testkit::conformance::accuracy::Population;
use tidegate_testkit::conformance::{InMemory, Redeeming, net_use, properties, traces_from_env};
use tidegate_testkit::oracle::Oracle;

const SEED: u64 = 0x9106;

fn guarantees_hold(algorithm: Algorithm) {
    let traces = traces_from_env(5_000);
    // The oracle is slow, so it runs a tenth of the traces. It shows that the properties follow from the definitions.
    properties::all(algorithm, traces.div_ceil(10), SEED, Oracle::new)
        .unwrap_or_else(|violation| panic!("oracle: {violation}"));
    properties::all(algorithm, traces, SEED, InMemory::new).unwrap_or_else(|violation| panic!("memory: {violation}"));
}

#[test]
fn sliding_keeps_its_guarantees() {
    guarantees_hold(Algorithm::Sliding);
}

#[test]
fn sliding_log_keeps_its_guarantees() {
    guarantees_hold(Algorithm::SlidingLog);
}

#[test]
fn sliding_counter_keeps_its_guarantees() {
    guarantees_hold(Algorithm::SlidingCounter);
}

#[test]
fn fixed_window_keeps_its_guarantees() {
    guarantees_hold(Algorithm::FixedWindow);
}

#[test]
fn token_bucket_keeps_its_guarantees() {
    guarantees_hold(Algorithm::TokenBucket);
}

#[test]
fn leaky_bucket_keeps_its_guarantees() {
    guarantees_hold(Algorithm::LeakyBucket);
}

/// With the oracle, which shows that the guarantee follows from the definitions, and with the memory store.
fn refunds_keep_the_limit(algorithm: Algorithm) {
    let count = traces_from_env(2_000);
    net_use::keeps_the_limit(algorithm, count.div_ceil(20), SEED, Oracle::new)
        .unwrap_or_else(|violation| panic!("oracle: {violation}"));
    net_use::keeps_the_limit(algorithm, count, SEED, InMemory::new)
        .unwrap_or_else(|violation| panic!("memory: {violation}"));
    net_use::keeps_the_limit(algorithm, count.div_ceil(10), SEED, || Redeeming::new(InMemory::new()))
        .unwrap_or_else(|violation| panic!("memory, by redemptions: {violation}"));
}

#[test]
fn refunds_keep_the_limit_of_sliding() {
    refunds_keep_the_limit(Algorithm::Sliding);
}

#[test]
fn refunds_keep_the_limit_of_sliding_log() {
    refunds_keep_the_limit(Algorithm::SlidingLog);
}

#[test]
fn refunds_keep_the_limit_of_sliding_counter() {
    refunds_keep_the_limit(Algorithm::SlidingCounter);
}

#[test]
fn refunds_keep_the_limit_of_fixed_window() {
    refunds_keep_the_limit(Algorithm::FixedWindow);
}

#[test]
fn refunds_keep_the_limit_of_token_bucket() {
    refunds_keep_the_limit(Algorithm::TokenBucket);
}

#[test]
fn refunds_keep_the_limit_of_leaky_bucket() {
    refunds_keep_the_limit(Algorithm::LeakyBucket);
}

/// Ten thousand clients; the busiest sends a fifth more than its quota, all others less. The `accuracy` example prints
/// the error for clients above their quota.
#[test]
fn sliding_counter_is_wrong_in_less_than_one_percent_if_most_clients_stay_below_their_quota() {
    let population = Population { clients: 10_000, busiest: 1.2, exponent: 0.8 };
    for limit in ["100/min sliding-counter", "1000/min sliding-counter"] {
        let verdicts = population.judge(&limit.parse().unwrap(), 60, 3, &mut InMemory::new());
        assert!(verdicts.wrong() < 0.01, "{limit}: {verdicts:?}");
        assert!(verdicts.over > 0 && verdicts.early > 0, "both kinds of errors occur: {verdicts:?}");
    }
}
