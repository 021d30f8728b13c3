//! The conformance suite on the oracle and on the memory store.

use tidegate_core::{Algorithm, Check, Decision, Demand, Timestamp};
use tidegate_testkit::conformance::{
    Implementation, InMemory, Random, Redeeming, Trace, cases, long_traces, random_redemptions, random_traces_of,
    traces_from_env,
};
use tidegate_testkit::oracle::Oracle;

const SEED: u64 = 0x70_11_9a_7e;

#[test]
fn oracle_passes_every_named_case() {
    assert!(cases::run_all(Oracle::new).expect_clean() > 80);
}

#[test]
fn memory_store_passes_every_named_case() {
    assert!(cases::run_all(InMemory::new).expect_clean() > 80);
}

fn memory_agrees_with_the_oracle(algorithm: Algorithm) {
    if let Err(failure) = random_traces_of(algorithm, traces_from_env(5_000), SEED, InMemory::new) {
        panic!("{failure}");
    }
}

#[test]
fn memory_agrees_with_the_oracle_on_sliding() {
    memory_agrees_with_the_oracle(Algorithm::Sliding);
}

#[test]
fn memory_agrees_with_the_oracle_on_sliding_log() {
    memory_agrees_with_the_oracle(Algorithm::SlidingLog);
}

#[test]
fn memory_agrees_with_the_oracle_on_sliding_counter() {
    memory_agrees_with_the_oracle(Algorithm::SlidingCounter);
}

#[test]
fn memory_agrees_with_the_oracle_on_fixed_window() {
    memory_agrees_with_the_oracle(Algorithm::FixedWindow);
}

#[test]
fn memory_agrees_with_the_oracle_on_token_bucket() {
    memory_agrees_with_the_oracle(Algorithm::TokenBucket);
}

#[test]
fn memory_agrees_with_the_oracle_on_leaky_bucket() {
    memory_agrees_with_the_oracle(Algorithm::LeakyBucket);
}

/// The store keeps logs of hundreds and thousands of entries in several rings.
#[test]
fn memory_agrees_with_the_oracle_on_long_logs() {
    if let Err(failure) = long_traces(traces_from_env(10_000) / 100, SEED, InMemory::new) {
        panic!("{failure}");
    }
}

#[test]
fn refund_by_redemption_passes_every_named_case() {
    assert!(cases::run_all(|| Redeeming::new(Oracle::new())).expect_clean() > 80);
    assert!(cases::run_all(|| Redeeming::new(InMemory::new())).expect_clean() > 80);
}

#[test]
fn refund_by_redemption_in_memory_agrees_with_the_oracle() {
    let fresh = || Redeeming::new(InMemory::new());
    for algorithm in Algorithm::ALL {
        if let Err(failure) = random_traces_of(algorithm, traces_from_env(1_000), SEED, fresh) {
            panic!("{failure}");
        }
    }
    if let Err(failure) = long_traces(traces_from_env(2_000) / 100, SEED, fresh) {
        panic!("{failure}");
    }
}

#[test]
fn redemption_in_memory_agrees_with_the_oracle() {
    random_redemptions(traces_from_env(1_000) as u64, SEED, InMemory::new).unwrap();
}

/// An oracle with a fault.
struct Faulty {
    oracle: Oracle,
    fault: fn(&mut Decision),
}

impl Implementation for Faulty {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        let mut decision = self.oracle.check(now, check);
        (self.fault)(&mut decision);
        decision
    }
    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        self.oracle.refund(now, check, decision);
    }
    fn reset(&mut self, _: Timestamp, demand: &Demand<'_>) {
        self.oracle.reset(demand);
    }
    fn fill(&mut self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        self.oracle.charge_at(demand, instants);
    }
}

/// The fault shows only when nothing remains, and needs two operations.
#[test]
fn fault_of_an_implementation_is_found_and_its_trace_is_shrunk() {
    let fault = |decision: &mut Decision| {
        for line in decision.limits.iter_mut().filter(|line| line.remaining == 0) {
            line.allowed = true;
        }
    };
    let faulty = || Faulty { oracle: Oracle::new(), fault };
    assert!(!cases::run_all(faulty).failures.is_empty());
    for algorithm in Algorithm::ALL {
        let failure = random_traces_of(algorithm, 100, SEED, faulty).unwrap_err();
        assert!(failure.trace.operations.len() <= 3, "{failure}");
    }
}

#[test]
fn any_bytes_decode_to_a_trace_and_equal_bytes_to_equal_traces() {
    let mut random = Random::new(SEED);
    for length in (0..3_000).step_by(7) {
        let bytes: Vec<u8> = (0..length).map(|_| random.next_u64() as u8).collect();
        let trace = Trace::from_bytes(&bytes);
        assert_eq!(trace, Trace::from_bytes(&bytes));
        assert!(trace.operations.len() <= 256);
        assert!(!trace.to_string().is_empty());
    }
}
