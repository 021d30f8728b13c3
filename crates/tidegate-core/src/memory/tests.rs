//! Tests of memory use, reclaiming and overflow counters, which the conformance suite does not observe.

use super::*;
use crate::algorithm::{State, decide};
use crate::limit::{Algorithm, Limit};
use crate::time::ManualClock;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn store(max_bytes: usize) -> (MemoryStore, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(START));
    (MemoryStore::builder().clock(clock.clone()).max_bytes(max_bytes).build(), clock)
}

fn limit(text: &str) -> Limit {
    text.parse().unwrap()
}

fn check(store: &MemoryStore, limit: Limit, subject: &str, cost: u32) -> Decision {
    let demand = Demand::new(limit, crate::Key::new(subject).unwrap()).cost(cost);
    store.check(&Check::one(&demand))
}

/// Checks 20,000 new keys, so that reclaiming passes over every slot of every shard.
fn churn(store: &MemoryStore, limit: Limit) {
    for n in 0..20_000 {
        check(store, limit, &format!("passing {n}"), 1);
    }
}

#[test]
fn counter_in_use_is_not_reclaimed_after_a_denial_or_a_peek() {
    for algorithm in Algorithm::ALL {
        let (store, clock) = store(1 << 24);
        let full = limit("10/min").with_algorithm(algorithm).unwrap();
        assert!(check(&store, full, "full", 10).allowed());
        clock.advance(Duration::from_millis(5_900));
        let before = check(&store, full, "full", 0);
        assert!(!check(&store, full, "full", 10).allowed());
        churn(&store, limit("1/s"));
        assert_eq!(check(&store, full, "full", 0), before, "{algorithm:?}");
    }
}

/// Two versions of a rule may be in use at once, and they share the rule's counter.
#[test]
fn denial_under_a_shorter_limit_does_not_shorten_the_life_of_a_counter() {
    let cases = [
        // Two inline entries, a ring of which no entry expires, and a ring whose oldest entries expire.
        ("10/h", "10/s", [10, 0, 0, 0], 300),
        ("10/h", "10/s", [2, 2, 3, 3], 300),
        ("20/h", "10/s", [10, 2, 4, 4], 900),
        ("10/min token-bucket", "600/min token-bucket burst=10", [10, 0, 0, 0], 300),
        ("10/min token-bucket", "10/s token-bucket", [10, 0, 0, 0], 300),
    ];
    for ((slow, quick, costs, first_ms), several) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let (store, clock) = store(1 << 24);
        let key = crate::Key::scoped("k", crate::Scope::rule("rule", "limit")).unwrap();
        let other = Demand::new(limit("100/h"), crate::Key::new("other").unwrap());
        let ask = |text: &str, cost: u32| {
            let demand = Demand::new(limit(text), key).cost(cost);
            let demands = [demand, other];
            store.check(&if several { Check::new(&demands).unwrap() } else { Check::one(&demand) })
        };
        for (cost, after_ms) in costs.into_iter().zip([first_ms, 200, 100, 1]) {
            assert!(ask(slow, cost).allowed());
            clock.advance(Duration::from_millis(after_ms));
        }
        assert!(!ask(quick, 10).allowed(), "{quick}");
        clock.advance(Duration::from_millis(2_500));
        let before = ask(slow, 0);
        churn(&store, limit("1/s"));
        assert!(before.limits[0].remaining < limit(slow).quota());
        assert_eq!(ask(slow, 0).limits[0], before.limits[0], "{slow} after {quick}: {costs:?}");
    }
}

