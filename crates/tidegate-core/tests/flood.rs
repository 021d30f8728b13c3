//! A million invented keys against a small cap. By the allocator's own count, memory stays under the cap. A counter at
//! its limit is kept, and new keys are still admitted.
//!
//! The only test in its process, because it counts all bytes that the process allocates.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use peak_alloc::PeakAlloc;
use tidegate_core::{Check, Demand, Key, Limit, ManualClock, MemoryStore, Timestamp};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const KEYS: usize = 1_000_000;
const CAP_BYTES: usize = 4 << 20;
/// The fixed size of the shards, and what the test itself allocates.
const BESIDE_THE_CAP_BYTES: usize = 128 << 10;

fn admits(store: &MemoryStore, limit: Limit, subject: &str, cost: u32) -> bool {
    let demand = Demand::new(limit, Key::new(subject).expect("a short key")).cost(cost);
    store.check(&Check::one(&demand)).allowed()
}

#[test]
fn flood_of_keys_stays_under_the_cap_and_keeps_a_counter_at_its_limit() {
    for text in ["10/min", "10/min sliding-log", "10/min token-bucket", "10/min sliding-counter", "10/min fixed-window"]
    {
        let flooded: Limit = text.parse().unwrap();
        let at_limit: Limit = format!("1000/day {}", flooded.algorithm().as_str()).parse().unwrap();
        let before = ALLOCATOR.current_usage();
        ALLOCATOR.reset_peak_usage();
        let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_006_400_000_000)));
        let store = MemoryStore::builder().clock(clock.clone()).max_bytes(CAP_BYTES).build();

        assert!(admits(&store, at_limit, "at its limit", 1_000));
        let mut subject = String::new();
        let mut admitted_late = 0;
        for number in 0..KEYS {
            subject.clear();
            write!(subject, "attacker {number}").unwrap();
            // Three of four keys send several requests, so that logs outgrow their slots too.
            let times = if number % 4 == 0 { 1 } else { 3 };
            for _ in 0..times {
                clock.advance(Duration::from_micros(80));
                let admitted = admits(&store, flooded, &subject, 1);
                admitted_late += usize::from(admitted && number >= KEYS / 2);
            }
        }
        let peak = ALLOCATOR.peak_usage() - before;
        assert!(peak <= CAP_BYTES + BESIDE_THE_CAP_BYTES, "{text}: {peak} bytes at the peak");
        // In these minutes of a day, two or three units of a bucket come back, not a hundred.
        assert!(!admits(&store, at_limit, "at its limit", 100), "{text}: the counter at its limit was dropped");
        assert!(store.overflow_len() > 0, "{text}: the flood was meant to reach the cap");
        // New keys get counters of their own whenever others expire. The overflow counters alone would admit a tenth of
        // this.
        assert!(admitted_late > KEYS / 10, "{text}: only {admitted_late} admitted in the second half");
    }
}
