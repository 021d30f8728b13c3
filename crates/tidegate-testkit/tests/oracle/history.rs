//! The history checker finds planted violations and nothing else; then it verifies threads on the memory store.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use tidegate_core::{
    Check, Clock, Decision, Demand, Key, Limit, LimitStatus, MemoryStore, Source, SystemClock, Timestamp, Wait,
};
use tidegate_testkit::conformance::{Implementation, InMemory, Random};
use tidegate_testkit::history::{Bounds, History, Report, Violation};
use tidegate_testkit::oracle::Oracle;

/// A history of two counters, into which a violation can be planted.
struct Scene {
    limits: Vec<Limit>,
    records: Vec<Record>,
}

#[derive(Clone)]
struct Record {
    counters: Vec<usize>,
    sent_us: u64,
    received_us: u64,
    decision: Decision,
}

const NAMES: [&str; 2] = ["a", "b"];

impl Scene {
    /// Creates ten windows of checks of one counter or both, at twice the allowed rate.
    fn new(first: &str, second: &str) -> Scene {
        let limits = vec![first.parse().unwrap(), second.parse().unwrap()];
        let mut scene = Scene { limits, records: Vec::new() };
        let (mut store, mut random) = (InMemory::new(), Random::new(7));
        let limit: Limit = scene.limits[0];
        let mean_gap_us = limit.window_us() / (2 * u64::from(limit.quota())) + 1;
        let mut now = Timestamp::from_micros(1_700_000_000_000_000);
        let end = now.plus_micros(10 * limit.window_us());
        while now < end {
            now = now.plus_micros(random.below(2 * mean_gap_us));
            let counters = [vec![0], vec![1], vec![0, 1]][random.below(3) as usize].clone();
            scene.check(&mut store, now, &counters, 1 + random.below(3) as u32);
        }
        scene
    }

    /// Makes and records a check. Returns the index of its record.
    fn check(
        &mut self,
        implementation: &mut impl Implementation,
        now: Timestamp,
        counters: &[usize],
        cost: u32,
    ) -> usize {
        let demand = |&counter: &usize| Demand::new(self.limits[counter], Key::new(NAMES[counter]).unwrap()).cost(cost);
        let demands: Vec<Demand<'_>> = counters.iter().map(demand).collect();
        let decision = implementation.check(now, &Check::new(&demands).unwrap());
        // The callers' clock differs from the store's, and a call takes 40 µs.
        let sent_us = now.as_micros() - 1_000_000_000;
        self.records.push(Record { counters: counters.to_vec(), sent_us, received_us: sent_us + 40, decision });
        self.records.len() - 1
    }

    /// Returns the index of the first record after the middle for which `wanted` is true.
    fn find(&self, wanted: impl Fn(&Record) -> bool) -> usize {
        let middle = self.records.len() / 2;
        middle + self.records[middle..].iter().position(wanted).unwrap()
    }

    fn report(&self) -> Report {
        self.report_within(Bounds::default())
    }

    fn report_within(&self, bounds: Bounds) -> Report {
        let mut history = History::new(self.limits.clone());
        for record in &self.records {
            history.note(&record.counters, record.sent_us, record.received_us, &record.decision);
        }
        history.verify(bounds)
    }
}

fn is_lone_denial(record: &Record) -> bool {
    record.counters == [0] && !record.decision.allowed() && record.decision.limits[0].retry_after > Wait::ZERO
}

fn is_lone_admission(record: &Record) -> bool {
    record.counters == [0] && record.decision.allowed()
}

const EXACT: &str = "50/10ms";

#[test]
fn a_clean_history_passes() {
    for (first, second) in [(EXACT, "80/20ms sliding-log"), ("2000/100ms", "3000/200ms")] {
        let report = Scene::new(first, second).report();
        report.expect_clean();
        assert!(report.admitted > 200 && report.refused > 200, "{report}");
    }
}

