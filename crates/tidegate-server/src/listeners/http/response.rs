//! The JSON body of a response to a check. `openapi/http.json` describes its fields as `Decision` and `Refusal`.
//!
//! The bodies are written as text. serde needs four times the instructions for the same, which adds several per cent to
//! those of a whole request.

use bytes::Bytes;
use serde::Serialize;
use tidegate::Decision;
use tidegate::answer::Policies;
use tidegate::engine::{Ending, Refusal};

use super::relayed::RelayedResponse;
use crate::receipts::IssuedReceipt;

/// Returns an admission as JSON.
///
/// `policies` must be those of the decision's limits, in the same order. They provide names and windows; without them
/// the list of limits is empty.
pub(super) fn decision_body(
    decision: &Decision,
    policies: Option<&Policies>,
    relayed: Option<&RelayedResponse<'_>>,
    receipt: Option<&IssuedReceipt>,
) -> Bytes {
    let mut json = JsonText(Vec::with_capacity(64 + 192 * decision.limits.len()));
    json.decision(decision, policies);
    if let Some(relayed) = relayed {
        json.raw(",\"response\":").value(relayed);
    }
    if let Some(IssuedReceipt { text, refund_on }) = receipt {
        json.raw(",\"receipt\":\"").raw(text).raw("\"");
        if relayed.is_some() {
            let name = |ending: &Ending| match ending {
                Ending::Success => "success",
                Ending::Failure => "failure",
            };
            json.raw(",\"refund_on\":").value(&refund_on.iter().map(name).collect::<Vec<_>>());
        }
    }
    json.raw("}");
    Bytes::from(json.0)
}

/// Returns a refusal as JSON. `relayed` is the response to the described request.
pub(super) fn refusal_body(refusal: &Refusal, relayed: Option<&RelayedResponse<'_>>) -> Bytes {
    let mut json = JsonText(Vec::with_capacity(512));
    match refusal {
        Refusal::Denied { decision, policies, .. } => json.decision(decision, Some(policies)),
        // No limit has decided.
        _ => json.raw("{\"allowed\":false,\"source\":\"").raw(refusal.source().as_str()).raw("\",\"limits\":[]"),
    };
    json.raw(",");
    refusal.fields().write_json(&mut json.0);
    if let Some(relayed) = relayed {
        json.raw(",\"response\":").value(relayed);
    }
    json.raw("}");
    Bytes::from(json.0)
}

struct JsonText(Vec<u8>);

impl JsonText {
    /// Appends the fields `allowed`, `source` and `limits` of an object that is not closed yet.
    fn decision(&mut self, decision: &Decision, policies: Option<&Policies>) -> &mut Self {
        self.raw("{\"allowed\":").flag(decision.allowed());
        self.raw(",\"source\":\"").raw(decision.source.as_str()).raw("\",\"limits\":[");
        let limits = policies.into_iter().flat_map(Policies::policies).zip(&decision.limits);
        for (index, (policy, status)) in limits.enumerate() {
            self.raw(if index == 0 { "{\"name\":\"" } else { ",{\"name\":\"" }).raw(policy.name());
            if let Some(rule) = policy.rule() {
                // The name of a rule has no characters that JSON escapes.
                self.raw("\",\"rule\":\"").raw(rule);
            }
            self.raw("\",\"quota\":").number(Some(status.quota.into()));
            self.raw(",\"window_ms\":").number(Some(policy.limit().window_us().div_ceil(1_000)));
            self.raw(",\"remaining\":").number(Some(status.remaining.into()));
            self.raw(",\"retry_after_ms\":").number(status.retry_after.as_millis_ceil());
            self.raw(",\"next_after_ms\":").number(status.next_after.as_millis_ceil());
            self.raw(",\"reset_after_ms\":").number(status.reset_after.as_millis_ceil());
            self.raw(",\"allowed\":").flag(status.allowed).raw("}");
        }
        self.raw("]")
    }

    /// Appends a value, which must not fail to serialize. If it did, the value would be null.
    fn value(&mut self, value: &impl Serialize) -> &mut Self {
        let at = self.0.len();
        if serde_json::to_writer(&mut self.0, value).is_err() {
            self.0.truncate(at);
            self.raw("null");
        }
        self
    }

    fn raw(&mut self, text: &str) -> &mut Self {
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    fn flag(&mut self, value: bool) -> &mut Self {
        self.raw(if value { "true" } else { "false" })
    }

    fn number(&mut self, value: Option<u64>) -> &mut Self {
        match value {
            Some(value) => self.raw(itoa::Buffer::new().format(value)),
            None => self.raw("null"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidegate::answer::{Policies, Policy};
    use tidegate::{Decision, Limit, LimitStatus, Source, Timestamp, Wait};

    use super::decision_body;

    fn status(allowed: bool, remaining: u32, waits_us: [u64; 3]) -> LimitStatus {
        let [retry_after, next_after, reset_after] =
            waits_us.map(|us| if us == u64::MAX { Wait::NEVER } else { Wait::from_micros(us) });
        LimitStatus {
            allowed,
            cost: 1,
            quota: 10_000_000,
            remaining,
            retry_after,
            next_after,
            reset_after,
            late_us: 0,
            refunded_before: 0,
        }
    }

    #[test]
    fn decision_is_written_as_its_fields() {
        let limits: [Limit; 3] = ["10/min", "5/1500us", "7/day"].map(|text| text.parse().unwrap());
        let policies = Policies::new(limits.map(Policy::of));
        let statuses = [
            status(true, 9, [0, 1, 60_000_000]),
            status(false, 0, [u64::MAX, 999, 1_001]),
            status(true, u32::MAX, [1_000, 123_456_789_012, 4_503_599_627_370_495]),
        ];
        let ms = |wait: Wait| wait.as_micros().map(|us| us.div_ceil(1_000));
        for (count, source) in [(0, Source::None), (1, Source::Store), (2, Source::DenyCache), (3, Source::Local)] {
            let limits = statuses[..count].iter().copied().collect();
            let decision = Decision::new(Timestamp::ZERO, source, limits);
            let entry = |(policy, status): (&Policy, &LimitStatus)| {
                json!({
                    "name": policy.name(),
                    "quota": status.quota,
                    "window_ms": policy.limit().window_us().div_ceil(1_000),
                    "remaining": status.remaining,
                    "retry_after_ms": ms(status.retry_after),
                    "next_after_ms": ms(status.next_after),
                    "reset_after_ms": ms(status.reset_after),
                    "allowed": status.allowed,
                })
            };
            let limits: Vec<Value> = policies.policies().zip(&decision.limits).map(entry).collect();
            let expected = json!({"allowed": decision.allowed(), "source": source.as_str(), "limits": limits});
            let body = decision_body(&decision, Some(&policies), None, None);
            assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), expected);
        }
        let unlimited = decision_body(&Decision::uncounted(Timestamp::ZERO), None, None, None);
        assert_eq!(&*unlimited, br#"{"allowed":true,"source":"none","limits":[]}"#);
    }
}
