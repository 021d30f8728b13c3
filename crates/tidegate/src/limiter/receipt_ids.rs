//! Issues the ids of receipts: for each subject consecutive numbers in a stream of its own.
//!
//! A store keeps the used receipts of a stream as bits in blocks, so the receipts of one caller take few bytes if their
//! numbers are consecutive. A table of streams by subject would need a bound and an eviction. Instead, there is a fixed
//! number of counters, and a subject is assigned to one by its hash:
//!
//! ```text
//!   subject ──hash with a random key──▶ stream (64 bits) ──▶ counter of the stream, one of 65,536 ──▶ next number
//! ```
//!
//! **Unique.** Two receipts of one stream have different numbers, because a stream has one counter. The key of the hash is
//! random, so other limiters, and this one after a restart, have other streams: for one subject, two limiters have the
//! same stream with a probability of 2^-64.
//!
//! **Subjects that share a counter** take numbers from each other. Each still has a stream of its own, in which some
//! numbers do not occur, so its blocks are less full. A subject never needs more than one block per receipt.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::ReceiptId;

/// The number of counters. They take 512 KiB.
const COUNTERS: usize = 1 << 16;

/// The streams of a limiter, and the next number of each.
#[derive(Default)]
pub(super) struct ReceiptIds {
    /// The hash function from a subject to its stream.
    streams: RandomState,
    /// The next numbers, allocated for the first receipt.
    next: OnceLock<Box<[AtomicU64]>>,
}

impl ReceiptIds {
    /// Returns an id that was not returned before. Those of one subject have ascending numbers in one stream.
    pub(super) fn next(&self, subject: &[u8]) -> ReceiptId {
        let stream = self.streams.hash_one(subject);
        let next = self.next.get_or_init(|| (0..COUNTERS).map(|_| AtomicU64::new(0)).collect());
        ReceiptId::new(stream, next[stream as usize % COUNTERS].fetch_add(1, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ids_of_a_subject_are_consecutive_and_those_of_another_limiter_are_in_another_stream() {
        let (ids, others) = (ReceiptIds::default(), ReceiptIds::default());
        let first = ids.next(b"user:42");
        assert_eq!(first.sequence(), 0);
        for nth in 1..1_000 {
            assert_eq!(ids.next(b"user:42"), ReceiptId::new(first.stream(), nth));
        }
        assert_ne!(others.next(b"user:42").stream(), first.stream());
    }

    #[test]
    fn ids_are_unique_across_subjects_that_share_counters_and_threads() {
        const SUBJECTS: usize = 100_000;
        let ids = ReceiptIds::default();
        let issued = |_| (0..SUBJECTS).map(|nth| ids.next(&nth.to_be_bytes())).collect::<Vec<ReceiptId>>();
        let issued: Vec<Vec<ReceiptId>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|nth| scope.spawn(move || issued(nth))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let unique: HashSet<&ReceiptId> = issued.iter().flatten().collect();
        assert_eq!(unique.len(), 4 * SUBJECTS);
        let streams: HashSet<u64> = unique.iter().map(|id| id.stream()).collect();
        assert_eq!(streams.len(), SUBJECTS);
        // On average six ids per counter.
        assert!(unique.iter().all(|id| id.sequence() < 200));
    }
}
