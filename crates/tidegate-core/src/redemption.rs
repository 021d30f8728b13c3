//! Corrections of a charge that take effect exactly once.
//!
//! A [refund](crate::Store::refund) must be called at most once, and not again after an error. This cannot be
//! guaranteed if several instances may refund the same charge, or if a client repeats its request. So a redemption has
//! an id, and the store remembers which ids were used:
//!
//! ```text
//!   redeem(id) ──▶ until has passed? ── yes ──▶ Expired       nothing changes
//!                       │ no
//!                  id was used? ─────── yes ──▶ AlreadyUsed   nothing changes
//!                       │ no
//!                  mark the id as used, refund units, charge units ──▶ Done
//! ```
//!
//! The last line is one atomic step: of any number of calls with one id, on any number of instances, exactly one is
//! `Done`. After an error, when the outcome is unknown, the caller calls again with the same id.
//!
//! **Used ids are kept for a limited time.** A store remembers an id until `until`. From then on, every call with this
//! id is `Expired`, whether it was used or not.
//!
//! **An id is a stream and a sequence number.** A random id for each receipt would cost a store a key of more than
//! a hundred bytes per used receipt. So the receipts of one caller have consecutive numbers in one stream, and a
//! used one is a bit in a block:
//!
//! ```text
//!   id = │ stream 8 bytes │ sequence 8 bytes │        block = sequence / block size, bit = sequence % block size
//!
//!   stream 5f0a… ─▶ block 0 │1111111111…│  block 1 │1101110000…│
//! ```
//!
//! Any unique bytes are a valid id. Random ones work, but each takes a block of its own.

use std::fmt;

use crate::check::{Check, Demand};
use crate::decision::Decision;
use crate::time::Timestamp;

/// The id of a receipt: a stream and a sequence number, which together must be unique.
///
/// A store keeps the used ids of a stream as bits, so ids with consecutive numbers take the least memory.
/// [`Display`](fmt::Display) writes 32 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReceiptId([u8; 16]);

impl ReceiptId {
    /// Creates the id with a sequence number in a stream.
    ///
    /// ```
    /// use tidegate_core::ReceiptId;
    ///
    /// let id = ReceiptId::new(0x5f0a, 3);
    /// assert_eq!((id.stream(), id.sequence()), (0x5f0a, 3));
    /// assert_eq!(id.to_string(), "0000000000005f0a0000000000000003");
    /// ```
    pub const fn new(stream: u64, sequence: u64) -> ReceiptId {
        ReceiptId(((stream as u128) << 64 | sequence as u128).to_be_bytes())
    }

    /// Creates an id from its bytes: the stream and the sequence number, both in big-endian order.
    pub const fn from_bytes(bytes: [u8; 16]) -> ReceiptId {
        ReceiptId(bytes)
    }

    /// Returns the bytes of the id: the stream and the sequence number, both in big-endian order.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// Returns the stream: the first 8 bytes.
    pub const fn stream(self) -> u64 {
        (u128::from_be_bytes(self.0) >> 64) as u64
    }

    /// Returns the sequence number: the last 8 bytes.
    pub const fn sequence(self) -> u64 {
        u128::from_be_bytes(self.0) as u64
    }
}

impl fmt::Display for ReceiptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ReceiptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReceiptId({self})")
    }
}

/// A correction of a charge that takes effect once: units to refund, units to charge, or both.
///
/// With neither, [`Store::redeem`](crate::Store::redeem) only marks the id as used.
///
/// ```
/// use tidegate_core::{Check, Demand, Key, MemoryStore, ReceiptId, Redeemed, Redemption};
///
/// let store = MemoryStore::new();
/// let demand = Demand::new("10/min".parse()?, Key::new("user:42")?).cost(4);
/// let check = Check::one(&demand);
/// let decision = store.check(&check);
///
/// let until = decision.at.plus_micros(600_000_000);
/// let redemption = Redemption::new(ReceiptId::new(1, 0), b"user:42", until).refund(check, &decision);
/// assert_eq!(store.redeem(&redemption), Redeemed::Done);
/// assert_eq!(store.redeem(&redemption), Redeemed::AlreadyUsed);
/// assert_eq!(store.inspect(&demand).remaining, 10);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Redemption<'a> {
    /// The id of the receipt, which can be used once.
    pub id: ReceiptId,
    /// The subject whose counters are corrected; if there are several, any one of them.
    ///
    /// A store may keep the used id with the counters of this subject, so all redemptions of an id must have the same
    /// subject.
    pub subject: &'a [u8],
    /// The time, by the store's clock, at which the id expires.
    ///
    /// All redemptions of an id must have the same time.
    pub until: Timestamp,
    /// The charge to refund: the check that was decided, and the decision. As in
    /// [`Store::refund`](crate::Store::refund), nothing is refunded for a denial.
    pub refund: Option<(Check<'a>, &'a Decision)>,
    /// The units to charge, whether they fit or not. See [`Redemption::charged_demands`].
    pub charge: Option<Check<'a>>,
}

impl<'a> Redemption<'a> {
    /// Creates a redemption that only marks the id as used.
    pub const fn new(id: ReceiptId, subject: &'a [u8], until: Timestamp) -> Redemption<'a> {
        Redemption { id, subject, until, refund: None, charge: None }
    }

    /// Sets the charge to refund: the check that was decided, and the decision. Replaces an earlier one.
    #[must_use]
    pub const fn refund(mut self, check: Check<'a>, decision: &'a Decision) -> Redemption<'a> {
        self.refund = Some((check, decision));
        self
    }

    /// Sets the units to charge. Replaces an earlier check.
    ///
    /// The check must not use a counter to which units are refunded.
    #[must_use]
    pub const fn charge(mut self, check: Check<'a>) -> Redemption<'a> {
        self.charge = Some(check);
        self
    }

    /// Returns the demands of `charge`, with `count_denied`.
    ///
    /// A store decides them as one check and ignores bans, so the units are charged whether they fit or not. If they do
    /// not fit, the counter becomes full and does not exceed its quota.
    pub fn charged_demands(&self) -> impl Iterator<Item = Demand<'a>> + use<'a> {
        let demands: &'a [Demand<'a>] = self.charge.map_or(&[], |check| check.demands());
        demands.iter().map(|demand| Demand { limit: demand.limit.with_count_denied(true), ..*demand })
    }
}

/// The outcome of a [redemption](crate::Store::redeem).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
#[must_use]
pub enum Redeemed {
    /// The redemption took effect, and its id is marked as used.
    Done,
    /// Another redemption has used the id. Nothing was changed.
    AlreadyUsed,
    /// The id has expired. Nothing was changed. A store whose memory for used ids is full may let ids expire early.
    Expired,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_is_written_as_32_hex_digits() {
        let id = ReceiptId::from_bytes([0, 1, 0xab, 0xff, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(id.to_string(), "0001abff0405060708090a0b0c0d0e0f");
        assert_eq!(format!("{id:?}"), "ReceiptId(0001abff0405060708090a0b0c0d0e0f)");
        assert_eq!(ReceiptId::from_bytes(id.to_bytes()), id);
        assert_eq!((id.stream(), id.sequence()), (0x0001_abff_0405_0607, 0x0809_0a0b_0c0d_0e0f));
        assert_eq!(ReceiptId::new(id.stream(), id.sequence()), id);
    }
}
