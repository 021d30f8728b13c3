//! Tests of how a log stores its entries, which the conformance suite does not observe.

use super::*;
use crate::algorithm::State;
use crate::check::Demand;
use crate::key::Key;
use crate::limit::WINDOW_US_MAX;

fn admit(log: &mut State, limit: &Limit, now_us: u64, cost: u32) -> LimitStatus {
    let demand = Demand::new(*limit, Key::new("k").unwrap()).cost(cost);
    crate::algorithm::decide(Timestamp::from_micros(now_us), &[demand], std::slice::from_mut(log)).limits[0]
}

fn entries(state: &State) -> usize {
    match state {
        State::Log(log) => log.len(),
        _ => panic!("a log"),
    }
}

#[test]
fn two_entries_are_inline_and_the_memory_of_an_emptied_ring_is_freed() {
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
    assert_eq!(heap(&state), 4 * 8);
    admit(&mut state, &limit, 2_000_000, 1);
    assert_eq!((heap(&state), entries(&state)), (0, 1));
}

#[test]
fn ring_is_never_larger_than_the_quota() {
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
fn log_of_a_quota_above_a_thousand_has_at_most_1001_entries() {
    let limit: Limit = "1000000/s".parse().unwrap();
    let mut state = State::unused(&limit);
    for step in 0..30_000 {
        admit(&mut state, &limit, step * 137, 3);
        assert!(entries(&state) <= 1_001);
    }
    assert!(entries(&state) >= 999);
}

#[test]
fn log_that_may_not_grow_adds_to_its_newest_entry() {
    let limit: Limit = "10/s".parse().unwrap();
    let mut state = State::unused(&limit);
    for now_us in [10, 20, 30] {
        assert!(state.charge(&limit, Timestamp::from_micros(now_us), 1, false).allowed);
    }
    assert_eq!(entries(&state), 2);
    let status = state.look(&limit, Timestamp::from_micros(1_000_020), 1);
    assert_eq!(status.remaining, 8, "the units of 20 and 30 share an entry at 30");
    assert_eq!(status.reset_after, Wait::from_micros(10));
}

#[test]
fn ring_keeps_times_up_to_the_longest_window_apart_and_millions_of_units() {
    let start = 1_700_000_000_000_000;
    let entries: Vec<Entry> =
        [(0, 1), (1, (1 << 19) - 1), (WINDOW_US_MAX - 2, 1 << 19), (WINDOW_US_MAX - 1, 9_000_000)]
            .map(|(after_us, units)| Entry { time_us: start + after_us, units })
            .into();
    for narrow in 1..=entries.len() {
        let mut log = Log::default();
        for &entry in &entries[..narrow] {
            log.push(entry, 1_001);
        }
        let kept: Vec<Entry> = (0..log.len()).map(|index| log.get(index)).collect();
        assert_eq!(kept, entries[..narrow]);
    }
}

#[test]
fn log_that_may_not_widen_its_ring_becomes_one_entry() {
    let limit: Limit = "10000000/s sliding".parse().unwrap();
    let mut state = State::unused(&limit);
    for now_us in [1_000, 2_000, 3_000] {
        assert!(state.charge(&limit, Timestamp::from_micros(now_us), 1, true).allowed);
    }
    let status = state.charge(&limit, Timestamp::from_micros(4_000), 600_000, false);
    let State::Log(log) = &state else { panic!("a log") };
    assert_eq!((log.heap_bytes(), log.len(), log.total()), (0, 1, 600_003));
    assert_eq!((status.remaining, status.next_after), (10_000_000 - 600_003, Wait::from_micros(1_000_000)));
}

#[test]
fn memory_of_an_expired_burst_is_freed_although_the_key_is_still_in_use() {
    let limit: Limit = "1000/s".parse().unwrap();
    let mut state = State::unused(&limit);
    for step in 0..900 {
        assert!(admit(&mut state, &limit, step, 1).allowed);
    }
    for step in 1..40 {
        assert!(admit(&mut state, &limit, step * 100_000, 1).allowed);
    }
    let State::Log(log) = &state else { panic!("a log") };
    assert!(log.heap_bytes() <= 16 * 8, "{} bytes for {} entries", log.heap_bytes(), log.len());
}
