//! Memory per key of Tidegate, governor and throttlecrab, averaged over table sizes of up to 2 million keys.
//!
//! A hash table is between half and nearly full, so a single size is not representative. The results are means over
//! evenly spaced sizes. *Requested* are the bytes requested from the allocator. *Resident* is the growth of the process,
//! including the allocator's overhead and free memory that it keeps. Each contestant runs in a process of its own.
//!
//! `cargo bench -p tidegate-bench --bench bytes`

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use peak_alloc::PeakAlloc;
use tidegate_bench::contestant::{Contestant, GovernorNumber, GovernorText, LimitSpec, Throttlecrab, Tidegate};
use tidegate_bench::measure::print_table;
use tidegate_bench::traffic;
use tidegate_core::{Algorithm, Check, Demand, Key, Limit, ManualClock, MemoryStore, Timestamp};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const KEYS_MAX: usize = 2_000_000;
/// The number of keys with logs. Smaller than [`KEYS_MAX`], because each key has up to a hundred entries. The factor is a
/// power of two, so that tables that double in size do so at the same relative points.
const LOGS_MAX: usize = KEYS_MAX / 8;
/// The number of table sizes at which memory is measured.
const SIZES: usize = 40;
/// The window is so long that nothing expires during the measurement.
const LIMIT: LimitSpec = LimitSpec { quota: 100, window: Duration::from_secs(30 * 86_400) };

const CONTESTANTS: [&str; 6] = [
    "governor, String keys",
    "governor, u64 keys",
    "throttlecrab",
    "tidegate token-bucket",
    "tidegate sliding-counter",
    "tidegate sliding",
];
/// Numbers of entries per log.
const ENTRIES: [usize; 10] = [1, 2, 3, 4, 5, 7, 10, 20, 50, 100];

fn main() {
    if let Some(measured) = std::env::args().nth(1).filter(|argument| !argument.starts_with('-')) {
        let (requested, resident) = match measured.parse() {
            Ok(entries) => log_bytes_per_key(entries),
            Err(_) => bytes_per_key(&*contestant(&measured)),
        };
        println!("{requested} {resident}");
        return;
    }
    let rows = CONTESTANTS.map(|name| {
        let (requested, resident) = in_own_process(name);
        vec![name.to_owned(), format!("{requested:.0}"), format!("{resident:.0}")]
    });
    print_table(&["bytes per key, one admission each", "requested", "resident"], &rows);
    println!();
    let rows = ENTRIES.map(|entries| {
        let (requested, resident) = in_own_process(&entries.to_string());
        let beyond = |bytes: f64| format!("{:.1}", (bytes - 64.0).max(0.0) / entries as f64);
        vec![
            entries.to_string(),
            format!("{requested:.0}"),
            beyond(requested),
            format!("{resident:.0}"),
            beyond(resident),
        ]
    });
    print_table(
        &["sliding: live entries", "requested", "per entry beyond 64", "resident", "per entry beyond 64"],
        &rows,
    );
}

/// Returns the contestant with this name out of [`CONTESTANTS`].
fn contestant(name: &str) -> Box<dyn Contestant> {
    match name {
        "governor, String keys" => Box::new(GovernorText::new(LIMIT)),
        "governor, u64 keys" => Box::new(GovernorNumber::new(LIMIT)),
        "throttlecrab" => Box::new(Throttlecrab::new(LIMIT)),
        name => {
            let algorithm = name.strip_prefix("tidegate ").and_then(|name| name.parse::<Algorithm>().ok());
            Box::new(Tidegate::new(LIMIT, algorithm.expect("one of the contestants")))
        }
    }
}

/// Returns the requested and the resident bytes per key after one check of each key.
fn bytes_per_key(contestant: &dyn Contestant) -> (f64, f64) {
    mean_over_sizes(KEYS_MAX, |number| {
        contestant.check(&traffic::request(number));
    })
}

/// Returns the requested and the resident bytes per key of a sliding window with this many entries.
fn log_bytes_per_key(entries: usize) -> (f64, f64) {
    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
    let store = MemoryStore::builder().clock(clock.clone()).max_bytes(4 << 30).build();
    let limit = Limit::new(LIMIT.quota.into(), LIMIT.window).expect("a valid limit");
    mean_over_sizes(LOGS_MAX, |number| {
        let request = traffic::request(number);
        let demand = Demand::new(limit, Key::new(&request.text).expect("a valid key"));
        for _ in 0..entries {
            // Admissions within the same microsecond share an entry.
            clock.advance(Duration::from_micros(1));
            assert!(store.check(&Check::one(&demand)).allowed());
        }
    })
}

/// Calls `add` for each number below `keys_max` and returns the requested and the resident bytes per key.
///
/// Both are means over [`SIZES`] evenly spaced numbers of keys.
fn mean_over_sizes(keys_max: usize, mut add: impl FnMut(usize)) -> (f64, f64) {
    let start = (ALLOCATOR.current_usage(), resident_bytes());
    let (mut requested, mut resident) = (0.0, 0.0);
    for number in 0..keys_max {
        add(number);
        let (keys, step) = (number + 1, keys_max / SIZES);
        if keys % step == step / 2 {
            requested += ALLOCATOR.current_usage().saturating_sub(start.0) as f64 / keys as f64;
            resident += resident_bytes().saturating_sub(start.1) as f64 / keys as f64;
        }
    }
    (requested / SIZES as f64, resident / SIZES as f64)
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("/proc/self/statm (this benchmark needs Linux)");
    let pages: usize =
        statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("the number of resident pages");
    pages * rustix::param::page_size()
}

/// Measures one contestant, or logs with this many entries, in a process of its own.
fn in_own_process(measured: &str) -> (f64, f64) {
    let program = std::env::current_exe().expect("the path of this program");
    let run = Command::new(program).arg(measured).output().expect("this program as a child process");
    let text = String::from_utf8_lossy(&run.stdout);
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    match numbers[..] {
        [requested, resident] => (requested, resident),
        _ => panic!("{measured}: {}", String::from_utf8_lossy(&run.stderr)),
    }
}
