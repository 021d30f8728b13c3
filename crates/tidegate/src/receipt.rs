//! Receipts: the charges of an admitted request as data, to be corrected later, by any instance, exactly once.
//!
//! A Rust service keeps the [`Permit`](crate::engine::Permit) of a request, or the [`Decision`] of a check, until the
//! work is done. A service in another language has only text. So an admission can be turned into a receipt, which is
//! sent to the client and returned with the outcome:
//!
//! ```text
//!   check ─▶ admitted ─▶ Receipt ─▶ … the work … ─▶ redeem(receipt, settlement) ─▶ done, already used, expired
//!                        id, counters, units, time                exactly once per id
//! ```
//!
//! **One id, several parts.** The limits of a request may be counted in several stores: shields in their own memory,
//! shadow rules separately from enforced ones. Each group of limits that was decided together is a part of the receipt,
//! and is redeemed under its own id: with the sequence number of the receipt, in a stream that is derived from that of
//! the receipt. If redeeming fails after some parts, a retry redeems the rest.
//!
//! **Counters in process memory** can be corrected only by the process that holds them. A receipt with such a part
//! names its issuer, and every other process rejects it.
//!
//! A receipt contains keys and addresses, and a client that could forge one could refund units. A service must encrypt
//! and authenticate [encoded](Receipt::encode) receipts before it sends them.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use tidegate_core::{
    Check, Cost, Decision, Demand, Key, Limit, LimitStatus, MemoryStore, ReceiptId, Redeemed, RuleScopeBuf, Scope,
    Source, StoreError, Timestamp, Wait,
};

use crate::engine::Ending;
use crate::limiter::{Limiter, redeem_in_memory};
use crate::rules::Charge;

/// The maximum total length of the subjects of a receipt, in bytes.
///
/// A receipt contains the subjects. They are encoded in hex and then in base64, which makes them 2.7 times as long. The
/// text that `tidegate serve` sends to clients must not exceed 64 KiB.
pub const RECEIPT_SUBJECT_BYTES_MAX: usize = 16 * 1024;

/// The charges of an admitted check or request, which can be redeemed once.
///
/// Created by [`Limiter::receipt`] or [`Permit::receipt`](crate::engine::Permit::receipt), and redeemed by
/// [`Limiter::redeem_receipt`] or [`Engine::redeem`](crate::engine::Engine::redeem).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Receipt {
    #[serde(rename = "i", with = "hex")]
    id: [u8; 16],
    /// The process that holds the counters, if some are in process memory.
    #[serde(rename = "p", default, skip_serializing_if = "Option::is_none")]
    issuer: Option<u64>,
    #[serde(rename = "c")]
    parts: Vec<ReceiptPart>,
}

/// The limits of a receipt that were decided together.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct ReceiptPart {
    #[serde(rename = "k")]
    pub(crate) counters: CounterPlace,
    /// The time of the decision in microseconds.
    #[serde(rename = "t")]
    at_us: u64,
    #[serde(rename = "l")]
    limits: Vec<ChargedLimit>,
}

/// The place of the counters that a part of a receipt has charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum CounterPlace {
    /// The limiter's store.
    #[serde(rename = "s")]
    Store,
    /// The limiter's local share of the quotas.
    #[serde(rename = "l")]
    Local,
    /// The memory store of the shields.
    #[serde(rename = "m")]
    Shield,
}

/// One limit that was charged.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct ChargedLimit {
    #[serde(rename = "l", with = "text")]
    limit: Limit,
    #[serde(rename = "s", with = "hex")]
    subject: Vec<u8>,
    /// The names of the rule and its limit. `None` for an explicit check.
    #[serde(rename = "r", default, skip_serializing_if = "Option::is_none")]
    rule: Option<(String, String)>,
    #[serde(rename = "u")]
    units: u32,
    #[serde(rename = "a")]
    reset_after_us: u64,
    /// The time from the decision's to that of this limit. See [`LimitStatus::late_us`].
    #[serde(rename = "d", default, skip_serializing_if = "is_zero")]
    late_us: u32,
    /// See [`LimitStatus::refunded_before`].
    #[serde(rename = "g", default, skip_serializing_if = "is_zero")]
    refunded_before: u64,
    #[serde(rename = "c", with = "text")]
    charge: Charge,
}

