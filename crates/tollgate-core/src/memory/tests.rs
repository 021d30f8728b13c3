//! What the conformance suite cannot see: memory, reclaiming, overflow.

use super::*;
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

/// Walks newcomers through every shard so that reclaiming steps pass over every slot.
fn churn(store: &MemoryStore, limit: Limit) {
    for n in 0..20_000 {
        check(store, limit, &format!("passer-by {n}"), 1);
    }
}

#[test]
fn a_key_at_its_limit_is_not_reclaimed_while_it_counts_even_if_it_was_only_looked_at() {
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

/// A rule's counter is its own whatever the limit: two versions of the rule may be in use at once.
#[test]
fn a_denial_under_a_quicker_limit_does_not_let_a_counter_go_early() {
    let cases = [
        // Two entries, a ring of which nothing leaves, and one whose oldest leave.
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

/// The other way round: what a quick limit wrote matters longer to a slower one.
#[test]
fn a_denial_under_a_slower_limit_makes_a_counter_live_as_long_as_it_says() {
    for (quick, slow) in [
        ("10/s", "10/h"),
        ("600/min token-bucket burst=10", "10/min token-bucket"),
        ("10/s token-bucket", "10/min token-bucket"),
        ("10/ms token-bucket", "10/400day token-bucket"),
    ] {
        let (store, clock) = store(1 << 24);
        let key = crate::Key::scoped("k", crate::Scope::rule("rule", "limit")).unwrap();
        let ask = |text: &str| store.check(&Check::one(&Demand::new(limit(text), key).cost(10)));
        assert!(ask(quick).allowed());
        let told = ask(slow);
        assert!(!told.allowed());
        let us = told.retry_after().as_micros().unwrap();
        clock.advance(Duration::from_micros(us - 1));
        churn(&store, limit("1/s"));
        assert!(!ask(slow).allowed(), "{slow} after {quick}");
        clock.advance(Duration::from_micros(1));
        assert!(ask(slow).allowed(), "{slow} after {quick}");
    }
}

/// The count of a fixed window is the previous one of the sliding counter that the rule changes to.
#[test]
fn a_fixed_window_is_remembered_by_the_sliding_counter_that_follows() {
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
fn expired_counters_are_reclaimed_and_memory_comes_back() {
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
fn logs_that_stay_are_moved_together_and_lose_nothing() {
    let (store, clock) = store(1 << 24);
    let (short, long) = (limit("20/s"), limit("20/h"));
    let staying = || (0..1_000).map(|n| format!("staying {n}"));
    for _ in 0..5 {
        clock.advance(Duration::from_micros(1));
        (0..30_000).for_each(|n| assert!(check(&store, short, &n.to_string(), 1).allowed()));
        staying().for_each(|subject| assert!(check(&store, long, &subject, 1).allowed()));
    }
    let rings_bytes = || -> usize { store.shards.iter().map(|shard| shard.0.lock().rings_bytes()).sum() };
    let full_bytes = rings_bytes();
    clock.advance(Duration::from_secs(10));
    let before: Vec<Decision> = staying().map(|subject| check(&store, long, &subject, 0)).collect();
    churn(&store, limit("10/min token-bucket"));
    clock.advance(Duration::from_secs(60));
    (0..40_000).for_each(|n| {
        assert!(check(&store, limit("10/ms token-bucket"), &format!("one of a few {}", n % 256), 0).allowed())
    });
    churn(&store, limit("1000/ms token-bucket"));
    for (subject, before) in staying().zip(before) {
        let (line, before) = (check(&store, long, &subject, 0).limits[0], before.limits[0]);
        assert_eq!((line.remaining, before.remaining), (15, 15));
        let left_us = |line: LimitStatus| line.next_after.as_micros().unwrap();
        assert_eq!(left_us(before) - left_us(line), 60_000_000);
    }
    assert!(rings_bytes() < full_bytes / 4, "{} of {full_bytes} bytes left", rings_bytes());
}

#[test]
fn at_the_cap_newcomers_share_and_nobody_is_forgotten() {
    for text in ["3/min", "3/min token-bucket", "3/min sliding-counter"] {
        let max_bytes = 1 << 20;
        let (store, clock) = store(max_bytes);
        let victim = limit(text);
        assert!(check(&store, victim, "victim", 3).allowed());
        let mut admitted = 0;
        for n in 0..200_000 {
            admitted += u32::from(check(&store, victim, &format!("attacker {n}"), 1).allowed());
            clock.advance(Duration::from_micros(10));
            assert!(store.bytes_used() <= max_bytes + 64 * 1024, "{text} at {n}: {}", store.bytes_used());
        }
        assert!(!check(&store, victim, "victim", 1).allowed(), "{text}");
        assert!(store.overflow_len() > 200, "{text}: {}", store.overflow_len());
        assert!((12_000..40_000).contains(&admitted), "{text}: {admitted} newcomers admitted");
    }
}

#[test]
fn a_key_that_was_sent_to_an_overflow_counter_stays_there_until_it_is_unused() {
    let (store, clock) = store(1 << 16);
    let (short, long) = (limit("1/s"), limit("4/h"));
    for n in 0..50_000 {
        check(&store, short, &format!("flood {n}"), 1);
    }
    let admitted = |store: &MemoryStore| (0..8).filter(|_| check(store, long, "newcomer", 1).allowed()).count();
    assert_eq!(admitted(&store), 4);
    clock.advance(Duration::from_secs(10));
    for n in 0..50_000 {
        check(&store, short, &format!("recurring {}", n % 10), 1);
    }
    assert_eq!(admitted(&store), 0, "there is room again, but the hour is not over");
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(admitted(&store), 4);
}

#[test]
fn a_key_that_parts_from_an_overflow_counter_takes_its_use_along() {
    for text in ["4/h", "4/h token-bucket", "4/h sliding-counter"] {
        let (store, clock) = store(1 << 16);
        for n in 0..50_000 {
            check(&store, limit("1/s"), &format!("flood {n}"), 1);
        }
        let admitted =
            |times: usize| (0..times).filter(|_| check(&store, limit(text), "newcomer", 1).allowed()).count();
        assert_eq!(admitted(3), 3, "{text}");
        clock.advance(Duration::from_secs(10));
        for n in 0..50_000 {
            check(&store, limit("1/s"), &format!("recurring {}", n % 10), 1);
        }
        assert_eq!(admitted(8), 1, "{text}: there is room again, but three of four were spent");
    }
}

/// How often each of a few newcomers passes by `limit` while others come by other limits, in a store that is full because of `flood`.
fn admitted_beside(flood: &[&str], limit_text: &str, others: &[&str]) -> Vec<usize> {
    let (store, clock) = store(1 << 20);
    for n in 0..40_000 {
        check(&store, limit(flood[n % flood.len()]), &format!("flood {n}"), 1);
    }
    assert!(store.overflow_len() > 0, "the store is full");
    let mut admitted = vec![0; 64];
    for _ in 0..12 {
        for (n, admitted) in admitted.iter_mut().enumerate() {
            *admitted += usize::from(check(&store, limit(limit_text), &format!("newcomer {n}"), 1).allowed());
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

/// Invents addresses of a few networks until the store is full, and longer.
fn flood(store: &MemoryStore, limit: Limit, count: u32, network: impl Fn(u32) -> String) {
    admitted_of(store, limit, count, network);
    assert!(store.overflow_len() > 0, "the store is full");
}

/// Addresses from everywhere else.
fn elsewhere(n: u32) -> String {
    let bits = n.wrapping_mul(2_654_435_761);
    match n % 2 {
        // 20.0.0.0 to 211.255.255.255
        0 => format!("ip:{}", std::net::Ipv4Addr::from_bits(((20 + bits % 192) << 24) | (bits >> 8))),
        _ => format!("ip:2a0{:x}:{:x}:{:x}::/64", bits % 16, (bits >> 4) & 0xFFFF, bits >> 20),
    }
}

#[test]
fn a_flood_from_few_networks_leaves_newcomers_from_elsewhere_their_counters() {
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
        flood(&store, limit(text), 2_500_000, network);
        let again = admitted_of(&store, limit(text), 1_000, |n| network(2_500_000 + n));
        let admitted = admitted_of(&store, limit(text), 1_000, elsewhere);
        assert!(again < 100, "{text}: {again} of 1,000 newcomers of the flooding networks");
        // A row of 16 is one network's, and each newcomer has the same chance to meet it.
        assert!(admitted > 750, "{text}: {admitted} of 1,000 newcomers from elsewhere");
        assert!(store.bytes_used() <= 1 << 26, "{} bytes", store.bytes_used());
    }
}

/// However many limits there are, a newcomer without any counter is refused, and nothing is stored for it.
#[test]
fn a_newcomer_for_whom_there_is_no_counter_at_all_is_refused() {
    let (store, clock) = store(1 << 16);
    let invented = |n: u64| Limit::new(5, Duration::from_micros(3_600_000_000 + n)).unwrap();
    (0..20_000).for_each(|n| drop(check(&store, invented(n), &n.to_string(), 1)));
    for algorithm in Algorithm::ALL {
        let unseen = limit("5/2h").with_algorithm(algorithm).unwrap();
        for limit in [unseen, unseen.with_count_denied(true)] {
            let (len, bytes) = (store.len(), store.bytes_used());
            let denied = check(&store, limit, "newcomer", 1);
            assert!(!denied.allowed(), "{limit}");
            assert_eq!(denied.limits[0].remaining, 0, "{limit}");
            let wait = denied.retry_after().as_micros().unwrap();
            assert!(wait > 0 && wait <= 2 * 7_200_000_000, "{limit}: {wait}");
            assert_eq!((store.len(), store.bytes_used()), (len, bytes), "{limit}");
        }
    }
    clock.advance(Duration::from_secs(2 * 3_600));
    churn(&store, limit("1/s"));
    assert!(check(&store, limit("5/2h"), "newcomer", 1).allowed(), "there is room again");
}

const MANY_LIMITS: [&str; 6] = ["1/10h", "1/11h", "1/12h", "1/13h", "1/14h", "1/15h"];

/// Five limits are more than have overflow counters of their own in a small store.
#[test]
fn newcomers_by_other_limits_do_not_give_back_what_one_has_spent() {
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
fn invented_limits_cannot_break_the_cap() {
    for max_bytes in [1 << 16, 1 << 20] {
        let (store, _clock) = store(max_bytes);
        for n in 0..300_000_u64 {
            // Alike at first, then of all windows and rates that there are.
            let window_us = if n < 200_000 { 60_000_000 + n } else { (1_000 << (n % 35)) + n };
            let invented = Limit::new(1 + n % 7, Duration::from_micros(window_us)).unwrap();
            let invented = invented.with_algorithm(Algorithm::ALL[n as usize / 50 % 6]).unwrap();
            check(&store, invented, &n.to_string(), 1);
        }
        assert!(store.bytes_used() <= max_bytes, "{} of {max_bytes}", store.bytes_used());
    }
}

#[test]
fn a_growing_log_stops_at_the_cap_and_errs_towards_refusal() {
    let max_bytes = 1 << 16;
    let (store, clock) = store(max_bytes);
    let big = limit("100000/h sliding-log");
    let mut admitted = 0;
    for _ in 0..120_000 {
        admitted += u32::from(check(&store, big, "one", 1).allowed());
        clock.advance(Duration::from_micros(1));
    }
    assert_eq!(admitted, 100_000);
    assert!(store.bytes_used() <= max_bytes + 64 * 1024);
    assert!(!check(&store, big, "one", 1).allowed());
}

#[test]
fn a_check_over_many_new_keys_at_the_cap_is_still_all_or_nothing() {
    let (store, _clock) = store(1 << 16);
    let names: Vec<String> = (0..32).map(|n| format!("part {n}")).collect();
    for round in 0..3_000 {
        let subjects: Vec<String> = names.iter().map(|name| format!("{round} {name}")).collect();
        let demands: Vec<Demand<'_>> =
            subjects.iter().map(|subject| Demand::new(limit("2/h"), crate::Key::new(subject).unwrap())).collect();
        let check = Check::new(&demands).unwrap();
        let before: Vec<LimitStatus> = demands.iter().map(|demand| store.inspect(demand)).collect();
        let decision = store.check(&check);
        let after: Vec<LimitStatus> = demands.iter().map(|demand| store.inspect(demand)).collect();
        assert_eq!(decision.limits.len(), 32);
        if !decision.allowed() {
            for (index, (before, after)) in before.iter().zip(&after).enumerate() {
                assert_eq!(before, after, "round {round}, {index}: {decision:?}");
            }
        }
    }
}

/// Making room for one newcomer may sweep the check's other counters away, or move them.
#[test]
fn a_check_that_makes_room_in_a_full_table_keeps_its_counters_apart() {
    let short = ["3/s", "3/900ms", "3/800ms", "3/700ms", "3/600ms", "3/500ms", "3/400ms"].map(limit);
    let filler = limit("20/h");
    // A ring each, since a log that lost its entries is noticed.
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
        let newcomer_first: Vec<Limit> = [limit("3/min")].into_iter().chain(short).collect();
        for subject in &subjects {
            check_all(subject, &newcomer_first);
        }
        let after: Vec<u32> = fillers.iter().map(used).collect();
        assert_eq!(before, after, "nobody else was touched");
    }
}

#[test]
fn a_reset_leaves_what_was_spent_on_a_shared_counter() {
    let (store, _clock) = store(1 << 16);
    for n in 0..50_000 {
        check(&store, limit("1/s"), &format!("flood {n}"), 1);
    }
    let demand = Demand::new(limit("4/h"), crate::Key::new("newcomer").unwrap()).cost(4);
    assert!(store.check(&Check::one(&demand)).allowed());
    store.reset(&demand);
    assert_eq!(store.inspect(&demand).remaining, 0);
}

#[test]
fn a_refund_of_what_was_forgotten_makes_no_counter() {
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

/// Whoever the counters of a check are shared with, and whichever of them are shared.
#[test]
fn no_window_holds_more_than_its_quota_in_a_full_store_where_checks_name_many_limits() {
    // Few go soon, so that a sweep finds one or none.
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
fn reset_forgets_and_inspect_does_not_touch() {
    let (store, _clock) = store(1 << 20);
    let demand = Demand::new(limit("2/min"), crate::Key::new("k").unwrap()).cost(2);
    assert!(store.check(&Check::one(&demand)).allowed());
    assert_eq!(store.inspect(&demand).remaining, 0);
    assert_eq!(store.len(), 1);
    store.reset(&demand);
    assert_eq!((store.inspect(&demand).remaining, store.len()), (2, 0));
}

/// Each refund of the newest entry takes the end of the log back; the rounding of its lifetime must not add up.
#[test]
fn a_log_lives_on_however_often_its_newest_entry_goes() {
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
    // The same by a clock that goes back again and again.
    for step in 0..300 {
        at(918_000_000 - step);
        let used = 2000 - store.check(&Check::one(&demand)).limits[0].remaining;
        assert_eq!(used, 6 + step as u32, "after {step} steps back");
    }
}
