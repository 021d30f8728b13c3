//! The used receipts of the memory store.
//!
//! A used receipt is a bit in a block of 256 consecutive receipts of one stream. A block is kept until the last of its
//! receipts that were used expires. Checks do not look here, so a store without redemptions pays nothing, and one with
//! them pays only for those.
//!
//! ```text
//!   id ──▶ shard = stream % 16 (Mutex) ──▶ blocks by stream and number: until │ 256 bits
//!                                      └─▶ blocks by the time at which they expire
//! ```
//!
//! **Exactly once.** All ids of a stream are behind one lock, which is held while the counters are corrected: a second
//! caller with the same id returns only when the correction of the first is complete. Code that holds the lock of a
//! shard of counters never takes this one.
//!
//! **Bounded.** There are at most 16 × 20,000 blocks, which take 65 MB. When a shard is full, a block is dropped for each
//! new one. The receipts of a dropped block must stay unusable, so some receipts expire early: a refund may be refused,
//! but is never applied twice. In this order:
//!
//! 1. If the caller has other blocks, its oldest is dropped, and all its receipts up to there are expired: the next block
//!    of the stream becomes its *floor*. No other caller is affected. Since the receipts of one caller are consecutive
//!    numbers of one stream, this takes 5.1 million used receipts.
//! 2. Else, if the caller of the block that expires next has other blocks, the oldest of these is dropped in the same way.
//! 3. Else the block that expires next is dropped, and with it all receipts of the shard that expire no later. This takes
//!    20,000 callers in one shard, 320,000 in all, with one used receipt each.
//! 4. If the new block is itself among those that expire next, it is not added. If no other block expires at the same
//!    time, its receipt is applied, and all receipts that expire no later are expired. Else it is refused.
//!
//! **A clock that goes back** does not revive an id whose mark was dropped, because every id that expires no later than
//! a dropped one stays expired.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use crate::redemption::{ReceiptId, Redeemed};
use crate::time::Timestamp;

/// The number of receipts in a block. A block of one used receipt takes at most 204 bytes, a full one 0.8 bytes per receipt.
/// Smaller blocks would leave room for more callers, larger ones for more receipts of each.
const BLOCK_RECEIPTS: u64 = 256;

const SHARDS: usize = 16;

/// The maximum number of blocks in a shard.
const SHARD_BLOCKS_MAX: usize = 20_000;

/// The maximum number of bytes per block: 64 that the allocator needs for it, and 70 for its place in each of the two
/// trees. A leaf takes 288 bytes and has at least 5 places, an inner node takes 384 bytes and has at least 6 leaves.
const BLOCK_BYTES: usize = 204;

/// Blocks expire at multiples of this, so that few redemptions change when a block expires.
const EXPIRY_STEP_US: u64 = 1_000_000;

/// The memory of the used receipts of a [`MemoryStore`](crate::MemoryStore), and how often its bound had an effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct UsedReceiptStats {
    /// The bytes that used receipts take at most: 204 for each block of up to 256 receipts.
    pub bytes: usize,
    /// The maximum of `bytes`: 65 MB. One of the 16 parts of the memory may be full before that.
    pub max_bytes: usize,
    /// The blocks that were dropped before they expired, or not added, because there was no room.
    pub dropped_blocks: u64,
    /// The redemptions that were [`Expired`](Redeemed::Expired) before the time of their receipts. That happens when there
    /// is no room, and after the clock went back.
    pub expired_early: u64,
}

/// The ids that were redeemed and are not expired.
pub(super) struct UsedReceipts {
    shards: Box<[Mutex<UsedTable>]>,
    shard_blocks_max: usize,
}

/// A stream and the number of a block in it. The blocks of a stream are in the order of their numbers.
type BlockId = (u64, u64);

/// Consecutive receipts of a stream.
struct Block {
    /// The time at which the last of the used receipts expires, rounded up. For a floor, also of those before it.
    until: Timestamp,
    /// Whether all receipts of the stream before this block are expired.
    is_floor: bool,
    /// A bit for each receipt: whether it was used.
    used: [u64; BLOCK_RECEIPTS as usize / 64],
}

