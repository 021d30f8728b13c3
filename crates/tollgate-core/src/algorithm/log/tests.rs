//! What the conformance suite cannot see: how the log stores what it counts.

use super::*;
use crate::algorithm::State;
use crate::check::Demand;
use crate::key::Key;

fn admit(log: &mut State, limit: &Limit, now_us: u64, cost: u32) -> Line {
    let demand = Demand::new(*limit, Key::new("k").unwrap()).cost(cost);
    crate::algorithm::decide(Timestamp::from_micros(now_us), &[demand], std::slice::from_mut(log)).lines[0]
}

fn entries(state: &State) -> usize {
    match state {
        State::Log(log) => log.len(),
        _ => panic!("a log"),
    }
}

#[test]
fn two_entries_live_inline_and_an_emptied_ring_gives_its_memory_back() {
    let limit: Limit = "100/s".parse().unwrap();
    let mut state = State::unused(&limit);
    for now_us in [1, 2] {
        admit(&mut state, &limit, now_us, 1);
    }
    let heap = |state: &State| match state {
        State::Log(log) => log.heap_bytes(),
        _ => panic!("a log"),
    };
    assert_eq!(heap(&state), 0);
    admit(&mut state, &limit, 3, 1);
    assert_eq!(heap(&state), 3 * 8);
    admit(&mut state, &limit, 2_000_000, 1);
    assert_eq!((heap(&state), entries(&state)), (0, 1));
}

#[test]
fn a_ring_is_never_larger_than_the_quota() {
    let limit: Limit = "100/s".parse().unwrap();
    let mut state = State::unused(&limit);
    for now_us in 0..100 {
        assert!(admit(&mut state, &limit, now_us, 1).allowed);
    }
    let State::Log(log) = &state else { panic!("a log") };
    assert_eq!(log.heap_bytes(), 100 * 8);
    assert!(!admit(&mut state, &limit, 100, 1).allowed);
}

#[test]
fn above_a_thousand_the_entries_stay_within_a_thousand_and_one() {
    let limit: Limit = "1000000/s".parse().unwrap();
    let mut state = State::unused(&limit);
    for step in 0..30_000 {
        admit(&mut state, &limit, step * 137, 3);
        assert!(entries(&state) <= 1_001);
    }
    assert!(entries(&state) >= 999);
}

#[test]
fn without_memory_to_grow_the_newest_entry_is_stretched() {
    let limit: Limit = "10/s".parse().unwrap();
    let mut state = State::unused(&limit);
    for now_us in [10, 20, 30] {
        assert!(state.charge(&limit, Timestamp::from_micros(now_us), 1, false).allowed);
    }
    assert_eq!(entries(&state), 2);
    let line = state.look(&limit, Timestamp::from_micros(1_000_020), 1);
    assert_eq!(line.remaining, 8, "the one of 20 left with the one of 30");
    assert_eq!(line.reset_after, Wait::from_micros(10));
}