/// Returns whether a number is zero, so that it is left out of the encoding.
fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

/// A correction of the charges of a receipt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Settlement {
    /// All units are refunded.
    Refund,
    /// The request cost this many units instead of those that were charged. Unused units are refunded. Units above
    /// the charge are charged, even if they do not fit.
    Used(Cost),
    /// The request ended. Rules with `charge = "on_failure"` refund their units after a success, those with
    /// `"on_success"` after a failure. All other charges are kept.
    Ended(Ending),
}

/// The reason why a receipt could not be redeemed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedeemError {
    /// The receipt was issued by another process, whose memory holds the counters.
    #[error(
        "the receipt can be redeemed only by the instance that issued it, because its counters are in that instance's memory"
    )]
    OtherInstance,
    /// The store did not answer. The receipt may be redeemed again: it takes effect only once.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The error for bytes that are not an encoded [`Receipt`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this is not a receipt")]
pub struct InvalidReceipt;

/// The error for a receipt whose subjects have more than [`RECEIPT_SUBJECT_BYTES_MAX`] bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the keys of a check with a receipt can have at most {RECEIPT_SUBJECT_BYTES_MAX} bytes in total; these have {bytes}"
)]
pub struct ReceiptTooLarge {
    /// The total length of the subjects in bytes.
    pub bytes: usize,
}

impl ReceiptTooLarge {
    /// Returns an error if the demands' subjects have too many bytes for a receipt.
    ///
    /// Call this before the check, because an admission without a receipt cannot be refunded.
    pub fn check(demands: &[Demand<'_>]) -> Result<(), ReceiptTooLarge> {
        let bytes = demands.iter().map(|demand| demand.key.subject().len()).sum();
        if bytes <= RECEIPT_SUBJECT_BYTES_MAX { Ok(()) } else { Err(ReceiptTooLarge { bytes }) }
    }
}

impl Receipt {
    /// Creates a receipt of these parts. Returns `None` if there are none.
    pub(crate) fn new(parts: Vec<ReceiptPart>, limiter: &Limiter) -> Option<Receipt> {
        let subject = &parts.first()?.limits.first()?.subject;
        let id = limiter.receipt_id_of(subject).to_bytes();
        let is_in_process = |part: &ReceiptPart| match part.counters {
            CounterPlace::Store => limiter.is_in_process(),
            CounterPlace::Local | CounterPlace::Shield => true,
        };
        let issuer = parts.iter().any(is_in_process).then(process_id);
        Some(Receipt { id, issuer, parts })
    }

    /// Returns whether units are refunded after this ending, according to the `charge` of the rules.
    ///
    /// Returns `false` for explicit checks, whose limits have no `charge`.
    pub fn is_refunded_on(&self, ending: Ending) -> bool {
        let mut limits = self.parts.iter().flat_map(|part| &part.limits);
        limits.any(|limit| limit.charge.refunds(ending == Ending::Success))
    }

