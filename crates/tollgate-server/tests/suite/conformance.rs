//! The same traces through the library and through each door, on both stores: the oracle's verdicts, field for field
//! as far as a door tells them.

use tollgate::{Algorithm, Limit};
use tollgate_testkit::conformance::{Operation, Random, Subject, cases, compare, random_traces, traces_from_env};

use crate::behind_doors::{BehindDoors, Library};
use crate::http_subject::OverHttp;
use crate::resp_subject::{OverResp, OverThrottle};

/// One seed for all, so that all see the same traces.
const SEED: u64 = 0xd0_02_5e_ed;

fn passes<S: Subject>(traces: usize, cases_min: usize, mut fresh: impl FnMut() -> S) {
    let passed = cases::run_all(&mut fresh).expect_clean();
    assert!(passed >= cases_min, "only {passed} cases could be asked");
    if let Err(failure) = random_traces(traces_from_env(traces), SEED, fresh) {
        panic!("{failure}");
    }
}

#[test]
fn the_library_decides_as_the_oracle_in_memory() {
    let behind = BehindDoors::in_memory();
    passes(300, 80, || Library::new(&behind));
}

#[test]
fn the_library_decides_as_the_oracle_on_redis() {
    let behind = BehindDoors::on_redis();
    passes(60, 80, || Library::new(&behind));
}

#[test]
fn the_http_door_decides_as_the_oracle_in_memory() {
    let behind = BehindDoors::in_memory();
    passes(300, 60, || OverHttp::new(&behind));
}

#[test]
fn the_http_door_decides_as_the_oracle_on_redis() {
    let behind = BehindDoors::on_redis();
    passes(60, 60, || OverHttp::new(&behind));
}

#[test]
fn the_resp_door_decides_as_the_oracle_in_memory() {
    let behind = BehindDoors::in_memory();
    passes(300, 50, || OverResp::new(&behind));
}

#[test]
fn the_resp_door_decides_as_the_oracle_on_redis() {
    let behind = BehindDoors::on_redis();
    passes(60, 50, || OverResp::new(&behind));
}

fn can_be_throttled(limit: &Limit) -> bool {
    limit.algorithm() == Algorithm::TokenBucket && limit.window_us().is_multiple_of(1_000_000) && !limit.count_denied()
}

/// The traces that `CL.THROTTLE` can be asked: one token bucket, its window in whole seconds.
fn throttle_decides_as_the_oracle(behind: &BehindDoors, traces: usize) {
    let mut random = Random::new(SEED);
    let mut asked = 0;
    for _ in 0..traces_from_env(traces) {
        let mut subject = OverThrottle::new(behind);
        let Some(mut trace) = random.trace(Algorithm::TokenBucket).within(subject.abilities()) else { continue };
        trace.operations.retain(|operation| match operation {
            Operation::Change { limit, .. } => can_be_throttled(limit),
            _ => true,
        });
        if trace.slots.len() > 1 || !trace.slots.iter().all(|slot| can_be_throttled(&slot.limit)) {
            continue;
        }
        asked += 1;
        if let Err(difference) = compare(&trace, &mut subject) {
            panic!("{trace}{difference}");
        }
    }
    assert!(asked * 20 > traces, "only {asked} of {traces} traces could be asked");
}

#[test]
fn cl_throttle_decides_as_the_oracle_in_memory() {
    throttle_decides_as_the_oracle(&BehindDoors::in_memory(), 2_000);
}

#[test]
fn cl_throttle_decides_as_the_oracle_on_redis() {
    throttle_decides_as_the_oracle(&BehindDoors::on_redis(), 300);
}