/// Units charged under a limit with a short window count for longer under one with a long window.
#[test]
fn denial_under_a_longer_limit_extends_the_life_of_a_counter_to_its_retry_after() {
    for (quick, slow) in [
        ("10/s", "10/h"),
        // One unit at a time, so that the entries are in a ring.
        ("10/s sliding-log", "10/h sliding-log"),
        ("600/min token-bucket burst=10", "10/min token-bucket"),
        ("10/s token-bucket", "10/min token-bucket"),
        ("10/ms token-bucket", "10/400day token-bucket"),
    ] {
        let (store, clock) = store(1 << 24);
        let key = crate::Key::scoped("k", crate::Scope::rule("rule", "limit")).unwrap();
        let cost = if quick.contains("log") { 1 } else { 10 };
        let ask = |text: &str| store.check(&Check::one(&Demand::new(limit(text), key).cost(cost)));
        for _ in 0..10 / cost {
            clock.advance(Duration::from_micros(1));
            assert!(ask(quick).allowed());
        }
        let denied = ask(slow);
        assert!(!denied.allowed());
        let us = denied.retry_after().as_micros().unwrap();
        clock.advance(Duration::from_micros(us - 1));
        churn(&store, limit("1/s"));
        assert!(!ask(slow).allowed(), "{slow} after {quick}");
        clock.advance(Duration::from_micros(1));
        assert!(ask(slow).allowed(), "{slow} after {quick}");
    }
}

/// A denial drops the entries that have left the shorter window. The others still count under the longer one.
#[test]
fn denial_that_drops_entries_under_a_shorter_limit_keeps_the_others_for_a_longer_one() {
    for (slow, quick) in [("20/h", "8/s"), ("20/h sliding-log", "8/s sliding-log")] {
        let (store, clock) = store(1 << 24);
        let key = crate::Key::scoped("k", crate::Scope::rule("rule", "limit")).unwrap();
        let ask = |text: &str, cost| store.check(&Check::one(&Demand::new(limit(text), key).cost(cost)));
        for pause_us in [1, 2_000_000, 1, 1, 1, 1, 1, 1, 1] {
            clock.advance(Duration::from_micros(pause_us));
            assert!(ask(slow, 1).allowed());
        }
        assert!(!ask(quick, 1).allowed());
        clock.advance(Duration::from_secs(100));
        churn(&store, limit("1/s"));
        assert_eq!(ask(slow, 0).limits[0].remaining, 12, "{slow}");
    }
}

/// A rule changes from `fixed-window` to `sliding-counter`; both keep a count per aligned window.
#[test]
fn sliding_counter_counts_the_previous_fixed_window_of_its_rule() {
    let (store, clock) = store(1 << 24);
    let key = crate::Key::scoped("k", crate::Scope::rule("rule", "limit")).unwrap();
    let ask = |text: &str, cost| store.check(&Check::one(&Demand::new(limit(text), key).cost(cost)));
    clock.set(Timestamp::from_micros(START.as_micros() / 60_000_000 * 60_000_000 + 59_000_000));
    assert!(ask("10/min fixed-window", 10).allowed());
    clock.advance(Duration::from_secs(32));
    churn(&store, limit("1/s"));
    assert_eq!(ask("10/min sliding-counter", 0).limits[0].remaining, 5);
}

#[test]
fn expired_counters_are_reclaimed_and_their_memory_is_freed() {
    for text in ["5/s", "5/s token-bucket", "5/s sliding-counter"] {
        let (store, clock) = store(1 << 26);
        for n in 0..100_000 {
            for _ in 0..4 {
                check(&store, limit(text), &n.to_string(), 1);
                clock.advance(Duration::from_micros(1));
            }
        }
        let (len, bytes) = (store.len(), store.bytes_used());
        clock.advance(Duration::from_secs(10));
        for n in 0..600_000 {
            check(&store, limit(text), &format!("later {}", n % 10_000), 1);
        }
        assert!(store.len() <= 11_000, "{text}: {} of {len} left", store.len());
        assert!(store.bytes_used() < bytes / 2, "{text}: {} of {bytes} bytes left", store.bytes_used());
    }
}

