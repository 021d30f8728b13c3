//! The history checker on decisions without the store's time: it finds planted violations and nothing else.

use tidegate_core::{Check, Demand, Key, Limit, Source, Timestamp};
use tidegate_testkit::conformance::Random;
use tidegate_testkit::history::{Bounds, History, JournalEntry, Report, Reported, Violation};
use tidegate_testkit::oracle::Oracle;

const LIMIT: &str = "5/10ms";
const JOURNAL: &str = "100000/h sliding-log";
const START_US: u64 = 1_700_000_000_000_000;

/// The decisions of a run on one counter, as their callers reported them, and the journal of the counter.
struct Run {
    reported: Vec<Reported>,
    journal: Vec<JournalEntry>,
}

impl Run {
    /// Creates a run of a few hundred checks at twice the rate of this limit.
    fn new(limit: &str) -> Run {
        let mut run = Run { reported: Vec::new(), journal: Vec::new() };
        let (mut oracle, mut random, mut now_us) = (Oracle::new(), Random::new(11), START_US);
        for number in 0..400 {
            now_us += random.below(1_500);
            let (cost, source) = (1 + random.below(2) as u32, [Some(Source::Store), None][number % 2]);
            run.check(&mut oracle, limit, now_us, cost, source);
        }
        run
    }

    /// Makes a check at this time and records it. The call began 30 µs before and ended 50 µs after.
    fn check(&mut self, oracle: &mut Oracle, limit: &str, at_us: u64, cost: u32, source: Option<Source>) {
        let limits: [Limit; 2] = [limit.parse().unwrap(), JOURNAL.parse().unwrap()];
        let demands = limits.map(|limit| Demand::new(limit, Key::new("a").unwrap()).cost(cost));
        let decision = oracle.check(Timestamp::from_micros(at_us), &Check::new(&demands).unwrap());
        let [status, journal] = decision.limits[..] else { panic!("{decision:?}") };
        if decision.allowed() {
            self.journal.push(JournalEntry { at_us, units: cost.into() });
        }
        self.reported.push(Reported {
            sent_us: at_us - 30,
            received_us: at_us + 50,
            cost,
            allowed: decision.allowed(),
            remaining: status.remaining,
            retry_after_us: status.retry_after.as_micros().unwrap(),
            rounded_up_to_us: 1,
            journal_units: u64::from(journal.quota - journal.remaining),
            source,
        });
    }

    /// Returns the first report in the second half of the run for which `wanted` is true.
    fn find(&mut self, wanted: impl Fn(&Reported) -> bool) -> &mut Reported {
        let middle = self.reported.len() / 2;
        self.reported[middle..].iter_mut().find(|reported| wanted(reported)).unwrap()
    }

    fn remove(&mut self, reported: Reported) {
        self.reported.retain(|other| *other != reported);
    }

    fn report(&self) -> Report {
        let mut history = History::new([LIMIT.parse().unwrap()]);
        self.reported.iter().for_each(|reported| history.note_reported(0, *reported));
        history.note_journal(0, self.journal.clone());
        history.verify(Bounds::default())
    }

    /// Asserts that there is a violation for which `expected` is true, and returns the number of all violations.
    fn expect(&self, expected: impl Fn(&Violation) -> bool) -> u64 {
        let report = self.report();
        assert!(report.violations.iter().any(expected), "{report}");
        report.violations_total
    }
}

fn is_store_denial(reported: &Reported) -> bool {
    !reported.allowed && reported.source == Some(Source::Store)
}

#[test]
fn clean_run_passes() {
    let run = Run::new(LIMIT);
    let report = run.report();
    report.expect_clean();
    assert!(report.admitted > 100 && report.refused > 100, "{report}");
    assert_eq!(report.checks, 400);
}

#[test]
fn waits_that_were_rounded_up_pass() {
    let mut run = Run::new(LIMIT);
    for reported in &mut run.reported {
        (reported.retry_after_us, reported.rounded_up_to_us) = (reported.retry_after_us.next_multiple_of(1_000), 1_000);
    }
    run.report().expect_clean();
}

/// The caller and the store disagree about the order within a microsecond.
#[test]
fn decisions_of_one_microsecond_pass_in_any_order() {
    let (mut run, mut oracle) = (Run { reported: Vec::new(), journal: Vec::new() }, Oracle::new());
    for cost in [2, 2, 2, 1, 1] {
        run.check(&mut oracle, LIMIT, START_US, cost, Some(Source::Store));
    }
    run.check(&mut oracle, LIMIT, START_US + 10_000, 5, Some(Source::Store));
    run.reported.reverse();
    // A store may keep one entry per microsecond, or one per unit.
    let times = [START_US, START_US + 10_000];
    let merged = times.map(|at_us| JournalEntry { at_us, units: 5 }).to_vec();
    let split = times.iter().flat_map(|&at_us| [JournalEntry { at_us, units: 1 }; 5]).collect();
    for journal in [merged, split] {
        run.journal = journal;
        let report = run.report();
        report.expect_clean();
        assert_eq!((report.admitted, report.refused), (4, 2), "{report}");
    }
}