#[test]
fn one_unit_too_many_is_found() {
    let mut scene = Scene::new(EXACT, EXACT);
    let denied = scene.find(is_lone_denial);
    let line = &mut scene.records[denied].decision.limits[0];
    *line = LimitStatus { allowed: true, retry_after: Wait::ZERO, ..*line };
    let report = scene.report();
    assert!(report.violations.iter().any(|v| matches!(v, Violation::Over { counter: 0, .. })), "{report}");
}

/// A slot moves to a master whose clock is 0.3 ms behind: the units of the first count although they are in its future.
#[test]
fn decisions_of_two_masters_have_no_known_order_within_the_skew_of_their_clocks() {
    let mut scene = Scene { limits: vec!["10/s".parse().unwrap(); 2], records: Vec::new() };
    let (mut store, behind) = (InMemory::new(), Timestamp::from_micros(1_700_000_000_000_000));
    scene.check(&mut store, behind.plus_micros(300), &[0], 2);
    let after = scene.check(&mut store, behind, &[0], 0);
    assert_eq!(scene.records[after].decision.limits[0].remaining, 8, "the store counts them");
    for skew_us in [0, 299] {
        let report = scene.report_within(Bounds { skew_us, ..Bounds::default() });
        let expected = Violation::Remaining { counter: 0, at_us: behind.as_micros(), reported: 8, least: 10, most: 10 };
        assert_eq!(report.violations, [expected], "{skew_us}");
    }
    scene.report_within(Bounds { skew_us: 300, ..Bounds::default() }).expect_clean();
}

#[test]
fn history_of_masters_whose_clocks_differ_is_clean_within_their_skew_and_violations_are_still_found() {
    let skewed = Bounds { skew_us: 300, ..Bounds::default() };
    for (first, second) in [(EXACT, "80/20ms sliding-log"), ("2000/100ms", "3000/200ms")] {
        let limits = vec![first.parse().unwrap(), second.parse().unwrap()];
        let mut scene = Scene { limits, records: Vec::new() };
        let (mut store, mut random) = (InMemory::new(), Random::new(11));
        let mut now = Timestamp::from_micros(1_700_000_000_000_000);
        for _ in 0..20_000 {
            now = now.plus_micros(random.below(100));
            // Either of two masters, the second of which is behind.
            let at = Timestamp::from_micros(now.as_micros() - 300 * random.below(2));
            let counters = [vec![0], vec![1], vec![0, 1]][random.below(3) as usize].clone();
            scene.check(&mut store, at, &counters, 1 + random.below(3) as u32);
        }
        scene.report_within(skewed).expect_clean();
        assert!(scene.report().violations_total > 0, "one clock does not explain it");
    }
    let mut scene = Scene::new("50/10s", "50/10s");
    scene.report_within(skewed).expect_clean();
    let denied = scene.find(is_lone_denial);
    let line = &mut scene.records[denied].decision.limits[0];
    *line = LimitStatus { allowed: true, retry_after: Wait::ZERO, ..*line };
    let report = scene.report_within(skewed);
    assert!(report.violations.iter().any(|v| matches!(v, Violation::Over { counter: 0, .. })), "{report}");
}

/// Each master decides its part of a check by its own clock.
#[test]
fn part_that_another_master_decided_later_has_its_own_time() {
    let mut scene = Scene { limits: vec!["10/s".parse().unwrap(); 2], records: Vec::new() };
    let (mut store, start) = (InMemory::new(), Timestamp::from_micros(1_700_000_000_000_000));
    scene.check(&mut store, start.plus_micros(200), &[1], 2);
    let both = scene.check(&mut store, start.plus_micros(300), &[0, 1], 1);
    // The first part was decided at the start, the second 300 µs later, when two units counted.
    let decision = &mut scene.records[both].decision;
    (decision.at, decision.limits[1].late_us) = (start, 300);
    scene.report().expect_clean();
}

