//! Timing, medians and tables.
//!
//! Other load on the machine disturbs every measurement. So each round runs all contestants, one after the other, and
//! ratios are computed within a round. The result is the median of the rounds.

use rustix::time::{ClockId, clock_gettime};

use crate::contestant::Contestant;
use crate::traffic::Request;

/// Returns the middle value, the upper one of two, or 0 if there are no values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Runs one thread for each element of `requests` and returns the nanoseconds per check, averaged over the threads.
///
/// Each thread makes `count` checks and starts over when its requests are used up. A single thread is measured in CPU
/// time, so that other processes on its core do not count. Several threads are measured in wall time, because the time
/// that they wait for each other is part of the result.
///
/// # Panics
/// Panics if a check does.
pub fn ns_per_check(contestant: &dyn Contestant, requests: &[Vec<Request>], count: usize) -> f64 {
    let clock = if requests.len() == 1 { ClockId::ThreadCPUTime } else { ClockId::Monotonic };
    let elapsed = |requests: &[Request]| {
        let start = seconds(clock);
        std::hint::black_box(contestant.run(requests, count));
        (seconds(clock) - start) * 1e9 / count as f64
    };
    let per_thread: Vec<f64> = std::thread::scope(|scope| {
        let threads: Vec<_> = requests.iter().map(|requests| scope.spawn(|| elapsed(requests))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no contestant panics")).collect()
    });
    per_thread.iter().sum::<f64>() / per_thread.len() as f64
}

/// Returns the time of the clock in seconds.
fn seconds(clock: ClockId) -> f64 {
    let now = clock_gettime(clock);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// Returns the number in an environment variable, or `default` if it is not set or is not a number.
pub fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Prints a table with aligned columns: the first to the left, the others to the right.
///
/// # Panics
/// Panics if a row has fewer cells than the heading.
pub fn print_table(heading: &[&str], rows: &[Vec<String>]) {
    let all = || std::iter::once(heading.iter().map(|cell| cell.to_string()).collect()).chain(rows.iter().cloned());
    let widths: Vec<usize> = (0..heading.len())
        .map(|column| all().map(|row: Vec<String>| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    for row in all() {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(
                |(column, (cell, &width))| {
                    if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                },
            )
            .collect();
        println!("{}", cells.join("  ").trim_end());
    }
}