#[test]
fn compacting_ring_memory_keeps_every_live_log() {
    let (store, clock) = store(1 << 24);
    let (short, long) = (limit("20/s"), limit("20/h"));
    let live = || (0..1_000).map(|n| format!("live {n}"));
    for _ in 0..5 {
        clock.advance(Duration::from_micros(1));
        (0..30_000).for_each(|n| assert!(check(&store, short, &n.to_string(), 1).allowed()));
        live().for_each(|subject| assert!(check(&store, long, &subject, 1).allowed()));
    }
    let rings_bytes = || -> usize { store.shards.iter().map(|shard| shard.0.lock().rings_bytes()).sum() };
    let full_bytes = rings_bytes();
    clock.advance(Duration::from_secs(10));
    let before: Vec<Decision> = live().map(|subject| check(&store, long, &subject, 0)).collect();
    churn(&store, limit("10/min token-bucket"));
    clock.advance(Duration::from_secs(60));
    (0..40_000).for_each(|n| {
        assert!(check(&store, limit("10/ms token-bucket"), &format!("recurring {}", n % 256), 0).allowed())
    });
    churn(&store, limit("1000/ms token-bucket"));
    for (subject, before) in live().zip(before) {
        let (line, before) = (check(&store, long, &subject, 0).limits[0], before.limits[0]);
        assert_eq!((line.remaining, before.remaining), (15, 15));
        let left_us = |line: LimitStatus| line.next_after.as_micros().unwrap();
        assert_eq!(left_us(before) - left_us(line), 60_000_000);
    }
    assert!(rings_bytes() < full_bytes / 4, "{} of {full_bytes} bytes left", rings_bytes());
}

#[test]
fn at_the_cap_new_keys_share_overflow_counters_and_full_keys_stay_full() {
    for text in ["3/min", "3/min token-bucket", "3/min sliding-counter"] {
        let max_bytes = 1 << 20;
        let (store, clock) = store(max_bytes);
        let victims: Vec<String> = (0..100).map(|n| format!("victim {n}")).collect();
        victims.iter().for_each(|victim| assert!(check(&store, limit(text), victim, 3).allowed()));
        let mut admitted = 0;
        for n in 0..200_000 {
            admitted += u32::from(check(&store, limit(text), &format!("attacker {n}"), 1).allowed());
            clock.advance(Duration::from_micros(10));
            assert!(store.bytes_used() <= max_bytes, "{text} at {n}: {}", store.bytes_used());
        }
        victims.iter().for_each(|victim| assert!(!check(&store, limit(text), victim, 1).allowed(), "{text}: {victim}"));
        assert!(store.overflow_len() > 200, "{text}: {}", store.overflow_len());
        assert!((12_000..40_000).contains(&admitted), "{text}: {admitted} attackers admitted");
    }
}

#[test]
fn key_stays_on_its_overflow_counter_until_its_use_has_expired() {
    let (store, clock) = store(1 << 16);
    let (short, long) = (limit("1/s"), limit("4/h"));
    for n in 0..50_000 {
        check(&store, short, &format!("flood {n}"), 1);
    }
    let admitted = |store: &MemoryStore| (0..8).filter(|_| check(store, long, "new key", 1).allowed()).count();
    assert_eq!(admitted(&store), 4);
    clock.advance(Duration::from_secs(10));
    for n in 0..50_000 {
        check(&store, short, &format!("recurring {}", n % 10), 1);
    }
    assert_eq!(admitted(&store), 0, "the table has room again, but the units are still in the window");
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(admitted(&store), 4);
}

#[test]
fn key_promoted_from_an_overflow_counter_keeps_its_use() {
    for text in ["4/h", "4/h token-bucket", "4/h sliding-counter"] {
        let (store, clock) = store(1 << 16);
        for n in 0..50_000 {
            check(&store, limit("1/s"), &format!("flood {n}"), 1);
        }
        let admitted = |times: usize| (0..times).filter(|_| check(&store, limit(text), "new key", 1).allowed()).count();
        assert_eq!(admitted(3), 3, "{text}");
        clock.advance(Duration::from_secs(10));
        for n in 0..50_000 {
            check(&store, limit("1/s"), &format!("recurring {}", n % 10), 1);
        }
        assert_eq!(admitted(8), 1, "{text}: three of the four units were spent on the overflow counter");
    }
}

/// Fills a store with keys of the `flood` limits, then checks 64 new keys twelve times each.
///
/// Between the rounds, keys of the `others` limits are checked and partly refunded. Returns how often each of the 64
/// keys was admitted.
fn admitted_beside(flood: &[&str], limit_text: &str, others: &[&str]) -> Vec<usize> {
    let (store, clock) = store(1 << 20);
    for n in 0..40_000 {
        check(&store, limit(flood[n % flood.len()]), &format!("flood {n}"), 1);
    }
    assert!(store.overflow_len() > 0, "the store is full");
    let mut admitted = vec![0; 64];
    for _ in 0..12 {
        for (n, admitted) in admitted.iter_mut().enumerate() {
            *admitted += usize::from(check(&store, limit(limit_text), &format!("new {n}"), 1).allowed());
        }
        for (other, n) in others.iter().flat_map(|other| (0..256).map(move |n| (other, n))) {
            let demand = Demand::new(limit(other), crate::Key::new("other").unwrap());
            let subject = format!("other {n}");
            let demand = Demand { key: crate::Key::new(&subject).unwrap(), ..demand };
            let check = Check::one(&demand);
            let decision = store.check(&check);
            if n % 2 == 0 {
                store.refund(&check, &decision);
            }
        }
        clock.advance(Duration::from_secs(2));
    }
    admitted
}