#[test]
fn an_admission_one_microsecond_early_is_found() {
    let mut scene = Scene { limits: vec!["10/ms".parse().unwrap(); 2], records: Vec::new() };
    let (mut oracle, start) = (Oracle::new(), Timestamp::from_micros(1_700_000_000_000_000));
    scene.check(&mut oracle, start, &[0], 10);
    let on_time = scene.check(&mut oracle, start.plus_micros(1_000), &[0], 10);
    scene.report().expect_clean();
    scene.records[on_time].decision.at = start.plus_micros(999);
    let over = Violation::Over { counter: 0, at_us: start.as_micros() + 999, units: 20, quota: 10 };
    assert!(scene.report().violations.contains(&over), "{}", scene.report());
}

#[test]
fn an_unjustified_denial_is_found() {
    let mut scene = Scene::new(EXACT, EXACT);
    let admitted = scene.find(is_lone_admission);
    let decision = &mut scene.records[admitted].decision;
    let line = &mut decision.limits[0];
    *line = LimitStatus {
        allowed: false,
        retry_after: Wait::from_micros(1),
        remaining: line.remaining + line.cost,
        ..*line
    };
    let report = scene.report();
    assert!(report.violations.iter().any(|v| matches!(v, Violation::UnjustifiedDenial { counter: 0, .. })), "{report}");
}

/// The store charged the first key of a check that it denied. Every later answer for that key has one unit less.
#[test]
fn a_half_charged_denial_is_found() {
    let mut scene = Scene { limits: vec!["10/ms".parse().unwrap(), "1/ms".parse().unwrap()], records: Vec::new() };
    let (mut oracle, start) = (Oracle::new(), Timestamp::from_micros(1_700_000_000_000_000));
    scene.check(&mut oracle, start, &[0, 1], 1);
    let denied = scene.check(&mut oracle, start.plus_micros(10), &[0, 1], 1);
    assert!(!scene.records[denied].decision.allowed());
    scene.check(&mut oracle, start.plus_micros(20), &[0], 1);
    scene.report().expect_clean();
    scene.records[denied + 1].decision.limits[0].remaining -= 1;
    let wrong = Violation::Remaining { counter: 0, at_us: start.as_micros() + 20, reported: 7, least: 8, most: 8 };
    assert_eq!(scene.report().violations, [wrong]);
}

/// An admitted check that did not charge one of its keys leaves that key with one unit more.
#[test]
fn a_half_charged_admission_is_found() {
    let mut scene = Scene { limits: vec!["10/ms".parse().unwrap(); 2], records: Vec::new() };
    let (mut oracle, start) = (Oracle::new(), Timestamp::from_micros(1_700_000_000_000_000));
    scene.check(&mut oracle, start, &[0, 1], 1);
    scene.check(&mut oracle, start.plus_micros(10), &[1], 1);
    scene.records[1].decision.limits[0].remaining += 1;
    assert!(matches!(scene.report().violations[..], [Violation::Remaining { counter: 1, reported: 9, .. }]));
}

#[test]
fn a_wrong_retry_after_is_found_to_the_microsecond() {
    for off_by in [-1_i64, 1] {
        let mut scene = Scene::new(EXACT, EXACT);
        let denied = scene.find(is_lone_denial);
        let line = &mut scene.records[denied].decision.limits[0];
        let reported_us = line.retry_after.as_micros().unwrap();
        line.retry_after = Wait::from_micros(reported_us.saturating_add_signed(off_by));
        let report = scene.report();
        assert!(matches!(report.violations[..], [Violation::RetryAfter { counter: 0, .. }]), "{report}");
    }
}

