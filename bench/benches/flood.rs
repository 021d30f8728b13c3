//! A flood of ten million distinct keys on a store with a memory cap: latencies, memory, and the share of new keys that
//! are admitted.
//!
//! The keys arrive at 50,000 a second on the clock of the store, which is simulated. Latencies are measured in real time.
//! `TIDEGATE_BENCH_FLOOD_KEYS` sets the number of keys.
//!
//! `cargo bench -p tidegate-bench --bench flood`

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peak_alloc::PeakAlloc;
use tidegate_bench::measure::{print_table, setting};
use tidegate_core::{Check, Demand, Key, Limit, ManualClock, MemoryStore, Timestamp};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const CAP_BYTES: usize = 64 << 20;
const BETWEEN_KEYS: Duration = Duration::from_micros(20);
const TENTHS: usize = 10;

fn main() {
    let keys = setting("TIDEGATE_BENCH_FLOOD_KEYS", 10_000_000);
    for limit in ["10/min", "10/min token-bucket", "10/min sliding-counter"] {
        flood(limit.parse().expect("a limit"), keys);
    }
}

/// Runs the flood on one limit and prints a table with a row for each tenth of the keys.
fn flood(limit: Limit, keys: usize) {
    let mut latencies_ns: Vec<u32> = Vec::with_capacity(keys / TENTHS);
    let mut subject = String::with_capacity(64);
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();

    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
    let store = MemoryStore::builder().clock(clock.clone()).max_bytes(CAP_BYTES).build();
    let admits = |subject: &str, limit: Limit, cost: u32| {
        let demand = Demand::new(limit, Key::new(subject).expect("a valid key")).cost(cost);
        store.check(&Check::one(&demand)).allowed()
    };
    let daily: Limit = "1000/day".parse().expect("a limit");
    assert!(admits("at its limit", daily, 1_000));

    println!("\n{limit}: {keys} keys, cap {} MiB", CAP_BYTES >> 20);
    let mut rows = Vec::new();
    let mut slowest = Vec::new();
    for tenth in 0..TENTHS {
        latencies_ns.clear();
        let mut admitted = 0;
        for number in tenth * keys / TENTHS..(tenth + 1) * keys / TENTHS {
            clock.advance(BETWEEN_KEYS);
            subject.clear();
            write!(subject, "attacker {number}").expect("writing to a string");
            #[allow(clippy::disallowed_methods)] // a benchmark measures real time
            let start = Instant::now();
            admitted += usize::from(admits(&subject, limit, 1));
            latencies_ns.push(u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX));
        }
        latencies_ns.sort_unstable();
        let at = |share: f64| latencies_ns[((latencies_ns.len() - 1) as f64 * share) as usize];
        slowest.push(f64::from(at(0.999)));
        rows.push(vec![
            (tenth + 1).to_string(),
            format!("{} ns", at(0.5)),
            format!("{} ns", at(0.99)),
            format!("{} ns", at(0.999)),
            format!("{:.0} µs", f64::from(at(1.0)) / 1e3),
            format!("{:.1} %", admitted as f64 * 100.0 / latencies_ns.len() as f64),
            format!("{:.1} MiB", store.bytes_used() as f64 / 1048576.0),
        ]);
    }
    print_table(&["tenth", "p50", "p99", "p99.9", "max", "new keys admitted", "counters"], &rows);
    let peak = ALLOCATOR.peak_usage() - before;
    println!("peak heap use {:.1} MiB; {} overflow counters at the end", peak as f64 / 1048576.0, store.overflow_len());
    println!("p99.9 of the last tenth: {:.2} × that of the first", slowest[TENTHS - 1] / slowest[0]);
    println!("a key at its limit before the flood is still denied: {}", !admits("at its limit", daily, 1));
}