    /// Encodes the receipt as bytes, which [`Receipt::decode`] reads. They are neither encrypted nor authenticated.
    pub fn encode(&self) -> Vec<u8> {
        // Serializing strings and numbers into memory cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Decodes a receipt from the bytes of [`Receipt::encode`].
    ///
    /// The bytes must be authentic, because their content is not verified.
    ///
    /// # Errors
    /// Returns an error if the bytes are not a receipt.
    pub fn decode(bytes: &[u8]) -> Result<Receipt, InvalidReceipt> {
        serde_json::from_slice(bytes).map_err(|_| InvalidReceipt)
    }

    /// Redeems all parts, one after the other. Returns [`Redeemed::Done`] if at least one took effect.
    ///
    /// `shield` is the store of the shields' counters; without it, parts that were charged there cannot be redeemed.
    ///
    /// # Errors
    /// As [`Engine::redeem`](crate::engine::Engine::redeem). Earlier parts stay redeemed.
    pub(crate) async fn redeem(
        &self,
        limiter: &Limiter,
        shield: Option<&MemoryStore>,
        settlement: Settlement,
    ) -> Result<Redeemed, RedeemError> {
        if self.issuer.is_some_and(|issuer| issuer != process_id()) {
            return Err(RedeemError::OtherInstance);
        }
        let mut result = Redeemed::Expired;
        for (index, part) in self.parts.iter().enumerate() {
            let redeemed = part.redeem(self.part_id(index), limiter, shield, settlement).await?;
            result = match (result, redeemed) {
                (Redeemed::Done, _) | (_, Redeemed::Done) => Redeemed::Done,
                (Redeemed::AlreadyUsed, _) => Redeemed::AlreadyUsed,
                (_, redeemed) => redeemed,
            };
        }
        Ok(result)
    }

    /// Returns the id under which a part is redeemed: the same number in another stream. Streams are random, so those of
    /// parts are not those of other receipts.
    fn part_id(&self, index: usize) -> ReceiptId {
        let id = ReceiptId::from_bytes(self.id);
        ReceiptId::new(id.stream().wrapping_add(index as u64), id.sequence())
    }
}

impl ReceiptPart {
    /// Creates the part of a receipt for an admission: the demands, the decision on them, and the `charge` of each.
    ///
    /// Limits that charged no units are left out. Returns `None` if none is left, or if no counter decided.
    pub(crate) fn new<'a>(
        is_shield: bool,
        decision: &Decision,
        charged: impl IntoIterator<Item = (Demand<'a>, &'a LimitStatus, Charge)>,
    ) -> Option<ReceiptPart> {
        let counters = match (is_shield, decision.source) {
            (true, _) => CounterPlace::Shield,
            (false, Source::Store) => CounterPlace::Store,
            (false, Source::Local) => CounterPlace::Local,
            (false, _) => return None,
        };
        let charged = charged.into_iter().filter(|(_, status, _)| status.allowed && status.cost > 0);
        let limits: Vec<ChargedLimit> = charged
            .map(|(demand, status, charge)| ChargedLimit {
                limit: demand.limit,
                subject: demand.key.subject().to_vec(),
                rule: match demand.key.scope() {
                    Scope::Rule(scope) => Some((scope.rule().to_owned(), scope.limit().to_owned())),
                    Scope::Explicit | Scope::Named(_) => None,
                },
                units: status.cost,
                reset_after_us: status.reset_after.as_micros().unwrap_or(0),
                late_us: status.late_us,
                refunded_before: status.refunded_before,
                charge,
            })
            .collect();
        let is_charged = decision.allowed() && !limits.is_empty();
        is_charged.then_some(ReceiptPart { counters, at_us: decision.at.as_micros(), limits })
    }

    async fn redeem(
        &self,
        id: ReceiptId,
        limiter: &Limiter,
        shield: Option<&MemoryStore>,
        settlement: Settlement,
    ) -> Result<Redeemed, RedeemError> {
        let scopes: SmallVec<[Option<RuleScopeBuf>; 4]> = self.limits.iter().map(ChargedLimit::scope).collect();
        let demands = self.limits.iter().zip(&scopes).map(|(limit, scope)| limit.demand(scope.as_ref()));
        let demands: SmallVec<[Demand<'_>; 4]> = demands.collect::<Option<_>>().ok_or_else(malformed)?;
        let check = Check::new(&demands).map_err(|_| malformed())?;
        let source = match self.counters {
            CounterPlace::Store | CounterPlace::Shield => Source::Store,
            CounterPlace::Local => Source::Local,
        };
        let limits = self.limits.iter().map(ChargedLimit::status).collect();
        let decision = Decision::new(Timestamp::from_micros(self.at_us), source, limits);
        let actual: SmallVec<[Cost; 4]> = self.limits.iter().map(|limit| limit.actual(settlement)).collect();
        Ok(match self.counters {
            CounterPlace::Shield => {
                let shield = shield.ok_or(RedeemError::OtherInstance)?;
                redeem_in_memory(shield, id, &check, &decision, &actual)?
            }
            CounterPlace::Store | CounterPlace::Local => limiter.redeem(id, &check, &decision, &actual).await?,
        })
    }
}

impl ChargedLimit {
    fn scope(&self) -> Option<RuleScopeBuf> {
        self.rule.as_ref().map(|(rule, limit)| RuleScopeBuf::new(&**rule, &**limit))
    }

