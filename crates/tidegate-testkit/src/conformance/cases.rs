//! Named cases: behaviours that are easy to get wrong, with literal expectations.
//!
//! Each is written for every algorithm to which it applies. Expectations are worked out by hand from
//! `docs/algorithms.md`, never taken from an implementation.

mod change;
mod clock;
mod cost;
mod refund;
mod spacing;
mod together;
mod window;

use tidegate_core::Algorithm;

use super::{Case, CaseFailure, Implementation};

pub(crate) const MS: u64 = 1_000;
pub(crate) const SECOND: u64 = 1_000 * MS;
pub(crate) const MINUTE: u64 = 60 * SECOND;
pub(crate) const HOUR: u64 = 60 * MINUTE;
pub(crate) const DAY: u64 = 24 * HOUR;

/// Returns all named cases.
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

/// The result of running all cases on an implementation.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of cases that passed.
    pub passed: usize,
    /// The cases that failed.
    pub failures: Vec<CaseFailure>,
    /// Names of the cases that were skipped because the implementation lacks an ability.
    pub skipped: Vec<String>,
}

impl Report {
    /// Asserts that no case failed, and returns the number of cases that passed.
    ///
    /// # Panics
    /// If a case failed. The message lists all failures.
    pub fn expect_clean(&self) -> usize {
        let failures: Vec<String> = self.failures.iter().map(ToString::to_string).collect();
        assert!(failures.is_empty(), "{} cases failed:\n{}", failures.len(), failures.join("\n"));
        self.passed
    }
}

/// Runs each case on a new implementation created by `fresh`. Skips the cases that need more than the implementation's abilities.
pub fn run_all<S: Implementation>(mut fresh: impl FnMut() -> S) -> Report {
    let mut report = Report::default();
    for case in all() {
        let mut implementation = fresh();
        if !implementation.abilities().cover(case.needs()) {
            report.skipped.push(case.name().to_owned());
            continue;
        }
        match case.run(&mut implementation) {
            Ok(()) => report.passed += 1,
            Err(failure) => report.failures.push(failure),
        }
    }
    report
}

/// Creates one case per algorithm: calls `script` with a case named `NAME: ALGORITHM` and the algorithm.
fn per_algorithm(name: &str, script: impl Fn(Case, Algorithm) -> Case) -> Vec<Case> {
    let named = |algorithm: Algorithm| script(Case::new(format!("{name}: {}", algorithm.as_str())), algorithm);
    Algorithm::ALL.into_iter().map(named).collect()
}

/// Returns the text of a limit with this algorithm, such as `10/s token-bucket` for `10/s`.
fn text(limit: &str, algorithm: Algorithm) -> String {
    format!("{limit} {}", algorithm.as_str())
}