/// Checks `count` subjects, and returns how many were admitted.
fn admitted_of(store: &MemoryStore, limit: Limit, count: u32, subject: impl Fn(u32) -> String) -> u32 {
    (0..count).map(|n| u32::from(check(store, limit, &subject(n), 1).allowed())).sum()
}

/// Returns an address of one of many other networks.
fn elsewhere(n: u32) -> String {
    let bits = n.wrapping_mul(2_654_435_761);
    match n % 2 {
        // 20.0.0.0 to 211.255.255.255
        0 => format!("ip:{}", std::net::Ipv4Addr::from_bits(((20 + bits % 192) << 24) | (bits >> 8))),
        _ => format!("ip:2a0{:x}:{:x}:{:x}::/64", bits % 16, (bits >> 4) & 0xFFFF, bits >> 20),
    }
}

#[test]
fn flood_from_few_networks_leaves_counters_for_new_keys_of_other_networks() {
    type Invent = fn(u32) -> String;
    let floods: [(&str, Invent); 3] = [
        // Two /8 of IPv4, a /32 of IPv6, and fifty /48 of two /32.
        ("3/h", |n| {
            format!("ip:{}", std::net::Ipv4Addr::from_bits(((n % 2 + 1) << 24) | n.wrapping_mul(2_654_435_761) >> 8))
        }),
        ("3/h token-bucket", |n| format!("ip:2001:db8:{:x}:{:x}::/64", n >> 16, n & 0xFFFF)),
        ("3/h sliding-counter", |n| format!("2001:db{:x}:{:x}:{:x}::1", 8 + n % 2, n % 50, n / 50)),
    ];
    for (text, network) in floods {
        let (store, _clock) = store(1 << 26);
        admitted_of(&store, limit(text), 2_500_000, network);
        assert!(store.overflow_len() > 0, "the store is full");
        let again = admitted_of(&store, limit(text), 1_000, |n| network(2_500_000 + n));
        let admitted = admitted_of(&store, limit(text), 1_000, elsewhere);
        assert!(again < 100, "{text}: {again} of 1,000 new keys of the flooding networks");
        // A network has a row of 16 overflow counters, and each new key has the same chance to be assigned to it.
        assert!(admitted > 750, "{text}: {admitted} of 1,000 new keys of other networks");
        assert!(store.bytes_used() <= 1 << 26, "{} bytes", store.bytes_used());
    }
}

#[test]
fn new_key_is_refused_and_not_stored_when_no_counter_is_left() {
    let (store, clock) = store(1 << 16);
    let invented = |n: u64| Limit::new(5, Duration::from_micros(3_600_000_000 + n)).unwrap();
    (0..20_000).for_each(|n| drop(check(&store, invented(n), &n.to_string(), 1)));
    for algorithm in Algorithm::ALL {
        let unseen = limit("5/2h").with_algorithm(algorithm).unwrap();
        for limit in [unseen, unseen.with_count_denied(true)] {
            let (len, bytes) = (store.len(), store.bytes_used());
            let denied = check(&store, limit, "new key", 1);
            assert!(!denied.allowed(), "{limit}");
            assert_eq!(denied.limits[0].remaining, 0, "{limit}");
            // The wait of a counter whose whole quota was used now.
            let mut full = [State::default()];
            for cost in [limit.cost_max(), 1] {
                decide(START, &[Demand::new(limit, crate::Key::new("k").unwrap()).cost(cost)], &mut full);
            }
            assert_eq!(denied.retry_after(), full[0].look(&limit, START, 1).retry_after, "{limit}");
            assert_eq!((store.len(), store.bytes_used()), (len, bytes), "{limit}");
        }
    }
    clock.advance(Duration::from_secs(2 * 3_600));
    churn(&store, limit("1/s"));
    assert!(check(&store, limit("5/2h"), "new key", 1).allowed(), "the table has room again");
}

