//! Issues receipts for admitted checks and requests, and redeems them.
//!
//! ```text
//!   POST /v1/check {…, "receipt": true}      ─▶ {"allowed": true, …, "receipt": "AQx…"}
//!   POST /v1/refund {"receipt": "AQx…"}      ─▶ {"applied": true}    the first time, on any instance
//!                                            ─▶ {"applied": false, "reason": "already_used"}
//! ```
//!
//! A client may repeat a refund whose response it did not receive, because a receipt is applied once. With counters in
//! memory, the secret is generated at startup, and receipts are valid until the process ends, as the counters are. With
//! a shared store, the operator sets the secret, so that every instance can redeem the receipts of the others.

use tidegate::engine::{Ending, Permit};
use tidegate::receipt::{ReceiptTooLarge, RedeemError, Settlement};
use tidegate::{Check, Decision, Demand, Redeemed, StoreErrorKind};

use crate::decider::Decider;
use crate::receipt_secret::InvalidReceiptText;

/// A receipt in the form in which it is sent to a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct IssuedReceipt {
    /// The encrypted receipt.
    pub(crate) text: String,
    /// The endings after which rules refund units. Empty for explicit checks, and if all rules always charge.
    pub(crate) refund_on: Vec<Ending>,
}

/// The reason why a check with a receipt is rejected, before it is decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum ReceiptUnavailable {
    #[error("{}", NO_SECRET)]
    NoSecret,
    #[error(transparent)]
    TooLarge(#[from] ReceiptTooLarge),
}

/// The reason why a receipt is not redeemed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum RefundError {
    #[error("{}", NO_SECRET)]
    NoSecret,
    #[error(transparent)]
    Invalid(#[from] InvalidReceiptText),
    /// The counters are in the memory of another instance.
    #[error(
        "this receipt was issued by another instance, which keeps the counters in its memory; send the receipt to that \
         instance"
    )]
    OtherInstance,
    /// The store did not answer. The client may repeat the refund.
    #[error("the store did not answer ({}); it is safe to try again, because a receipt is applied only once", .0.as_str())]
    Store(StoreErrorKind),
}

const NO_SECRET: &str = "receipts need a secret that all instances share: set `receipt_secret_env` or \
    `receipt_secret_file` in the configuration, or TIDEGATE_RECEIPT_SECRET";

impl Decider {
    /// Checks that this instance can issue receipts, and that the keys of these demands are short enough for one.
    ///
    /// # Errors
    /// Returns the reason. The check must then be rejected, because its charge could not be refunded.
    pub(crate) fn check_receipt(&self, demands: &[Demand<'_>]) -> Result<(), ReceiptUnavailable> {
        self.receipt_secret().ok_or(ReceiptUnavailable::NoSecret)?;
        Ok(ReceiptTooLarge::check(demands)?)
    }

    /// Issues the receipt of an explicit check that was decided as refundable. Returns `None` if nothing was charged.
    pub(crate) fn receipt(&self, check: &Check<'_>, decision: &Decision) -> Option<IssuedReceipt> {
        let receipt = self.limiter().receipt(check, decision)?;
        Some(IssuedReceipt { text: self.receipt_secret()?.seal(&receipt)?, refund_on: Vec::new() })
    }

    /// Issues the receipt of an admitted request. Returns `None` if no rule that charges by the outcome applies to it, or
    /// if there is no secret, which a warning at the start has reported.
    pub(crate) fn receipt_of(&self, permit: &Permit) -> Option<IssuedReceipt> {
        let secret = self.receipt_secret()?;
        let receipt = permit.receipt()?;
        let endings = [Ending::Success, Ending::Failure].into_iter();
        let refund_on = endings.filter(|ending| receipt.is_refunded_on(*ending)).collect();
        Some(IssuedReceipt { text: secret.seal(&receipt)?, refund_on })
    }

    /// Corrects the charges of a receipt. It is applied once, no matter how often it is redeemed.
    ///
    /// # Errors
    /// Returns an error if the text is not a receipt of this deployment, if another instance has to redeem it, or if the
    /// store does not answer.
    pub(crate) async fn redeem(&self, text: &[u8], settlement: Settlement) -> Result<Redeemed, RefundError> {
        let receipt = self.receipt_secret().ok_or(RefundError::NoSecret)?.open(text)?;
        self.engine().redeem(&receipt, settlement).await.map_err(|error| match error {
            RedeemError::Store(error) => RefundError::Store(error.kind()),
            _ => RefundError::OtherInstance,
        })
    }
}
