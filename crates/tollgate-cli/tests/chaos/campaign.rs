//! Shared by the scenarios: their size, the seed, and the report.
#![allow(dead_code)] // each scenario uses its part

use std::fmt::Display;

use tollgate_testkit::conformance::Random;

/// Selects the long form when set to `long`.
const FORM_VARIABLE: &str = "TOLLGATE_CHAOS";
/// The seed of all random choices. Defaults to 1.
const SEED_VARIABLE: &str = "TOLLGATE_CHAOS_SEED";

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
    let seed = std::env::var(SEED_VARIABLE).map_or(1, |text| text.parse().expect("TOLLGATE_CHAOS_SEED is a number"));
    println!("chaos: {scenario}: replay with {SEED_VARIABLE}={seed}");
    Random::new(seed)
}

/// Records one figure of the campaign's report.
pub(crate) fn record(scenario: &str, what: &str, figure: impl Display) {
    println!("chaos: {scenario}: {what}: {figure}");
}