/// A thousand units at 0 and a thousand at 99 share a tick of 100 µs, so the first may expire as late as the second.
#[test]
fn retry_after_may_be_late_by_less_than_a_tick() {
    let mut scene = Scene { limits: vec!["2000/100ms".parse().unwrap(); 2], records: Vec::new() };
    let (mut oracle, start) = (Oracle::new(), Timestamp::from_micros(1_700_000_000_000_000));
    scene.check(&mut oracle, start, &[0], 1_000);
    scene.check(&mut oracle, start.plus_micros(99), &[0], 1_000);
    let denied = scene.check(&mut oracle, start.plus_micros(50_000), &[0], 1);
    scene.report().expect_clean();
    for (reported_us, is_found) in [(49_999, true), (50_000, false), (50_099, false), (50_100, true)] {
        scene.records[denied].decision.limits[0].retry_after = Wait::from_micros(reported_us);
        assert_eq!(!scene.report().violations.is_empty(), is_found, "{reported_us}: {}", scene.report());
    }
}

/// The store's clock runs fast, so by its time there is no violation.
#[test]
fn excess_within_a_window_of_the_callers_clock_is_found_despite_the_stores_times() {
    let mut scene = Scene { limits: vec!["10/ms".parse().unwrap(); 2], records: Vec::new() };
    let (mut oracle, start) = (Oracle::new(), Timestamp::from_micros(1_700_000_000_000_000));
    scene.check(&mut oracle, start, &[0], 10);
    scene.check(&mut oracle, start.plus_micros(1_000), &[0], 1);
    scene.report().expect_clean();
    // The first was sent at 5,000, the last answered at 5,999: shorter than a window.
    (scene.records[0].sent_us, scene.records[0].received_us) = (5_000, 5_100);
    (scene.records[1].sent_us, scene.records[1].received_us) = (5_900, 5_999);
    let witness = Violation::Witness { counter: 0, from_us: 5_000, units: 11, bound: 10 };
    assert_eq!(scene.report().violations, [witness]);
    scene.records[1].received_us = 6_000;
    scene.report().expect_clean();
}

#[test]
fn local_decisions_are_checked_against_their_own_bound() {
    let mut scene = Scene { limits: vec!["10/ms".parse().unwrap(); 2], records: Vec::new() };
    let (mut oracle, start) = (Oracle::new(), Timestamp::from_micros(1_700_000_000_000_000));
    for n in 0..6 {
        let index = scene.check(&mut oracle, start.plus_micros(n), &[0], 1);
        scene.records[index].decision.source = Source::Local;
    }
    let within = |local| scene.report_within(Bounds { local, ..Bounds::default() });
    within(Some(6)).expect_clean();
    assert!(matches!(within(Some(5)).violations[..], [Violation::Local { units: 6, bound: 5, .. }, ..]));
    assert!(!within(None).violations.is_empty(), "no local decision is allowed by default");
    let together = scene.report_within(Bounds { local: Some(6), together: Some(5), ..Bounds::default() });
    assert!(matches!(together.violations[..], [Violation::Witness { units: 6, bound: 5, .. }]), "{together}");
}

/// An uncounted admission has no limit status to verify.
#[test]
fn uncounted_admission_is_found_unless_the_bounds_allow_it() {
    let mut scene = Scene::new(EXACT, EXACT);
    let denied = scene.find(is_lone_denial);
    let record = &mut scene.records[denied];
    record.decision = Decision { source: Source::None, limits: Default::default(), ..record.decision };
    let sent_us = record.sent_us;
    let report = scene.report();
    assert_eq!((&report.violations[..], report.uncounted), (&[Violation::Uncounted { sent_us }][..], 1), "{report}");
    scene.report_within(Bounds { uncounted: true, ..Bounds::default() }).expect_clean();
}

#[test]
#[should_panic(expected = "a limit status for each counter of [0, 1]")]
fn decision_without_a_status_for_one_counter_panics() {
    let mut scene = Scene::new(EXACT, EXACT);
    let both = scene.find(|record| record.counters == [0, 1]);
    let decision = &mut scene.records[both].decision;
    decision.limits = decision.limits[..1].iter().copied().collect();
    scene.report();
}