const MANY_LIMITS: [&str; 6] = ["1/10h", "1/11h", "1/12h", "1/13h", "1/14h", "1/15h"];

/// In a small store, only a few limits have overflow counters of their own.
#[test]
fn new_keys_of_other_limits_do_not_free_units_spent_on_a_shared_counter() {
    let penalty = limit("1/h").with_count_denied(true).to_string();
    for flood in [&MANY_LIMITS[..], &MANY_LIMITS[..1]] {
        for (limit_text, others) in [
            ("4/h", &["1/s", "9/50min", "1/65min", "1000/h", &penalty][..]),
            ("4/h sliding-counter", &["1/s fixed-window", "9/50min fixed-window", "1/65min sliding-counter"]),
            ("4/h token-bucket", &["4000/h token-bucket", "1000/s token-bucket", "12/h token-bucket burst=1"]),
            ("4/h leaky-bucket queue=3", &["4000/h leaky-bucket", "1000/s token-bucket", "12/h token-bucket burst=1"]),
        ] {
            let admitted = admitted_beside(flood, limit_text, others);
            assert!(admitted.iter().all(|times| *times <= 4), "{limit_text} in {flood:?}: {admitted:?}");
            assert!(admitted.iter().sum::<usize>() >= 16, "{limit_text} in {flood:?}: {admitted:?}");
        }
    }
}

#[test]
fn cap_holds_for_any_number_of_limits() {
    for max_bytes in [1 << 16, 1 << 20] {
        let (store, _clock) = store(max_bytes);
        for n in 0..300_000_u64 {
            // Similar windows first, then windows from a millisecond to months.
            let window_us = if n < 200_000 { 60_000_000 + n } else { (1_000 << (n % 35)) + n };
            let invented = Limit::new(1 + n % 7, Duration::from_micros(window_us)).unwrap();
            let invented = invented.with_algorithm(Algorithm::ALL[n as usize / 50 % 6]).unwrap();
            check(&store, invented, &n.to_string(), 1);
            assert!(store.bytes_used() <= max_bytes, "{} of {max_bytes} bytes at {n}", store.bytes_used());
        }
    }
}

/// At the cap, the newest entry takes the units of later admissions and moves to the time of the last.
#[test]
fn log_that_may_not_grow_frees_its_units_late_and_never_early() {
    const WINDOW: Duration = Duration::from_secs(3_600);
    let max_bytes = 1 << 16;
    let (store, clock) = store(max_bytes);
    let big = limit("100000/h sliding-log");
    // One unit a microsecond. The cap has room for a part of these entries.
    for n in 0..100_000 {
        assert!(check(&store, big, "one", 1).allowed(), "unit {n}");
        assert!(store.bytes_used() <= max_bytes, "{} bytes at {n}", store.bytes_used());
        clock.advance(Duration::from_micros(1));
    }
    assert!(!check(&store, big, "one", 1).allowed(), "the quota is used up");
    // In an exact log, n + 1 units have expired n microseconds after the first did.
    let remaining_at = |us: u64| {
        clock.set(START.plus_micros(WINDOW.as_micros() as u64 + us));
        check(&store, big, "one", 0).limits[0].remaining
    };
    assert_eq!([remaining_at(0), remaining_at(999)], [1, 1_000], "entries that fit are exact");
    let kept = remaining_at(99_998);
    assert!((1_000..50_000).contains(&kept), "{kept} units have an entry of their own");
    assert_eq!(remaining_at(50_000), kept, "the others count until the last of them expires");
    assert!(!check(&store, big, "one", kept + 1).allowed(), "although an exact log has room for 50,001");
    assert!(check(&store, big, "one", kept).allowed());
    assert_eq!(remaining_at(99_999), 100_000 - kept);
}

