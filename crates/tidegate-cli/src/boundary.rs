//! `tidegate boundary`: a picture of a burst at the boundary of two windows, which shows why windows have to slide.
//!
//! The limit is 100 per minute. A client sends 100 requests in the last second of one minute and 100 more in the first
//! second of the next. All are decided by the real memory store with a manual clock, so the picture is measured.

use std::fmt::Write;
use std::sync::Arc;

use tidegate::{Algorithm, Check, Clock, Demand, Key, Limit, ManualClock, MemoryStore, Timestamp};

const SECOND_US: u64 = 1_000_000;
const MINUTE_US: u64 = 60 * SECOND_US;
/// Duration of a column of the picture.
const COLUMN_US: u64 = 50_000;
/// Number of columns.
const COLUMNS: usize = 60;
/// Time from the left edge of the picture to the end of the minute.
const BEFORE_EDGE_US: u64 = 1_500_000;
const REQUESTS_PER_SECOND: u64 = 100;

/// A request of the burst: its time, and whether it was admitted.
struct Arrival {
    at: Timestamp,
    admitted: bool,
}

/// Returns the picture as text of several lines, with a heading, a legend and a newline at the end.
///
/// For `fixed-window` and then for `sliding`, it has a row of admissions, a row of denials, and a line with the numbers
/// of both and the most admissions in any 60 seconds.
pub(crate) fn picture() -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "A limit of 100/min. 100 requests in the last second of one minute, 100 in the first of the next:\n"
    );
    for algorithm in [Algorithm::FixedWindow, Algorithm::Sliding] {
        let arrivals = burst(algorithm);
        let admitted = arrivals.iter().filter(|arrival| arrival.admitted).count();
        let refused = arrivals.len() - admitted;
        let _ = writeln!(out, "  {:<13} {}", algorithm.as_str(), row(&arrivals, true));
        let _ = writeln!(out, "  {:<13} {}", "", row(&arrivals, false));
        let _ = writeln!(
            out,
            "  {:<13} {admitted} admitted, {refused} refused; at most {} in any 60 s\n",
            "",
            most_in_a_window(&arrivals)
        );
    }
    let edge = (BEFORE_EDGE_US / COLUMN_US) as usize;
    let _ = writeln!(out, "  {:<13} {:>edge$}\n  {:<13} {:>edge$}", "", "│", "", "minute ends");
    let _ = writeln!(
        out,
        "  █ admitted, ░ refused; one column is 50 ms. A sliding window always covers the 60 s before now."
    );
    out
}

/// Decides the burst with this algorithm and returns its 200 requests, 10 ms apart.
///
/// Half of them come in the last second of a minute, the others in the first second of the next.
fn burst(algorithm: Algorithm) -> Vec<Arrival> {
    let edge = Timestamp::from_micros(30_000_000 * MINUTE_US);
    let clock = Arc::new(ManualClock::new(edge));
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limit = Limit::new(100, std::time::Duration::from_secs(60))
        .and_then(|limit| limit.with_algorithm(algorithm))
        .expect("100 a minute is in every range");
    let key = Key::new("client").expect("a short key");
    let step_us = SECOND_US / REQUESTS_PER_SECOND;
    let begin = edge.minus_micros(SECOND_US);
    let send = |index: u64| {
        clock.set(begin.plus_micros(index * step_us));
        let decision = store.check(&Check::one(&Demand::new(limit, key)));
        Arrival { at: clock.now(), admitted: decision.allowed() }
    };
    (0..2 * REQUESTS_PER_SECOND).map(send).collect()
}

/// Returns a row of the picture, a character per column of 50 ms.
///
/// Marks the columns in which a request was admitted (`█`) or, if `admitted` is `false`, denied (`░`). Others are `·`.
fn row(arrivals: &[Arrival], admitted: bool) -> String {
    let first = arrivals.first().map_or(0, |arrival| arrival.at.as_micros());
    let left_us = first + SECOND_US - BEFORE_EDGE_US;
    let mark = if admitted { '█' } else { '░' };
    let filled = |column: usize| {
        let from_us = left_us + column as u64 * COLUMN_US;
        let here = |arrival: &&Arrival| (from_us..from_us + COLUMN_US).contains(&arrival.at.as_micros());
        arrivals.iter().filter(here).any(|arrival| arrival.admitted == admitted)
    };
    (0..COLUMNS).map(|column| if filled(column) { mark } else { '·' }).collect()
}

/// Returns the largest number of admissions in any 60 seconds that end with an admission; 0 without admissions.
fn most_in_a_window(arrivals: &[Arrival]) -> usize {
    let admitted: Vec<u64> =
        arrivals.iter().filter(|arrival| arrival.admitted).map(|arrival| arrival.at.as_micros()).collect();
    let within = |end: &u64| admitted.iter().filter(|&&at| at <= *end && at + MINUTE_US > *end).count();
    admitted.iter().map(within).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_shows_two_hundred_under_a_fixed_window_and_a_hundred_under_a_sliding_one() {
        let picture = picture();
        assert!(picture.contains("200 admitted, 0 refused; at most 200 in any 60 s"), "{picture}");
        assert!(picture.contains("100 admitted, 100 refused; at most 100 in any 60 s"), "{picture}");
    }
}
