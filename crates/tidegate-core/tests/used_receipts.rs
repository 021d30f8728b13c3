//! The memory of used receipts stays under its bound, by the allocator's own count.
//!
//! The only test in its process, because it counts all bytes that the process allocates.

use std::sync::Arc;

use peak_alloc::PeakAlloc;
use tidegate_core::{ManualClock, MemoryStore, ReceiptId, Redeemed, Redemption, Timestamp};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

/// More receipts than fit, each of a caller of its own, in several orders of the ids and of their expiry.
#[test]
fn memory_of_used_receipts_is_at_most_what_the_store_reports() {
    type Order = (fn(u64) -> u64, fn(u64) -> u64);
    let mixed = |nth: u64| nth.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let orders: [Order; 4] = [
        (|nth| nth, |nth| nth),
        (|nth| nth, |nth| u64::MAX - nth),
        (mixed, |nth| if nth % 2 == 0 { nth } else { 1_000_000 - nth }),
        (mixed, mixed),
    ];
    for (index, (stream, order)) in orders.into_iter().enumerate() {
        let store = MemoryStore::builder().clock(Arc::new(ManualClock::new(START))).build();
        let before = ALLOCATOR.current_usage();
        let mut done = 0;
        for nth in 0..1_000_000 {
            let until = START.plus_micros(3_600_000_000 + order(nth) % 1_000_000 * 10_000);
            let redeemed = store.redeem(&Redemption::new(ReceiptId::new(stream(nth), nth), b"caller", until));
            done += usize::from(redeemed == Redeemed::Done);
        }
        let (stats, bytes) = (store.used_receipts(), ALLOCATOR.current_usage() - before);
        println!("order {index}: {bytes} bytes, {done} redeemed, {stats:?}");
        assert!(bytes <= stats.bytes && stats.bytes <= stats.max_bytes, "order {index}: {bytes} bytes, {stats:?}");
        assert!(stats.dropped_blocks > 0 && done >= 320_000, "order {index}: {done} redeemed, {stats:?}");
    }
}
