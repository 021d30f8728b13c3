//! Shared by all scenarios: the size of a run, its seed, and its report.
#![allow(dead_code)] // each scenario uses a part of this

use std::fmt::Display;

use tidegate_testkit::conformance::Random;
use tidegate_testkit::history::{Report, Violation};

/// Selects the long form when set to `long`.
const FORM_VARIABLE: &str = "TIDEGATE_CHAOS";
/// The seed of all random choices. Defaults to 1.
const SEED_VARIABLE: &str = "TIDEGATE_CHAOS_SEED";

/// Returns whether this is the long form (`make chaos`).
pub(crate) fn is_long() -> bool {
    std::env::var(FORM_VARIABLE).is_ok_and(|form| form == "long")
}

/// Returns `long` in the long form, else `short`.
pub(crate) fn scale<T>(short: T, long: T) -> T {
    if is_long() { long } else { short }
}

/// Returns a random generator for one scenario, and prints the seed that replays it.
pub(crate) fn random(scenario: &str) -> Random {
    let seed = std::env::var(SEED_VARIABLE).map_or(1, |text| text.parse().expect("TIDEGATE_CHAOS_SEED is a number"));
    println!("chaos: {scenario}: replay with {SEED_VARIABLE}={seed}");
    Random::new(seed)
}

/// Records one figure of the campaign's report.
pub(crate) fn record(scenario: &str, what: &str, figure: impl Display) {
    println!("chaos: {scenario}: {what}: {figure}");
}

/// Asserts that a history has no violation if the store made all its decisions, else that no bound was broken.
///
/// Charges of calls that timed out are not in a history, so its counts may differ. The bounds hold all the same.
pub(crate) fn assert_history(what: &str, report: &Report, is_all_by_store: bool) {
    if is_all_by_store {
        report.expect_clean();
    }
    let breaks_a_bound = |violation: &&Violation| {
        matches!(violation, Violation::Over { .. } | Violation::Witness { .. } | Violation::Local { .. })
    };
    let broken: Vec<&Violation> = report.violations.iter().filter(breaks_a_bound).collect();
    assert!(broken.is_empty(), "{what}: {broken:?}");
}
