//! Tests of how a log stores its entries, which the conformance suite does not observe.

use super::*;
use crate::algorithm::packed::tag;
use crate::algorithm::{State, decide_limits};
use crate::check::Demand;
use crate::key::Key;
use crate::limit::{Limit, WINDOW_US_MAX};
use crate::time::Timestamp;

fn charge(state: &mut State, limit: &Limit, now_us: u64, cost: u32, may_grow: bool) -> LimitStatus {
    let demand = Demand::new(*limit, Key::new("k").unwrap()).cost(cost);
    decide_limits(Timestamp::from_micros(now_us), &[demand], std::slice::from_mut(state), may_grow)[0]
}

fn admit(state: &mut State, limit: &Limit, now_us: u64, cost: u32) -> LimitStatus {
    charge(state, limit, now_us, cost, true)
}

fn entries(state: &State) -> usize {
    Log::unpacked(&state.packed).len()
}

/// Returns the bytes of the memory for entries.
fn heap_bytes(state: &State) -> usize {
    let rings = &state.beside.rings;
    Log::unpacked(&state.packed).bytes_to_grow(rings) - rings.moving_bytes()
}

#[test]
fn two_entries_are_inline_and_the_memory_of_an_emptied_ring_is_freed() {
    let limit: Limit = "100/s".parse().unwrap();
    let mut state = State::default();
    for now_us in [1, 2] {
        admit(&mut state, &limit, now_us, 1);
    }
    assert_eq!(heap_bytes(&state), 0);
    admit(&mut state, &limit, 3, 1);
    assert_eq!(heap_bytes(&state), 4 * 8);
    admit(&mut state, &limit, 2_000_000, 1);
    assert_eq!((heap_bytes(&state), entries(&state)), (0, 1));
    assert!(!state.beside.rings.is_sparse(0), "the ring is freed");
}

#[test]
fn ring_is_never_larger_than_the_quota() {
    let limit: Limit = "100/s".parse().unwrap();
    let mut state = State::default();
    for now_us in 0..100 {
        assert!(admit(&mut state, &limit, now_us, 1).allowed);
    }
    assert_eq!(heap_bytes(&state), 100 * 8);
    assert!(!admit(&mut state, &limit, 100, 1).allowed);
}

#[test]
fn log_of_a_quota_above_a_thousand_has_at_most_1001_entries() {
    let limit: Limit = "1000000/s".parse().unwrap();
    let mut state = State::default();
    for step in 0..30_000 {
        admit(&mut state, &limit, step * 137, 3);
        assert!(entries(&state) <= 1_001);
    }
    assert!(entries(&state) >= 999);
}

#[test]
fn log_that_may_not_grow_adds_to_its_newest_entry() {
    let limit: Limit = "10/s".parse().unwrap();
    let mut state = State::default();
    for now_us in [10, 20, 30] {
        assert!(charge(&mut state, &limit, now_us, 1, false).allowed);
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
        let (mut log, mut beside, mut packed) = (Log::default(), Beside::default(), Packed::default());
        for &entry in &entries[..narrow] {
            if !log.push_in_place(entry, &mut beside.rings) {
                log = log.pushed(entry, 1_001, &mut beside.rings);
            }
        }
        log.packed_into(&mut packed);
        let unpacked = Log::unpacked(&packed);
        assert_eq!(unpacked, log);
        let kept: Vec<Entry> = (0..narrow).map(|index| unpacked.get(index, &beside.rings)).collect();
        assert_eq!(kept, entries[..narrow]);
        let mut rings = Rings::default();
        beside.move_rings(&mut packed, &mut rings);
        let moved = Log::unpacked(&packed);
        assert_eq!((0..narrow).map(|index| moved.get(index, &rings)).collect::<Vec<_>>(), kept);
    }
}

#[test]
fn log_that_may_not_widen_its_ring_becomes_one_entry() {
    let limit: Limit = "10000000/s sliding".parse().unwrap();
    let mut state = State::default();
    for now_us in [1_000, 2_000, 3_000] {
        assert!(admit(&mut state, &limit, now_us, 1).allowed);
    }
    let status = charge(&mut state, &limit, 4_000, 600_000, false);
    assert_eq!((heap_bytes(&state), entries(&state)), (0, 1));
    assert_eq!((status.remaining, status.next_after), (10_000_000 - 600_003, Wait::from_micros(1_000_000)));
}

#[test]
fn memory_of_an_expired_burst_is_freed_although_the_key_is_still_in_use() {
    let limit: Limit = "1000/s".parse().unwrap();
    let mut state = State::default();
    for step in 0..900 {
        assert!(admit(&mut state, &limit, step, 1).allowed);
    }
    for step in 1..40 {
        assert!(admit(&mut state, &limit, step * 100_000, 1).allowed);
    }
    assert!(heap_bytes(&state) <= 16 * 8, "{} bytes for {} entries", heap_bytes(&state), entries(&state));
}

/// Compares the memory that a very long log leaves when it ends in each of the possible ways.
#[test]
fn memory_of_a_very_long_log_is_freed() {
    let limit: Limit = "5000/s sliding-log".parse().unwrap();
    for ends_at_us in [999_999, 1_004_998, 9_000_000] {
        let mut state = State::default();
        for now_us in 0..5_000 {
            assert!(admit(&mut state, &limit, now_us, 1).allowed);
        }
        assert_eq!(state.packed.tag(), tag::LOG_LONG);
        let before = state.beside.rings.heap_bytes();
        assert!((5_000 * 8..5_000 * 9).contains(&before), "{before} bytes");
        admit(&mut state, &limit, ends_at_us, 1);
        if ends_at_us == 999_999 {
            let mut rings = Rings::default();
            state.beside.move_rings(&mut state.packed, &mut rings);
            assert!(rings.heap_bytes() <= before);
            state.beside.rings = rings;
        }
        state.beside.free(state.packed);
        assert!(state.beside.rings.heap_bytes() < 400, "{} bytes", state.beside.rings.heap_bytes());
    }
}