#[derive(Default)]
struct UsedTable {
    blocks: BTreeMap<BlockId, Box<Block>>,
    by_expiry: BTreeSet<(Timestamp, BlockId)>,
    /// All receipts that expire no later than this are expired.
    dropped_until: Timestamp,
    dropped_blocks: u64,
    expired_early: u64,
}

impl Default for UsedReceipts {
    fn default() -> UsedReceipts {
        UsedReceipts::bounded(SHARD_BLOCKS_MAX)
    }
}

impl UsedReceipts {
    /// Creates an empty set with at most this many blocks in each of 16 shards.
    fn bounded(shard_blocks_max: usize) -> UsedReceipts {
        UsedReceipts { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), shard_blocks_max }
    }

    /// Marks `id` as used until `until` and calls `apply`, unless the id is expired at `now` or was used before.
    ///
    /// Also drops all blocks of the shard that have expired. If `apply` panics, the id stays marked.
    pub(super) fn redeem(&self, id: ReceiptId, until: Timestamp, now: Timestamp, apply: impl FnOnce()) -> Redeemed {
        let mut table = self.shards[id.stream() as usize % SHARDS].lock();
        table.drop_expired(now);
        if until <= now {
            return Redeemed::Expired;
        }
        let redeemed = table.mark(id, until, self.shard_blocks_max);
        match redeemed {
            Redeemed::Done => apply(),
            Redeemed::AlreadyUsed => {}
            Redeemed::Expired => table.expired_early += 1,
        }
        redeemed
    }

    /// Returns the memory in use, and the counts of all shards.
    pub(super) fn stats(&self) -> UsedReceiptStats {
        let max_bytes = SHARDS * self.shard_blocks_max * BLOCK_BYTES;
        let mut stats = UsedReceiptStats { max_bytes, ..UsedReceiptStats::default() };
        for shard in &self.shards {
            let table = shard.lock();
            stats.bytes += table.blocks.len() * BLOCK_BYTES;
            stats.dropped_blocks += table.dropped_blocks;
            stats.expired_early += table.expired_early;
        }
        stats
    }
}

impl UsedTable {
    /// Marks an id as used until `until`, and keeps at most `blocks_max` blocks.
    fn mark(&mut self, id: ReceiptId, until: Timestamp, blocks_max: usize) -> Redeemed {
        let block_id = (id.stream(), id.sequence() / BLOCK_RECEIPTS);
        let bit = id.sequence() % BLOCK_RECEIPTS;
        let (word, mask) = ((bit / 64) as usize, 1 << (bit % 64));
        let first = self.blocks.range((id.stream(), 0)..=(id.stream(), u64::MAX)).next();
        let is_below_floor = first.is_some_and(|(first, block)| block.is_floor && block_id < *first);
        if until <= self.dropped_until || is_below_floor {
            return Redeemed::Expired;
        }
        let steps = until.as_micros().div_ceil(EXPIRY_STEP_US);
        let until = Timestamp::from_micros(steps.saturating_mul(EXPIRY_STEP_US)).max(until);
        let block = self.blocks.entry(block_id).or_insert_with(|| {
            self.by_expiry.insert((until, block_id));
            Box::new(Block { until, is_floor: false, used: Default::default() })
        });
        if block.used[word] & mask != 0 {
            return Redeemed::AlreadyUsed;
        }
        block.used[word] |= mask;
        self.extend(block_id, until);
        if self.blocks.len() <= blocks_max || self.make_room(block_id, until) {
            Redeemed::Done
        } else {
            Redeemed::Expired
        }
    }

    /// Drops a block, because `new` was added and there is one too many. Returns `false` if the receipt of `new` is to be
    /// refused. The comment at the top of this file has the order in which blocks are dropped.
    fn make_room(&mut self, new: BlockId, until: Timestamp) -> bool {
        self.dropped_blocks += 1;
        if self.first_of(new.0) != Some(new) && self.drop_first_of(new.0) {
            return true;
        }
        let Some(&(earliest, other)) = self.by_expiry.iter().find(|(_, block_id)| *block_id != new) else {
            return true;
        };
        if self.drop_first_of(other.0) {
            return true;
        }
        let (dropped, is_raised) = if earliest < until { (other, true) } else { (new, earliest > until) };
        if let Some(block) = self.remove(dropped)
            && is_raised
        {
            self.dropped_until = self.dropped_until.max(block.until);
        }
        is_raised
    }