/// Creates a history with a cached denial at its end.
///
/// The first counter is used up. A check of both is denied by the store 400 µs later, and once more by the deny cache,
/// `after_us` after that.
fn with_cached_denial(after_us: u64) -> Scene {
    let mut scene = Scene { limits: vec!["10/ms".parse().unwrap(); 2], records: Vec::new() };
    let (mut oracle, start) = (Oracle::new(), Timestamp::from_micros(1_700_000_000_000_000));
    scene.check(&mut oracle, start, &[1], 3);
    scene.check(&mut oracle, start, &[0], 10);
    let denied = scene.check(&mut oracle, start.plus_micros(400), &[0, 1], 2);
    let mut cached = scene.records[denied].clone();
    cached.sent_us += after_us;
    cached.received_us = cached.sent_us + 1;
    cached.decision.source = Source::DenyCache;
    for line in &mut cached.decision.limits {
        let shorter = |wait: Wait| Wait::from_micros(wait.as_micros().unwrap().saturating_sub(after_us));
        (line.retry_after, line.next_after) = (shorter(line.retry_after), shorter(line.next_after));
    }
    scene.records.push(cached);
    scene
}

#[test]
fn cached_denial_needs_a_valid_decision_of_the_store() {
    for (after_us, is_found) in [(100, false), (600, false), (601, true)] {
        let report = with_cached_denial(after_us).report();
        let found = report.violations.iter().any(|v| matches!(v, Violation::InvalidCachedDenial { counter: 0, .. }));
        assert_eq!((found, report.violations.is_empty()), (is_found, !is_found), "{after_us} µs after: {report}");
    }
}

/// The call took 40 µs, so the denial ends 600 to 640 µs after its sending, of which 100 have passed.
#[test]
fn cached_wait_that_ends_at_another_time_is_found() {
    for (reported_us, is_found) in [(498, true), (499, false), (500, false), (540, false), (541, true)] {
        let mut scene = with_cached_denial(100);
        scene.records.last_mut().unwrap().decision.limits[0].retry_after = Wait::from_micros(reported_us);
        let report = scene.report();
        let found = report.violations.iter().any(|v| matches!(v, Violation::AlteredCachedAnswer { counter: 0, .. }));
        assert_eq!((found, report.violations.is_empty()), (is_found, !is_found), "{reported_us} µs: {report}");
    }
    let mut scene = with_cached_denial(100);
    scene.records.last_mut().unwrap().decision.limits[0].retry_after = Wait::NEVER;
    assert_eq!(scene.report().violations.len(), 1, "{}", scene.report());
}

/// The check was sent 500 µs before its decision. An answer of the store that took no time shows the offset of the
/// clocks.
#[test]
fn cached_wait_counted_from_the_sending_is_found() {
    for (reported_us, is_found) in [(5_500, true), (5_990, true), (6_000, false), (6_040, false), (6_100, true)] {
        let mut scene = Scene { limits: vec!["10/10ms".parse().unwrap(); 2], records: Vec::new() };
        let (mut oracle, start) = (Oracle::new(), Timestamp::from_micros(1_700_000_000_000_000));
        let first = scene.check(&mut oracle, start, &[0], 10);
        let denied = scene.check(&mut oracle, start.plus_micros(4_000), &[0], 2);
        scene.records[first].received_us = scene.records[first].sent_us;
        let decided_us = scene.records[first].sent_us + 4_000;
        (scene.records[denied].sent_us, scene.records[denied].received_us) = (decided_us - 500, decided_us + 40);
        let mut cached = scene.records[denied].clone();
        (cached.sent_us, cached.received_us) = (decided_us + 50, decided_us + 50);
        cached.decision.source = Source::DenyCache;
        let line = &mut cached.decision.limits[0];
        line.retry_after = Wait::from_micros(reported_us - 50);
        scene.records.push(cached);
        let report = scene.report();
        let found = report.violations.iter().any(|v| matches!(v, Violation::AlteredCachedAnswer { counter: 0, .. }));
        assert_eq!((found, report.violations.is_empty()), (is_found, !is_found), "{reported_us} µs: {report}");
    }
}