/// The script admits one unit more than the quota.
#[test]
fn store_that_is_off_by_one_is_found() {
    assert!(
        Run::new("6/10ms").expect(|violation| matches!(violation, Violation::Over { units: 6, quota: 5, .. })) > 50
    );
    assert!(Run::new("4/10ms").expect(|violation| matches!(violation, Violation::UnjustifiedDenial { .. })) > 20);
}

/// The script lets units expire early, by more than a call takes.
#[test]
fn window_that_is_too_short_is_found() {
    Run::new("5/9900us").expect(|violation| matches!(violation, Violation::InconsistentDenial { .. }));
}

/// A client that fails open reports an admission that charged nothing.
#[test]
fn admission_without_a_charge_is_found() {
    let mut run = Run::new(LIMIT);
    let denial = run.find(is_store_denial);
    (denial.allowed, denial.retry_after_us) = (true, 0);
    run.expect(|violation| matches!(violation, Violation::NotInJournal { .. }));
    let mut run = Run::new(LIMIT);
    let last = run.reported.iter_mut().rfind(|reported| reported.allowed).unwrap();
    last.journal_units += 1;
    run.expect(|violation| matches!(violation, Violation::NotInJournal { .. }));
}

/// A client whose key is another one charges units that no report of this counter has.
#[test]
fn charge_without_an_admission_is_found() {
    let mut run = Run::new(LIMIT);
    let lost = *run.find(|reported| reported.allowed);
    run.remove(lost);
    run.expect(|violation| matches!(violation, Violation::NotReported { .. }));
    let mut run = Run::new(LIMIT);
    let last = *run.reported.iter().rfind(|reported| reported.allowed).unwrap();
    run.remove(last);
    assert_eq!(run.expect(|violation| matches!(violation, Violation::NotReported { .. })), 1);
}

#[test]
fn admission_outside_of_its_call_is_found() {
    for (sent_by_us, received_by_us, is_found) in [(30, -50, false), (31, 0, true), (0, -51, true)] {
        let mut run = Run::new(LIMIT);
        let admission = run.find(|reported| reported.allowed);
        admission.sent_us += sent_by_us;
        admission.received_us = admission.received_us.saturating_add_signed(received_by_us);
        let found = run.report().violations.iter().any(|found| matches!(found, Violation::OutsideOfCall { .. }));
        assert_eq!(found, is_found, "{sent_by_us} {received_by_us}");
    }
}

/// Five units at one time: there is no room from then until the end of the window.
#[test]
fn denial_needs_an_instant_without_room_during_its_call() {
    let full_us = START_US + 10_000;
    let cases = [
        (START_US - 20, START_US - 1, true),
        (START_US - 20, START_US, false),
        (full_us - 1, full_us + 20, false),
        (full_us, full_us + 20, true),
    ];
    for source in [Some(Source::DenyCache), None, Some(Source::Store)] {
        for (sent_us, received_us, is_found) in cases {
            let (mut run, mut oracle) = (Run { reported: Vec::new(), journal: Vec::new() }, Oracle::new());
            run.check(&mut oracle, LIMIT, START_US, 5, Some(Source::Store));
            let mut denial = run.reported[0];
            (denial.allowed, denial.cost, denial.source) = (false, 1, source);
            (denial.sent_us, denial.received_us) = (sent_us, received_us);
            denial.retry_after_us = if sent_us < START_US { 10_000 } else { 1 };
            run.reported.push(denial);
            let report = run.report();
            let found = report.violations.iter().any(|found| matches!(found, Violation::UnjustifiedDenial { .. }));
            assert_eq!((found, report.violations.is_empty()), (is_found, !is_found), "{source:?} {sent_us}: {report}");
        }
    }
}

#[test]
fn denial_with_one_wrong_number_is_found() {
    let plant = |change: fn(&mut Reported)| {
        let mut run = Run::new(LIMIT);
        change(run.find(is_store_denial));
        let violations = run.expect(|violation| matches!(violation, Violation::InconsistentDenial { .. }));
        assert_eq!(violations, 1);
    };
    plant(|denial| denial.remaining += 1);
    plant(|denial| denial.journal_units += 1);
    plant(|denial| denial.journal_units -= 1);
    plant(|denial| denial.retry_after_us += 31);
    plant(|denial| denial.retry_after_us -= 51);
    plant(|denial| {
        (denial.retry_after_us, denial.rounded_up_to_us) = (denial.retry_after_us + 1_000 + 30, 1_000);
    });
}

#[test]
#[should_panic(expected = "a decision that the journal does not include")]
fn local_decision_cannot_be_reported() {
    let mut run = Run::new(LIMIT);
    run.reported[0].source = Some(Source::Local);
    run.report();
}

#[test]
#[should_panic(expected = "a limit that groups admissions is not exact")]
fn limit_with_ticks_cannot_be_reported() {
    let mut history = History::new(["2000/100ms".parse().unwrap()]);
    history.note_reported(0, Run::new(LIMIT).reported[0]);
}