    /// Drops the first block of a stream, and makes the second one the floor. Returns `false`, and changes nothing, if there
    /// is no second one.
    fn drop_first_of(&mut self, stream: u64) -> bool {
        let mut blocks = self.blocks.range((stream, 0)..=(stream, u64::MAX)).map(|(block_id, _)| *block_id);
        let (Some(first), Some(second)) = (blocks.next(), blocks.next()) else { return false };
        if let Some(dropped) = self.remove(first) {
            self.extend(second, dropped.until);
        }
        if let Some(floor) = self.blocks.get_mut(&second) {
            floor.is_floor = true;
        }
        true
    }

    /// Returns the block of a stream with the lowest number.
    fn first_of(&self, stream: u64) -> Option<BlockId> {
        self.blocks.range((stream, 0)..=(stream, u64::MAX)).next().map(|(block_id, _)| *block_id)
    }

    /// Keeps a block until at least `until`.
    fn extend(&mut self, block_id: BlockId, until: Timestamp) {
        if let Some(block) = self.blocks.get_mut(&block_id)
            && block.until < until
        {
            self.by_expiry.remove(&(block.until, block_id));
            self.by_expiry.insert((until, block_id));
            block.until = until;
        }
    }

    fn remove(&mut self, block_id: BlockId) -> Option<Box<Block>> {
        let block = self.blocks.remove(&block_id)?;
        self.by_expiry.remove(&(block.until, block_id));
        Some(block)
    }