/// A denial of two units does not give the wait of three, which may be longer.
#[test]
fn cached_denial_of_another_cost_is_found() {
    let mut scene = with_cached_denial(100);
    scene.records.last_mut().unwrap().decision.limits[0].cost = 3;
    assert!(
        matches!(scene.report().violations[..], [Violation::InvalidCachedDenial { counter: 0, .. }]),
        "{}",
        scene.report()
    );
}

#[test]
fn cached_denial_must_repeat_remaining_and_next_after() {
    for counter in [0, 1] {
        let mut scene = with_cached_denial(100);
        scene.records.last_mut().unwrap().decision.limits[counter].remaining += 1;
        let report = scene.report();
        let [Violation::AlteredCachedAnswer { counter: found, .. }] = report.violations[..] else { panic!("{report}") };
        assert_eq!(found, counter);
    }
    // A limit that allowed the check repeats its `next_after`.
    let mut scene = with_cached_denial(100);
    scene.records.last_mut().unwrap().decision.limits[1].next_after = Wait::from_micros(900);
    assert!(matches!(scene.report().violations[..], [Violation::AlteredCachedAnswer { counter: 1, .. }]));
}

/// An admission that left nothing implies a denial of one unit until the next unit expires.
#[test]
fn cached_denial_may_follow_from_an_admission_that_left_nothing() {
    let mut scene = Scene { limits: vec!["10/ms".parse().unwrap(); 2], records: Vec::new() };
    let (mut oracle, start) = (Oracle::new(), Timestamp::from_micros(1_700_000_000_000_000));
    let last = scene.check(&mut oracle, start, &[0], 10);
    let mut cached = scene.records[last].clone();
    (cached.sent_us, cached.received_us) = (cached.sent_us + 100, cached.sent_us + 101);
    cached.decision.source = Source::DenyCache;
    let line = &mut cached.decision.limits[0];
    *line = LimitStatus { allowed: false, cost: 1, retry_after: Wait::from_micros(900), ..*line };
    scene.records.push(cached);
    scene.report().expect_clean();
    scene.records[last + 1].decision.limits[0].retry_after = Wait::from_micros(950);
    assert!(matches!(scene.report().violations[..], [Violation::AlteredCachedAnswer { counter: 0, .. }]));
}

#[test]
fn refunds_make_room_and_their_time_may_be_an_interval() {
    let limits = vec!["10/ms".parse().unwrap(); 2];
    let mut scene = Scene { limits: limits.clone(), records: Vec::new() };
    let (mut oracle, start) = (Oracle::new(), Timestamp::from_micros(1_700_000_000_000_000));
    scene.check(&mut oracle, start, &[0], 10);
    let demand = Demand::new(limits[0], Key::new("a").unwrap()).cost(10);
    oracle.refund(start.plus_micros(100), &Check::one(&demand), &scene.records[0].decision);
    scene.check(&mut oracle, start.plus_micros(100), &[0], 8);
    scene.check(&mut oracle, start.plus_micros(200), &[0], 3);
    let verify = |refund: Option<(u64, u64)>| {
        let mut history = History::new(limits.clone());
        for record in &scene.records {
            history.note(&record.counters, record.sent_us, record.received_us, &record.decision);
        }
        if let Some((earliest, latest)) = refund {
            let decision = &scene.records[0].decision;
            history.note_refund(&[0], decision, start.plus_micros(earliest), start.plus_micros(latest));
        }
        history.verify(Bounds::default())
    };
    verify(Some((100, 100))).expect_clean();
    verify(Some((50, 150))).expect_clean();
    assert!(matches!(verify(None).violations[..], [Violation::Over { units: 18, .. }, ..]));
    assert!(!verify(Some((101, 150))).violations.is_empty(), "too late for the second to be admitted");
}

