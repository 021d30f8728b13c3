//! Rounds, medians, tables.
//!
//! Machines are noisy, and whoever builds something on the other core is noise too. So every round runs every
//! contestant once, in turn; a ratio is taken within a round and its median over the rounds.

use rustix::time::{ClockId, clock_gettime};

use crate::contestant::Contestant;
use crate::traffic::Request;

/// The middle value; 0 of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Nanoseconds that one thread takes for one check while every thread of `requests` makes `count` of its own.
///
/// A thread alone is measured by the processor time it was given, so that whoever else wants the core does not
/// count; several are measured by the wall clock, because waiting for each other is what they are measured for.
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

fn seconds(clock: ClockId) -> f64 {
    let now = clock_gettime(clock);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// A number from the environment, or what it is unless said.
pub fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Prints a table: a heading, and one line per row with its cells aligned.
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