#[test]
fn check_of_many_new_keys_at_the_cap_is_all_or_nothing() {
    let (store, _clock) = store(1 << 16);
    let names: Vec<String> = (0..32).map(|n| format!("part {n}")).collect();
    let (mut admitted, mut denied) = (0, 0);
    for round in 0..3_000 {
        let subjects: Vec<String> = names.iter().map(|name| format!("{round} {name}")).collect();
        let demands: Vec<Demand<'_>> =
            subjects.iter().map(|subject| Demand::new(limit("2/h"), crate::Key::new(subject).unwrap())).collect();
        let check = Check::new(&demands).unwrap();
        let remaining = || -> Vec<u32> { demands.iter().map(|demand| store.inspect(demand).remaining).collect() };
        let before = remaining();
        let decision = store.check(&check);
        assert_eq!(decision.limits.len(), 32);
        let charged = u32::from(decision.allowed());
        let expected: Vec<u32> = before.iter().map(|remaining| remaining - charged).collect();
        assert_eq!(remaining(), expected, "round {round}: {decision:?}");
        *(if decision.allowed() { &mut admitted } else { &mut denied }) += 1;
    }
    assert!(admitted > 10 && denied > 10, "{admitted} admitted, {denied} denied");
}

/// Two new keys of a check may belong to one overflow counter.
#[test]
fn key_gets_no_more_than_its_quota_from_checks_of_several_new_keys_and_of_one() {
    let (store, clock) = store(1 << 16);
    (0..20_000).for_each(|n| drop(check(&store, limit("1/10h"), &format!("flood {n}"), 1)));
    assert!(store.overflow_len() > 0, "the store is full");
    let quota = limit("4/min");
    let (mut together, mut alone) = (0, 0);
    for round in 0..400 {
        clock.advance(Duration::from_secs(120));
        let [other, key] = ["other", "key"].map(|name| format!("{name} {round}"));
        let demand = |subject| Demand::new(quota, crate::Key::new(subject).unwrap());
        let demands = [demand(&other), demand(&key).cost(3)];
        let admitted = [store.check(&Check::new(&demands).unwrap()), check(&store, quota, &key, 3)];
        let [first, second] = admitted.map(|decision| u32::from(decision.allowed()));
        assert!(first + second <= 1, "round {round}: 6 of 4 units");
        (together, alone) = (together + first, alone + second);
    }
    assert!(together > 300 && together + alone > 350, "{together} together, {alone} alone");
}

/// Making room for one new counter may reclaim or move the check's other counters.
#[test]
fn check_that_sweeps_a_full_table_changes_no_other_counter() {
    let short = ["3/s", "3/900ms", "3/800ms", "3/700ms", "3/600ms", "3/500ms", "3/400ms"].map(limit);
    let filler = limit("20/h");
    // Four entries are a ring, so a log that lost its entries is noticed.
    let charge = |store: &MemoryStore, clock: &ManualClock, subject: &str| {
        (0..4).for_each(|_| {
            clock.advance(Duration::from_micros(1));
            check(store, filler, subject, 1);
        });
    };
    for _ in 0..50 {
        let (store, clock) = store(1 << 16);
        let fillers: Vec<String> = (0..2_000).map(|n| format!("filler {n}")).collect();
        let subjects: Vec<String> = (0..10).map(|n| format!("subject {n}")).collect();
        let check_all = |subject: &str, limits: &[Limit]| {
            let key = crate::Key::new(subject).unwrap();
            let demands: Vec<Demand<'_>> = limits.iter().map(|limit| Demand::new(*limit, key)).collect();
            store.check(&Check::new(&demands).unwrap())
        };
        for (n, filler) in fillers.iter().enumerate() {
            if n % 40 == 0 && n / 40 < subjects.len() {
                check_all(&subjects[n / 40], &short);
            }
            charge(&store, &clock, filler);
        }
        assert!(store.overflow_len() > 0, "the table is full");
        let used = |subject: &String| 20 - check(&store, filler, subject, 0).limits[0].remaining;
        let before: Vec<u32> = fillers.iter().map(used).collect();
        clock.advance(Duration::from_secs(5));
        let new_first: Vec<Limit> = [limit("3/min")].into_iter().chain(short).collect();
        for subject in &subjects {
            check_all(subject, &new_first);
        }
        let after: Vec<u32> = fillers.iter().map(used).collect();
        assert_eq!(before, after, "the use of each filler");
    }
}

