//! The named cases: behaviours that somebody once got wrong, with the numbers written out.
//!
//! Each is written for every algorithm that it makes sense for. Expectations are worked out by hand
//! from `docs/algorithms.md`, never taken from an implementation.

mod change;
mod clock;
mod cost;
mod refund;
mod spacing;
mod together;
mod window;

use tollgate_core::Algorithm;

use super::{Case, CaseFailure, Subject};

pub(crate) const MS: u64 = 1_000;
pub(crate) const SECOND: u64 = 1_000 * MS;
pub(crate) const MINUTE: u64 = 60 * SECOND;
pub(crate) const HOUR: u64 = 60 * MINUTE;
pub(crate) const DAY: u64 = 24 * HOUR;

/// All of them.
pub fn all() -> Vec<Case> {
    let topics = [
        window::cases(),
        clock::cases(),
        cost::cases(),
        change::cases(),
        refund::cases(),
        together::cases(),
        spacing::cases(),
    ];
    topics.into_iter().flatten().collect()
}

/// What came of putting a subject through all cases.
#[derive(Debug, Default)]
pub struct Report {
    /// How many passed.
    pub passed: usize,
    /// What did not.
    pub failures: Vec<CaseFailure>,
    /// Names of those that ask for what the subject cannot do.
    pub beyond: Vec<String>,
}

impl Report {
    /// Panics with every failure, for use in a test. Says how many cases passed.
    pub fn expect_clean(&self) -> usize {
        let failures: Vec<String> = self.failures.iter().map(ToString::to_string).collect();
        assert!(failures.is_empty(), "{} cases failed:\n{}", failures.len(), failures.join("\n"));
        self.passed
    }
}

/// Puts a fresh subject through each case that its abilities cover.
pub fn run_all<S: Subject>(mut fresh: impl FnMut() -> S) -> Report {
    let mut report = Report::default();
    for case in all() {
        let mut subject = fresh();
        if !subject.abilities().cover(case.needs()) {
            report.beyond.push(case.name().to_owned());
            continue;
        }
        match case.run(&mut subject) {
            Ok(()) => report.passed += 1,
            Err(failure) => report.failures.push(failure),
        }
    }
    report
}

/// One case per algorithm, its name at the end.
fn per_algorithm(name: &str, script: impl Fn(Case, Algorithm) -> Case) -> Vec<Case> {
    let named = |algorithm: Algorithm| script(Case::new(format!("{name}: {}", algorithm.name())), algorithm);
    Algorithm::ALL.into_iter().map(named).collect()
}

fn text(limit: &str, algorithm: Algorithm) -> String {
    format!("{limit} {}", algorithm.name())
}
