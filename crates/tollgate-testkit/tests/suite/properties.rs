//! What each algorithm promises, on random traces: by the oracle, then by the memory store.

use tollgate_core::Algorithm;
use tollgate_testkit::conformance::accuracy::Population;
use tollgate_testkit::conformance::{InMemory, properties, traces_from_env};
use tollgate_testkit::oracle::Oracle;

const SEED: u64 = 0x9106;

fn hold(algorithm: Algorithm) {
    let traces = traces_from_env(5_000);
    // The oracle recounts everything, so it gets a tenth: it is here to show that the properties follow from the rules.
    properties::all(algorithm, traces.div_ceil(10), SEED, Oracle::new)
        .unwrap_or_else(|violation| panic!("oracle: {violation}"));
    properties::all(algorithm, traces, SEED, InMemory::new).unwrap_or_else(|violation| panic!("memory: {violation}"));
}

#[test]
fn sliding_keeps_its_promises() {
    hold(Algorithm::Sliding);
}

#[test]
fn sliding_log_keeps_its_promises() {
    hold(Algorithm::SlidingLog);
}

#[test]
fn sliding_counter_keeps_its_promises() {
    hold(Algorithm::SlidingCounter);
}

#[test]
fn fixed_window_keeps_its_promises() {
    hold(Algorithm::FixedWindow);
}

#[test]
fn token_bucket_keeps_its_promises() {
    hold(Algorithm::TokenBucket);
}

#[test]
fn leaky_bucket_keeps_its_promises() {
    hold(Algorithm::LeakyBucket);
}

/// Ten thousand clients as a site has them, the busiest a fifth above its quota, the second well below. (Who
/// sends more than the quota is another matter: see the figures of the `accuracy` example.)
#[test]
fn sliding_counter_is_wrong_below_one_percent_where_most_stay_below_their_quota() {
    let population = Population { clients: 10_000, busiest: 1.2, exponent: 0.8 };
    for limit in ["100/min sliding-counter", "1000/min sliding-counter"] {
        let verdicts = population.judge(&limit.parse().unwrap(), 60, 3, &mut InMemory::new());
        assert!(verdicts.wrong() < 0.01, "{limit}: {verdicts:?}");
        assert!(
            verdicts.over > 0 && verdicts.early > 0,
            "an approximation that is never wrong was not tried: {verdicts:?}"
        );
    }
}