#[test]
fn reset_keeps_units_spent_on_a_shared_counter() {
    let (store, _clock) = store(1 << 16);
    for n in 0..50_000 {
        check(&store, limit("1/s"), &format!("flood {n}"), 1);
    }
    let demand = Demand::new(limit("4/h"), crate::Key::new("new key").unwrap()).cost(4);
    assert!(store.check(&Check::one(&demand)).allowed());
    store.reset(&demand);
    assert_eq!(store.inspect(&demand).remaining, 0);
}

#[test]
fn refund_of_a_reset_counter_creates_no_counter() {
    for algorithm in Algorithm::ALL {
        let (store, _clock) = store(1 << 20);
        let demand = Demand::new(limit("5/min").with_algorithm(algorithm).unwrap(), crate::Key::new("k").unwrap());
        let check = Check::one(&demand);
        let decision = store.check(&check);
        store.reset(&demand);
        store.refund(&check, &decision);
        assert_eq!(store.len(), 0, "{algorithm:?}");
    }
}

/// Some counters of a check are its own, and others are shared with other subjects.
#[test]
fn no_window_exceeds_its_quota_in_a_full_store_with_multi_limit_checks() {
    // Few windows are short, so that a sweep finds one expired counter or none.
    let limits = ["3/s", "3/2s", "3/min", "3/h", "3/2h", "3/3h", "3/4h", "3/5h"].map(limit);
    let (store, clock) = store(1 << 16);
    let mut admitted: HashMap<(usize, usize), Vec<Timestamp>> = HashMap::new();
    let mut random = 7_u64;
    let mut next = move |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    let subjects: Vec<String> = (0..500).map(|n| format!("subject {n}")).collect();
    for _ in 0..60_000 {
        clock.advance(Duration::from_millis(next(30) as u64));
        let subject = next(subjects.len());
        let mut asked: Vec<usize> = (0..limits.len()).collect();
        asked.rotate_left(next(limits.len()));
        asked.truncate(1 + next(limits.len()));
        let key = crate::Key::new(&subjects[subject]).unwrap();
        let demands: Vec<Demand<'_>> = asked.iter().map(|&which| Demand::new(limits[which], key)).collect();
        let decision = store.check(&Check::new(&demands).unwrap());
        for &which in asked.iter().filter(|_| decision.allowed()) {
            let times = admitted.entry((subject, which)).or_default();
            times.retain(|time| time.as_micros() + limits[which].window_us() > decision.at.as_micros());
            times.push(decision.at);
            assert!(times.len() <= 3, "{} of {}", limits[which], subjects[subject]);
        }
    }
    assert!(store.overflow_len() > 0, "the table was full");
}

#[test]
fn reset_deletes_a_counter_and_inspect_changes_nothing() {
    let (store, _clock) = store(1 << 20);
    let demand = Demand::new(limit("2/min"), crate::Key::new("k").unwrap()).cost(2);
    assert!(store.check(&Check::one(&demand)).allowed());
    assert_eq!(store.inspect(&demand).remaining, 0);
    assert_eq!(store.len(), 1);
    store.reset(&demand);
    assert_eq!((store.inspect(&demand).remaining, store.len()), (2, 0));
}

/// Each refund of the newest entry moves the end of the log back. Rounding errors of its lifetime must not add up.
#[test]
fn log_keeps_its_entries_while_the_newest_are_refunded_or_the_clock_steps_back() {
    let clock = Arc::new(ManualClock::default());
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let demand = Demand::new("2000/h sliding-log".parse().unwrap(), Key::new("k").unwrap());
    let start_us = 1_760_000_000_000_000;
    let at = |us: u64| clock.set(Timestamp::from_micros(start_us + us));
    let charged: Vec<Decision> = (0..255)
        .map(|entry| {
            at(entry * 3_600_001);
            store.check(&Check::one(&demand))
        })
        .collect();
    for (refunded, decision) in charged.iter().rev().take(250).enumerate() {
        store.refund(&Check::one(&demand), decision);
        let used = 2000 - store.check(&Check::one(&demand.cost(0))).limits[0].remaining;
        assert_eq!(used, 254 - refunded as u32, "after {} refunds", refunded + 1);
    }
    // Each check sets the clock back further.
    for step in 0..300 {
        at(918_000_000 - step);
        let used = 2000 - store.check(&Check::one(&demand)).limits[0].remaining;
        assert_eq!(used, 6 + step as u32, "after {step} steps back");
    }
}