    fn demand<'a>(&'a self, scope: Option<&'a RuleScopeBuf>) -> Option<Demand<'a>> {
        let scope = scope.map_or(Scope::Explicit, RuleScopeBuf::scope);
        Some(Demand::new(self.limit, Key::scoped(&self.subject, scope).ok()?).cost(self.units))
    }

    /// Returns the status of the limit when the units were charged, as far as a correction needs it.
    fn status(&self) -> LimitStatus {
        LimitStatus {
            allowed: true,
            cost: self.units,
            quota: self.limit.quota(),
            remaining: 0,
            retry_after: Wait::ZERO,
            next_after: Wait::ZERO,
            reset_after: Wait::from_micros(self.reset_after_us),
            late_us: self.late_us,
            refunded_before: self.refunded_before,
        }
    }

    /// Returns the units that the limit should have been charged.
    fn actual(&self, settlement: Settlement) -> Cost {
        match settlement {
            Settlement::Refund => Cost::PEEK,
            Settlement::Used(used) => used,
            Settlement::Ended(ending) if self.charge.refunds(ending == Ending::Success) => Cost::PEEK,
            Settlement::Ended(_) => Cost::new(self.units),
        }
    }
}

impl Limiter {
    /// Creates the receipt of an admission, with an id of its own.
    ///
    /// `check` must be the check that was decided, with explicit keys. Returns `None` if nothing was charged: for a
    /// denial, a peek, or an admission that no counter decided.
    pub fn receipt(&self, check: &Check<'_>, decision: &Decision) -> Option<Receipt> {
        let charged = check.demands().iter().zip(&decision.limits);
        let charged = charged.map(|(demand, status)| (*demand, status, Charge::Always));
        Receipt::new(ReceiptPart::new(false, decision, charged).into_iter().collect(), self)
    }

    /// Corrects the charges of a receipt exactly once, no matter how often and by how many instances it is redeemed.
    ///
    /// A receipt of a request that a shield has charged must be redeemed with
    /// [`Engine::redeem`](crate::engine::Engine::redeem).
    ///
    /// # Errors
    /// Returns an error if the store does not answer, or if the receipt can be redeemed only by another process.
    pub async fn redeem_receipt(&self, receipt: &Receipt, settlement: Settlement) -> Result<Redeemed, RedeemError> {
        receipt.redeem(self, None, settlement).await
    }
}

/// Returns a number that identifies this process among those that share a receipt secret.
fn process_id() -> u64 {
    // The standard library's hasher has random keys from the operating system.
    static ID: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()));
    *ID
}

fn malformed() -> StoreError {
    StoreError::new(
        tidegate_core::StoreErrorKind::Forbidden,
        "the receipt names limits that cannot be redeemed together",
    )
}

/// Values in their text form: limits, and the names of charges.
mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>, T: FromStr>(deserializer: D) -> Result<T, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(|_| D::Error::custom("malformed text"))
    }
}

/// Bytes as text: two hex digits each.
mod hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &impl AsRef<[u8]>, serializer: S) -> Result<S::Ok, S::Error> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digits = |byte: &u8| [byte >> 4, byte & 15].map(|digit| char::from(DIGITS[usize::from(digit)]));
        serializer.serialize_str(&bytes.as_ref().iter().flat_map(digits).collect::<String>())
    }

    pub(super) fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: TryFrom<Vec<u8>>,
    {
        let text = String::deserialize(deserializer)?;
        let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|digit| digit as u8);
        let byte = |pair: &[u8]| match pair {
            [high, low] => Some(digit(high)? << 4 | digit(low)?),
            _ => None,
        };
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
        bytes.and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| D::Error::custom("expected hex digits"))
    }
}

#[cfg(test)]
mod tests;
