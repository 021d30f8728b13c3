//! The same traces through the library and through each listener, on both stores. The decisions are the oracle's, field
//! by field, as far as a listener reports the field.

use tidegate::{Algorithm, Limit};
use tidegate_testkit::conformance::net_use::{self, RefundImplementation};
use tidegate_testkit::conformance::{
    Implementation, Operation, Random, cases, compare, random_traces, traces_from_env,
};
use tidegate_testkit::server::{Brand, Cluster};

use crate::fixture::{Fixture, Library};
use crate::http_subject::{HttpReceipts, OverHttp};
use crate::resp_subject::{OverResp, OverThrottle, RespReceipts};

/// One seed, so that all subjects get the same traces.
const SEED: u64 = 0xd0_02_5e_ed;

fn passes<S: Implementation>(traces: usize, cases_min: usize, mut fresh: impl FnMut() -> S) {
    let passed = cases::run_all(&mut fresh).expect_clean();
    assert!(passed >= cases_min, "only {passed} cases were possible");
    if let Err(failure) = random_traces(traces_from_env(traces), SEED, fresh) {
        panic!("{failure}");
    }
}

#[test]
fn the_library_decides_as_the_oracle_in_memory() {
    let fixture = Fixture::in_memory();
    passes(300, 80, || Library::new(&fixture));
}

#[test]
fn the_library_decides_as_the_oracle_on_redis() {
    let fixture = Fixture::on_redis();
    passes(60, 80, || Library::new(&fixture));
}

#[test]
fn the_http_listener_decides_as_the_oracle_in_memory() {
    let fixture = Fixture::in_memory();
    passes(300, 60, || OverHttp::new(&fixture));
}

#[test]
fn the_http_listener_decides_as_the_oracle_on_redis() {
    let fixture = Fixture::on_redis();
    passes(60, 60, || OverHttp::new(&fixture));
}

#[test]
fn the_resp_listener_decides_as_the_oracle_in_memory() {
    let fixture = Fixture::in_memory();
    passes(300, 50, || OverResp::new(&fixture));
}

#[test]
fn the_resp_listener_decides_as_the_oracle_on_redis() {
    let fixture = Fixture::on_redis();
    passes(60, 50, || OverResp::new(&fixture));
}

fn refunds_keep_the_limit<S: RefundImplementation>(sequences: usize, mut fresh: impl FnMut() -> S) {
    for algorithm in Algorithm::ALL {
        net_use::keeps_the_limit(algorithm, traces_from_env(sequences), SEED, &mut fresh)
            .unwrap_or_else(|violation| panic!("{algorithm:?}: {violation}"));
    }
}

#[test]
fn refunds_over_http_keep_the_limit_in_memory() {
    let fixture = Fixture::in_memory();
    refunds_keep_the_limit(20, || HttpReceipts::new(&fixture));
}

#[test]
fn refunds_over_http_keep_the_limit_on_redis() {
    let fixture = Fixture::on_redis();
    refunds_keep_the_limit(3, || HttpReceipts::new(&fixture));
}

#[test]
fn refunds_over_resp_keep_the_limit_in_memory() {
    let fixture = Fixture::in_memory();
    refunds_keep_the_limit(20, || RespReceipts::new(&fixture));
}

#[test]
fn refunds_over_resp_keep_the_limit_on_redis() {
    let fixture = Fixture::on_redis();
    refunds_keep_the_limit(3, || RespReceipts::new(&fixture));
}

/// By the library and by both listeners.
#[test]
fn refunds_keep_the_limit_on_a_cluster() {
    let cluster = Cluster::shared(Brand::Redis);
    let fixture = Fixture::on_cluster(&cluster);
    refunds_keep_the_limit(3, || Library::new(&fixture));
    refunds_keep_the_limit(1, || HttpReceipts::new(&fixture));
    refunds_keep_the_limit(1, || RespReceipts::new(&fixture));
}

fn can_be_throttled(limit: &Limit) -> bool {
    limit.algorithm() == Algorithm::TokenBucket && limit.window_us().is_multiple_of(1_000_000) && !limit.count_denied()
}

/// Runs the traces that `CL.THROTTLE` can express: one token bucket, with a window of whole seconds.
fn throttle_decides_as_the_oracle(fixture: &Fixture, traces: usize) {
    let mut random = Random::new(SEED);
    let mut ran = 0;
    for _ in 0..traces_from_env(traces) {
        let mut subject = OverThrottle::new(fixture);
        let Some(mut trace) = random.trace(Algorithm::TokenBucket).within(subject.abilities()) else { continue };
        trace.operations.retain(|operation| match operation {
            Operation::Change { limit, .. } => can_be_throttled(limit),
            _ => true,
        });
        if trace.slots.len() > 1 || !trace.slots.iter().all(|slot| can_be_throttled(&slot.limit)) {
            continue;
        }
        ran += 1;
        if let Err(difference) = compare(&trace, &mut subject) {
            panic!("{trace}{difference}");
        }
    }
    assert!(ran * 20 > traces, "only {ran} of {traces} traces were possible");
}

#[test]
fn cl_throttle_decides_as_the_oracle_in_memory() {
    throttle_decides_as_the_oracle(&Fixture::in_memory(), 2_000);
}

#[test]
fn cl_throttle_decides_as_the_oracle_on_redis() {
    throttle_decides_as_the_oracle(&Fixture::on_redis(), 300);
}