/// Returns the number of decisions of all threads together: `TIDEGATE_DECISIONS`, or two million.
fn decisions() -> usize {
    std::env::var("TIDEGATE_DECISIONS").map_or(2_000_000, |text| text.parse().expect("TIDEGATE_DECISIONS is a number"))
}

const THREADS: usize = 8;
const ROUND: usize = 500_000;

/// Runs one round of eight threads on a new store. `counters` chooses the counters of each check.
fn round(limits: &[Limit], number: u64, counters: impl Fn(&mut Random) -> Vec<usize> + Sync) -> Report {
    let clock = Arc::new(SystemClock::new());
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let names: Vec<String> = (0..limits.len()).map(|counter| format!("client {counter}")).collect();
    let waiting = AtomicUsize::new(THREADS);
    let mut history = History::new(limits.iter().copied());
    let run = |thread: u64| {
        let (mut random, mut history) = (Random::new(number * 1_000 + thread), History::new(limits.iter().copied()));
        waiting.fetch_sub(1, Ordering::SeqCst);
        while waiting.load(Ordering::SeqCst) > 0 {
            thread::yield_now();
        }
        for _ in 0..ROUND / THREADS {
            let counters = counters(&mut random);
            let cost = if random.below(8) == 0 { 1 + random.below(5) as u32 } else { 1 };
            let demand = |&counter: &usize| Demand::new(limits[counter], Key::new(&names[counter]).unwrap()).cost(cost);
            let demands: Vec<Demand<'_>> = counters.iter().map(demand).collect();
            let check = Check::new(&demands).unwrap();
            let sent_us = clock.now().as_micros();
            let decision = store.check(&check);
            history.note(&counters, sent_us, clock.now().as_micros(), &decision);
        }
        history
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS as u64)
            .map(|thread| {
                scope.spawn({
                    let run = &run;
                    move || run(thread)
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| history.merge(thread.join().unwrap()));
    });
    history.verify(Bounds::default())
}

/// Makes a third of all decisions, in rounds. Each round must have both verdicts and no violation.
fn rounds(limits: &[Limit], counters: impl Fn(&mut Random) -> Vec<usize> + Sync) {
    for number in 0..decisions().div_ceil(3 * ROUND) {
        let report = round(limits, number as u64, &counters);
        report.expect_clean();
        assert_eq!(report.checks, ROUND as u64);
        assert!(report.admitted > 1_000 && report.refused > 1_000, "both verdicts occur: {report}");
    }
}

#[test]
fn eight_threads_on_one_key_exceed_no_quota_and_get_no_unjustified_denial() {
    rounds(&["100/ms".parse().unwrap()], |_| vec![0]);
}

#[test]
fn eight_threads_on_one_key_with_ticks_exceed_no_quota_and_wait_less_than_a_tick_too_long() {
    // Above the exact quota, and a rate that two busy cores still exceed.
    rounds(&["1500/10ms".parse().unwrap()], |_| vec![0]);
}

#[test]
fn eight_threads_on_pairs_of_ten_thousand_keys_are_all_or_nothing() {
    const CLIENTS: u64 = 10_000;
    let one = |counter: u64| if counter.is_multiple_of(2) { "50/10ms" } else { "20/5ms sliding-log" };
    let limits: Vec<Limit> = (0..CLIENTS).map(|counter| one(counter).parse().unwrap()).collect();
    // Approximately a Zipf distribution with exponent one: rank n has a weight of about 1/n.
    let zipf = |random: &mut Random| ((CLIENTS as f64).powf(random.unit()) as usize - 1).min(CLIENTS as usize - 1);
    rounds(&limits, |random| {
        let (first, second) = (zipf(random), zipf(random));
        if first == second { vec![first] } else { vec![first, second] }
    });
}
