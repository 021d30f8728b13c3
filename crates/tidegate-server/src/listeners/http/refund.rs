//! `POST /v1/refund`: corrects the charge of an admitted check, by its receipt.
//!
//! ```json
//! {"receipt": "AQx…"}                  refunds all units
//! {"receipt": "AQx…", "used": 320}     the request cost 320 units: the difference is refunded or charged
//! {"receipt": "AQx…", "status": 200}   with rules: refunds what their `charge` refunds after this status
//! ```
//!
//! The answer is 200 with `{"applied": true}`, or with `{"applied": false, "reason": …}` if the receipt was used before
//! or has expired. A receipt is applied once, so a client may repeat a refund until it gets an answer. Errors: 400 for
//! a text that is not a receipt of this deployment, 409 if another instance has to redeem it, 503 if the store does not
//! answer.

use bytes::Bytes;
use http::{Response, StatusCode};
use serde::{Deserialize, Deserializer, Serialize};
use tidegate::engine::Ending;
use tidegate::receipt::Settlement;
use tidegate::{Cost, Redeemed};

use super::connection::{json, problem};
use super::request::whole_number;
use super::request::{Describe, Object};
use crate::decider::Decider;
use crate::receipts::RefundError;

/// The body of a refund.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RefundBody {
    /// The receipt of an admitted check.
    receipt: String,
    /// The units that the request actually cost. Unused units are refunded. Units above the charge are charged, even if
    /// they do not fit. Without `used` and `status`, all units are refunded.
    #[serde(default, deserialize_with = "present_used")]
    used: Option<u32>,
    /// The status of the response to the request, instead of `used`. Units are refunded according to the `charge` of each
    /// rule.
    #[serde(default, deserialize_with = "present_status")]
    status: Option<u16>,
}

fn present_used<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let used = whole_number::deserialize(deserializer, "used", u32::MAX)?;
    let error = || serde::de::Error::custom(format_args!("used must be a whole number from 0 to {}", u32::MAX));
    u32::try_from(used).map(Some).map_err(|_| error())
}

fn present_status<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u16>, D::Error> {
    let status = whole_number::deserialize(deserializer, "status", 599)?;
    let valid = u16::try_from(status).ok().filter(|status| (100..=599).contains(status));
    valid.map(Some).ok_or_else(|| serde::de::Error::custom("status must be an HTTP status from 100 to 599"))
}

impl Describe for RefundBody {
    const DESCRIPTION: &'static str = "an object with receipt, and used or status";
}

/// The response to a refund.
#[derive(Serialize)]
struct RefundedBody {
    /// Whether this refund was applied.
    applied: bool,
    /// Why nothing was changed. Absent if the refund was applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<NotApplied>,
}

/// The reason why a receipt changes nothing.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum NotApplied {
    /// The receipt was applied before.
    AlreadyUsed,
    /// The receipt is too old: its charge no longer counts.
    Expired,
}

/// Answers `POST /v1/refund` with this body.
pub(super) async fn answer(decider: &Decider, body: &[u8]) -> Response<Bytes> {
    let (receipt, settlement) = match parse(body) {
        Ok(parsed) => parsed,
        Err(message) => return problem(StatusCode::BAD_REQUEST, "bad_request", &message),
    };
    match decider.redeem(receipt.as_bytes(), settlement).await {
        Ok(redeemed) => {
            let reason = match redeemed {
                Redeemed::Done => None,
                Redeemed::AlreadyUsed => Some(NotApplied::AlreadyUsed),
                _ => Some(NotApplied::Expired),
            };
            json(StatusCode::OK, &RefundedBody { applied: reason.is_none(), reason })
        }
        Err(error) => {
            let (status, code) = match error {
                RefundError::NoSecret => (StatusCode::BAD_REQUEST, "bad_request"),
                RefundError::Invalid(_) => (StatusCode::BAD_REQUEST, "invalid_receipt"),
                RefundError::OtherInstance => (StatusCode::CONFLICT, "other_instance"),
                RefundError::Store(_) => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
            };
            problem(status, code, &error.to_string())
        }
    }
}

/// Returns the receipt of a refund, and how it is settled; or what is wrong with the body.
pub(crate) fn parse(body: &[u8]) -> Result<(String, Settlement), String> {
    let Object(RefundBody { receipt, used, status }) =
        serde_json::from_slice::<Object<RefundBody>>(body).map_err(|error| {
            if error.is_data() {
                error.to_string()
            } else {
                format!("{error}; expected a JSON object such as {{\"receipt\": \"…\"}}")
            }
        })?;
    let settlement = match (used, status.map(StatusCode::from_u16)) {
        (None, None) => Settlement::Refund,
        (Some(used), None) => Settlement::Used(Cost::new(used)),
        (None, Some(Ok(status))) => Settlement::Ended(Ending::of(status)),
        (Some(_), Some(_)) => return Err("expected used or status, not both".to_owned()),
        (None, Some(Err(_))) => return Err("status must be an HTTP status from 100 to 599".to_owned()),
    };
    Ok((receipt, settlement))
}