    /// Drops all blocks that have expired at `now`, and those with receipts that all expired early.
    fn drop_expired(&mut self, now: Timestamp) {
        let expired = now.max(self.dropped_until);
        while let Some(&(until, block_id)) = self.by_expiry.first()
            && until <= expired
        {
            self.remove(block_id);
            self.dropped_until = self.dropped_until.max(until);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::super::plain_state_tests::Random;
    use super::*;
    use crate::{Check, Demand, Key, ManualClock, MemoryStore, Redemption};

    const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
    const SECOND_US: u64 = 1_000_000;

    fn store() -> (MemoryStore, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::new(START));
        (MemoryStore::builder().clock(clock.clone()).build(), clock)
    }

    fn demand<'a>(limit: &str, subject: &'a str) -> Demand<'a> {
        Demand::new(limit.parse().unwrap(), Key::new(subject).unwrap())
    }

    fn id(number: u64) -> ReceiptId {
        ReceiptId::new(7, number)
    }

    impl UsedReceipts {
        fn block_count(&self) -> usize {
            self.shards.iter().map(|shard| shard.lock().blocks.len()).sum()
        }
    }

    fn in_seconds(seconds: u64) -> Timestamp {
        START.plus_micros(seconds * SECOND_US)
    }

    #[test]
    fn redemption_gives_back_and_charges_once() {
        let (store, _) = store();
        let (refunded, charged) = (demand("10/min", "ann").cost(4), demand("20/h token-bucket", "ann").cost(5));
        let (refunds, charges) = (Check::one(&refunded), Check::one(&charged));
        let decision = store.check(&refunds);
        let redemption = Redemption::new(id(1), b"ann", in_seconds(60)).refund(refunds, &decision).charge(charges);
        for expected in [Redeemed::Done, Redeemed::AlreadyUsed, Redeemed::AlreadyUsed] {
            assert_eq!(store.redeem(&redemption), expected);
            assert_eq!((store.inspect(&refunded).remaining, store.inspect(&charged).remaining), (10, 15));
        }
    }

    #[test]
    fn charge_that_does_not_fit_fills_the_counter_even_if_the_subject_is_banned() {
        let (store, _) = store();
        let over = [demand("10/min", "ann").cost(11), demand("20/h", "ann").cost(5)];
        store.ban(b"ann", None).unwrap();
        let redemption = Redemption::new(id(1), b"ann", in_seconds(60)).charge(Check::new(&over).unwrap());
        assert_eq!(store.redeem(&redemption), Redeemed::Done);
        assert_eq!(over.each_ref().map(|demand| store.inspect(demand).remaining), [0, 15]);
    }

    #[test]
    fn redemption_without_a_correction_marks_its_id() {
        let (store, _) = store();
        let marks = Redemption::new(id(1), b"ann", in_seconds(60));
        assert_eq!(store.redeem(&marks), Redeemed::Done);
        assert_eq!(store.redeem(&marks), Redeemed::AlreadyUsed);
        assert_eq!(store.redeem(&Redemption::new(id(2), b"ann", in_seconds(60))), Redeemed::Done);
        assert!(store.is_empty());
    }

    #[test]
    fn id_is_expired_from_its_end_on_and_stays_so_if_the_clock_goes_back() {
        let (store, clock) = store();
        let demand = demand("10/h", "ann").cost(4);
        let check = Check::one(&demand);
        let decision = store.check(&check);
        let used = Redemption::new(id(1), b"ann", in_seconds(60)).refund(check, &decision);
        let unused = Redemption::new(id(2), b"ann", in_seconds(60)).refund(check, &decision);
        let later = Redemption::new(id(3), b"ann", in_seconds(61)).refund(check, &decision);
        clock.set(in_seconds(60).minus_micros(1));
        assert_eq!(store.redeem(&used), Redeemed::Done);
        assert!(store.check(&check).allowed());
        clock.set(in_seconds(60));
        assert_eq!(store.redeem(&used), Redeemed::Expired);
        assert_eq!(store.redeem(&unused), Redeemed::Expired);
        assert_eq!(store.receipts.block_count(), 0, "an expired block is dropped");
        clock.set(START);
        assert_eq!(store.redeem(&used), Redeemed::Expired, "its mark was dropped");
        assert_eq!(store.redeem(&unused), Redeemed::Expired);
        assert_eq!(store.inspect(&demand).remaining, 6);
        assert_eq!(store.redeem(&later), Redeemed::Done);
    }

    #[test]
    fn block_lives_until_the_last_of_its_receipts_expires() {
        let receipts = UsedReceipts::default();
        let redeem =
            |number, until_s, now_s| receipts.redeem(id(number), in_seconds(until_s), in_seconds(now_s), || ());
        assert_eq!(redeem(0, 100, 0), Redeemed::Done);
        assert_eq!(redeem(1, 300, 0), Redeemed::Done);
        assert_eq!(redeem(2, 200, 0), Redeemed::Done);
        assert_eq!(redeem(BLOCK_RECEIPTS, 250, 0), Redeemed::Done);
        assert_eq!([redeem(0, 100, 100), redeem(2, 200, 100)], [Redeemed::Expired, Redeemed::AlreadyUsed]);
        assert_eq!((redeem(1, 300, 299), receipts.block_count()), (Redeemed::AlreadyUsed, 1));
        assert_eq!((redeem(1, 300, 300), receipts.block_count()), (Redeemed::Expired, 0));
        assert_eq!(receipts.stats().expired_early, 0);
        // The block of the last one was dropped at 250 s, before the clock went back.
        assert_eq!([redeem(BLOCK_RECEIPTS, 250, 0), redeem(3, 301, 0)], [Redeemed::Expired, Redeemed::Done]);
        assert_eq!(receipts.stats().expired_early, 1);
    }

    #[test]
    fn refund_of_another_caller_succeeds_after_a_million_refunds_of_one() {
        let (store, _) = store();
        let until = in_seconds(3_600);
        for sequence in 0..=1_000_000 {
            assert_eq!(store.redeem(&Redemption::new(ReceiptId::new(1, sequence), b"hot", until)), Redeemed::Done);
        }
        let demand = demand("10/h", "ann").cost(4);
        let check = Check::one(&demand);
        let decision = store.check(&check);
        let redemption = Redemption::new(ReceiptId::new(2, 0), b"ann", until).refund(check, &decision);
        assert_eq!(store.redeem(&redemption), Redeemed::Done);
        assert_eq!(store.redeem(&redemption), Redeemed::AlreadyUsed);
        assert_eq!(store.inspect(&demand).remaining, 10);
        let stats = store.used_receipts();
        assert!(stats.bytes < 1_000_000, "{stats:?}");
        assert_eq!((stats.dropped_blocks, stats.expired_early), (0, 0));
    }

    /// The receipts of one caller, all of which expire at the same time, as those of a fixed window do.
    #[test]
    fn caller_at_the_bound_loses_its_own_oldest_receipts_and_no_others() {
        let receipts = UsedReceipts::default();
        let (hot, other) = (|nth| ReceiptId::new(7, nth), |nth| ReceiptId::new(7 + SHARDS as u64, nth));
        let redeem = |id| receipts.redeem(id, in_seconds(3_600), START, || ());
        assert_eq!(redeem(other(0)), Redeemed::Done);
        let blocks = 2 * SHARD_BLOCKS_MAX as u64;
        for block in 0..blocks {
            assert_eq!(redeem(hot(block * BLOCK_RECEIPTS)), Redeemed::Done);
        }
        assert_eq!([redeem(other(0)), redeem(other(1))], [Redeemed::AlreadyUsed, Redeemed::Done]);
        // One of the blocks is that of the other caller.
        let floor = (blocks - SHARD_BLOCKS_MAX as u64 + 1) * BLOCK_RECEIPTS;
        assert_eq!([redeem(hot(floor - 1)), redeem(hot(floor))], [Redeemed::Expired, Redeemed::AlreadyUsed]);
        assert_eq!([redeem(hot(0)), redeem(hot(floor + 1))], [Redeemed::Expired, Redeemed::Done]);
        // A third caller in the same shard takes the oldest block of the first.
        let third = ReceiptId::new(7 + 2 * SHARDS as u64, 9);
        assert_eq!([redeem(third), redeem(third)], [Redeemed::Done, Redeemed::AlreadyUsed]);
        assert_eq!([redeem(hot(floor + 1)), redeem(other(1))], [Redeemed::Expired, Redeemed::AlreadyUsed]);
        let stats = receipts.stats();
        assert_eq!((stats.bytes, stats.max_bytes), (SHARD_BLOCKS_MAX * 204, 65_280_000));
        assert_eq!((stats.dropped_blocks, stats.expired_early), (blocks + 2 - SHARD_BLOCKS_MAX as u64, 3));
        // When all have expired, they are dropped.
        assert_eq!(receipts.redeem(hot(0), in_seconds(9_000), in_seconds(8_000), || ()), Redeemed::Done);
        assert_eq!(receipts.block_count(), 1);
    }

    /// Callers with one used receipt each.
    #[test]
    fn callers_at_the_bound_lose_the_receipts_that_expire_next() {
        let receipts = UsedReceipts::bounded(100);
        let redeem = |nth: u64, until_s| {
            let mut is_applied = false;
            let id = ReceiptId::new(nth * SHARDS as u64, 0);
            let redeemed = receipts.redeem(id, in_seconds(until_s), START, || is_applied = true);
            assert_eq!(is_applied, redeemed == Redeemed::Done);
            redeemed
        };
        for nth in 0..100 {
            assert_eq!(redeem(nth, 1_000 + nth), Redeemed::Done);
        }
        // The first one is dropped. From then on, all that expire no later are expired.
        assert_eq!(redeem(100, 2_000), Redeemed::Done);
        assert_eq!(
            [redeem(0, 1_000), redeem(200, 1_000), redeem(1, 1_001)],
            [Redeemed::Expired, Redeemed::Expired, Redeemed::AlreadyUsed]
        );
        // One that expires at the same time as the next is refused, and changes nothing.
        assert_eq!(
            [redeem(201, 1_001), redeem(201, 1_001), redeem(1, 1_001)],
            [Redeemed::Expired, Redeemed::Expired, Redeemed::AlreadyUsed]
        );
        let stats = receipts.stats();
        assert_eq!((stats.dropped_blocks, stats.expired_early), (3, 4));
        // When there is room again, it is applied.
        assert_eq!(redeem(102, 3_000), Redeemed::Done);
        let late = |id, until_s, now_s| receipts.redeem(id, in_seconds(until_s), in_seconds(now_s), || ());
        assert_eq!(late(ReceiptId::new(201 * SHARDS as u64, 0), 1_050, 1_049), Redeemed::Done);
    }

    #[test]
    fn receipt_that_expires_before_all_others_is_applied_once_although_there_is_no_room() {
        let receipts = UsedReceipts::bounded(1);
        let redeem = |stream: u64, until_s| {
            receipts.redeem(ReceiptId::new(stream * SHARDS as u64, 0), in_seconds(until_s), START, || ())
        };
        assert_eq!(redeem(1, 100), Redeemed::Done);
        assert_eq!([redeem(2, 50), redeem(2, 50)], [Redeemed::Done, Redeemed::Expired]);
        assert_eq!([redeem(3, 51), redeem(1, 100)], [Redeemed::Done, Redeemed::AlreadyUsed]);
        assert_eq!(receipts.block_count(), 1);
    }

    /// Random ids, orders, repetitions and times, with a clock that may go back.
    #[test]
    fn every_id_takes_effect_at_most_once_and_does_so_unless_it_is_used_or_expired() {
        for seed in 1..400 {
            let mut random = Random(seed);
            // Without a bound that is reached, and with a small one.
            let blocks_max = if seed % 2 == 0 { SHARD_BLOCKS_MAX } else { 1 + random.below(6) as usize };
            let receipts = UsedReceipts::bounded(blocks_max);
            let (streams, numbers) = (1 + random.below(20), 1 + random.below(4 * BLOCK_RECEIPTS));
            // The time of each id, and whether it has taken effect.
            let mut ids: HashMap<ReceiptId, (Timestamp, bool)> = HashMap::new();
            let (mut now, mut latest) = (in_seconds(1_000), START);
            let mut outcomes = [0; 3];
            for _ in 0..600 {
                now = match random.below(20) {
                    0 => now.minus_micros(random.below(30 * SECOND_US)),
                    1..5 => now.plus_micros(random.below(20 * SECOND_US)),
                    _ => now.plus_micros(random.below(SECOND_US / 10)),
                };
                let known: Vec<ReceiptId> = ids.keys().copied().collect();
                let id = match random.below(3) {
                    0 if !known.is_empty() => known[random.below(known.len() as u64) as usize],
                    _ => ReceiptId::new(random.below(streams), random.below(numbers)),
                };
                let random_until = now.plus_micros(random.below(60 * SECOND_US));
                let (until, is_used) = ids.entry(id).or_insert((random_until, false));
                let until = *until;
                latest = latest.max(now);
                let mut is_applied = false;
                let redeemed = receipts.redeem(id, until, now, || is_applied = true);
                assert_eq!(is_applied, redeemed == Redeemed::Done, "seed {seed}");
                assert!(!(is_applied && *is_used), "seed {seed}: {id} has taken effect twice");
                let is_certain = until > latest && receipts.stats().dropped_blocks == 0;
                match redeemed {
                    Redeemed::Expired => assert!(!is_certain, "seed {seed}: {id} is not expired"),
                    redeemed => {
                        assert!(until > now, "seed {seed}: {id} is expired");
                        let expected = if *is_used { Redeemed::AlreadyUsed } else { Redeemed::Done };
                        assert_eq!(redeemed, expected, "seed {seed}: {id}");
                    }
                }
                outcomes[redeemed as usize] += 1;
                *is_used |= is_applied;
                for shard in &receipts.shards {
                    let table = shard.lock();
                    assert!(table.blocks.len() <= blocks_max && table.by_expiry.len() == table.blocks.len());
                }
            }
            assert!(outcomes[Redeemed::Done as usize] > 0, "seed {seed}: {outcomes:?}");
            if blocks_max == SHARD_BLOCKS_MAX {
                assert_eq!(receipts.stats().dropped_blocks, 0);
            }
        }
    }

    #[test]
    fn one_of_many_threads_redeems_an_id() {
        const THREADS: usize = 16;
        let store = MemoryStore::new();
        let demand = demand("100/h", "ann").cost(40);
        let check = Check::one(&demand);
        for round in 0..50 {
            store.reset(&demand);
            assert!(store.check(&check).allowed());
            let decision = store.check(&check);
            let until = decision.at.plus_micros(Duration::from_secs(600).as_micros() as u64);
            let redemption = Redemption::new(id(round), b"ann", until).refund(check, &decision);
            let done = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| match store.redeem(&redemption) {
                        Redeemed::Done => assert_eq!(done.fetch_add(1, Ordering::Relaxed), 0),
                        redeemed => {
                            assert_eq!(redeemed, Redeemed::AlreadyUsed);
                            assert_eq!(store.inspect(&demand).remaining, 60, "the other thread is done");
                        }
                    });
                }
            });
            assert_eq!(done.into_inner(), 1);
            assert_eq!(store.inspect(&demand).remaining, 60);
        }
    }
}
