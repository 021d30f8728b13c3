//! The time of one check in process memory: Tidegate, governor and throttlecrab in one run.
//!
//! `cargo bench -p tidegate-bench --bench memory [-- WORKLOAD]`
//!
//! `TIDEGATE_BENCH_ROUNDS` sets the number of rounds. `WORKLOAD` is part of the name of a workload, such as `Zipf`.

use std::time::Duration;

use tidegate_bench::contestant::{Contestant, GovernorNumber, GovernorText, LimitSpec, Throttlecrab, Tidegate};
use tidegate_bench::measure::{median, ns_per_check, print_table, setting};
use tidegate_bench::traffic::{self, KEYS, Request};
use tidegate_core::Algorithm;

const CHECKS: usize = 500_000;
const THREADS: usize = 2;
/// The contestant that the others are compared with.
const BASELINE: usize = 0;

struct Workload {
    name: &'static str,
    spec: LimitSpec,
    /// The requests of each thread. A measurement with one thread uses the first element.
    requests: [Vec<Request>; THREADS],
    /// Whether every key exists before the first round.
    known_keys: bool,
}

fn main() {
    let rounds = setting("TIDEGATE_BENCH_ROUNDS", 9);
    let per_minute = LimitSpec { quota: 100, window: Duration::from_secs(60) };
    // A window so long that no counter expires between two rounds: all checks find a million live counters.
    let per_hour = LimitSpec { quota: 100, window: Duration::from_secs(3_600) };
    let unreached = LimitSpec { quota: 1_000_000, window: Duration::from_millis(1) };
    let hot = || [traffic::hot(1_024), traffic::hot(1_024)];
    let workloads = [
        Workload { name: "hot, admitted", spec: unreached, requests: hot(), known_keys: false },
        Workload { name: "hot, denied", spec: per_minute, requests: hot(), known_keys: false },
        Workload {
            name: "uniform 1 M",
            spec: per_hour,
            requests: [traffic::uniform(CHECKS, 1), traffic::uniform(CHECKS, 2)],
            known_keys: true,
        },
        Workload {
            name: "Zipf 1 M",
            spec: per_hour,
            requests: [traffic::zipf(CHECKS, 3), traffic::zipf(CHECKS, 4)],
            known_keys: true,
        },
    ];
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str()));
    for workload in workloads.iter().filter(|workload| is_wanted(workload.name)) {
        let contestants = contestants(workload.spec);
        if workload.known_keys {
            let all_keys: Vec<Request> = (0..KEYS).map(traffic::request).collect();
            contestants.iter().for_each(|(_, contestant)| {
                contestant.run(&all_keys, KEYS);
            });
        }
        let LimitSpec { quota, window } = workload.spec;
        println!("\n{}: {quota} per {window:?}, median of {rounds} rounds", workload.name);
        print_comparison(&contestants, workload, rounds);
    }
}

fn contestants(spec: LimitSpec) -> Vec<(&'static str, Box<dyn Contestant>)> {
    vec![
        ("governor, String keys", Box::new(GovernorText::new(spec))),
        ("governor, u64 keys", Box::new(GovernorNumber::new(spec))),
        ("throttlecrab", Box::new(Throttlecrab::new(spec))),
        ("tidegate token-bucket", Box::new(Tidegate::new(spec, Algorithm::TokenBucket))),
        ("tidegate sliding", Box::new(Tidegate::new(spec, Algorithm::Sliding))),
        ("tidegate sliding-counter", Box::new(Tidegate::new(spec, Algorithm::SlidingCounter))),
    ]
}

/// Measures all contestants with one thread and with [`THREADS`], and prints a table.
fn print_comparison(contestants: &[(&'static str, Box<dyn Contestant>)], workload: &Workload, rounds: usize) {
    // samples[threads - 1][contestant][round]
    let mut samples = vec![vec![Vec::new(); contestants.len()]; THREADS];
    for _ in 0..rounds {
        for threads in 1..=THREADS {
            for (index, (_, contestant)) in contestants.iter().enumerate() {
                let ns = ns_per_check(&**contestant, &workload.requests[..threads], CHECKS);
                samples[threads - 1][index].push(ns);
            }
        }
    }
    let rows: Vec<Vec<String>> = contestants
        .iter()
        .enumerate()
        .map(|(index, (name, _))| {
            let mut row = vec![name.to_string()];
            for samples in &samples {
                let ratios = samples[BASELINE].iter().zip(&samples[index]).map(|(baseline, own)| baseline / own);
                row.push(format!("{:.0} ns", median(samples[index].clone())));
                row.push(format!("{:.2}×", median(ratios.collect())));
            }
            row
        })
        .collect();
    print_table(&["", "1 thread", "speed", "2 threads", "speed"], &rows);
}