fn refund(store: &MemoryStore, limit: Limit, subject: &str, decision: &Decision) {
    let demand = Demand::new(limit, crate::Key::new(subject).unwrap()).cost(decision.limits[0].cost);
    store.refund(&Check::one(&demand), decision);
}

/// Makes a charge whose refund depends on an earlier refund: of 40 units, the first 20 are refunded at once.
fn charge_after_a_refund(store: &MemoryStore, limit: Limit, subject: &str) -> Decision {
    let first = check(store, limit, subject, 20);
    let second = check(store, limit, subject, 20);
    assert!(first.allowed() && second.allowed());
    refund(store, limit, subject, &first);
    second
}

#[test]
fn count_of_refunds_outlives_the_level_of_its_bucket_and_is_then_dropped() {
    let (store, clock) = store(1 << 24);
    let bucket = limit("20/s token-bucket burst=40");
    let second = charge_after_a_refund(&store, bucket, "client");
    // The bucket is empty after a second, but the charge seems to last for two.
    clock.advance(Duration::from_millis(1_500));
    churn(&store, limit("1/s"));
    let admitted = check(&store, bucket, "client", 40);
    assert!(admitted.allowed() && admitted.limits[0].refunded_before == 20, "{admitted:?}");
    refund(&store, bucket, "client", &second);
    assert!(!check(&store, bucket, "client", 1).allowed());
    clock.advance(Duration::from_secs(2));
    for _ in 0..4 {
        churn(&store, limit("1/s"));
    }
    assert!(store.shards.iter().all(|Padded(shard)| !shard.lock().counts_refunds()), "no shard has a count left");
    assert_eq!(check(&store, bucket, "client", 1).limits[0].refunded_before, 0);
}

#[test]
fn refund_of_a_bucket_gives_back_nothing_while_there_is_no_memory_to_count_it() {
    let (store, _clock) = store(1 << 24);
    let (bucket, window) = (limit("20/min token-bucket"), limit("20/min fixed-window"));
    let [counted, other, pair] =
        [(bucket, "counted"), (bucket, "other"), (window, "other")].map(|(limit, key)| check(&store, limit, key, 5));
    let more = check(&store, bucket, "counted", 5);
    refund(&store, bucket, "counted", &counted);
    store.budget.change(0, store.max_bytes());
    refund(&store, bucket, "counted", &more);
    refund(&store, bucket, "other", &other);
    refund(&store, window, "other", &pair);
    let remaining = |limit, key| check(&store, limit, key, 0).limits[0].remaining;
    assert_eq!((remaining(bucket, "counted"), remaining(bucket, "other"), remaining(window, "other")), (20, 15, 20));
    store.budget.change(store.max_bytes(), 0);
    refund(&store, bucket, "other", &other);
    assert_eq!(remaining(bucket, "other"), 20);
}

#[test]
fn key_promoted_from_an_overflow_counter_keeps_its_count_of_refunds() {
    let (store, clock) = store(1 << 16);
    let bucket = limit("20/s token-bucket burst=40");
    for n in 0..50_000 {
        check(&store, limit("1/s"), &format!("flood {n}"), 1);
    }
    let (first, second) = (check(&store, bucket, "new key", 20), check(&store, bucket, "new key", 20));
    assert!(first.allowed() && second.allowed() && store.overflow_len() > 0);
    // A full store has no memory for the count, unless some was freed.
    store.budget.change(store.max_bytes() / 2, 0);
    refund(&store, bucket, "new key", &first);
    store.budget.change(0, store.max_bytes() / 2);
    clock.advance(Duration::from_millis(1_500));
    for n in 0..50_000 {
        check(&store, limit("1/s"), &format!("recurring {}", n % 10), 1);
    }
    let admitted = check(&store, bucket, "new key", 40);
    assert!(admitted.allowed() && admitted.limits[0].refunded_before == 20, "{admitted:?}");
    refund(&store, bucket, "new key", &second);
    assert!(!check(&store, bucket, "new key", 1).allowed());
}
