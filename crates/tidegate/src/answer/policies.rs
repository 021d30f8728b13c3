//! The policies of one check, rendered together.

use std::io::{self, Write};
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCESS_CONTROL_EXPOSE_HEADERS, CACHE_CONTROL, CONTENT_TYPE, HeaderName, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response};
use smallvec::SmallVec;
use tidegate_config::{IetfDraft, Style};
use tidegate_core::{Decision, LimitStatus, Source, Wait};

use super::body::BodyFormat;
use super::policy::Policy;
use super::refusal::{RefusalDetails, retry_after_secs};
use super::strictest::strictest;

/// Size of the stack buffer for `RateLimit`: about four policies with short names.
const STACK_BYTES: usize = 128;

/// The number of headers for which a refusal reserves space, so that the map does not grow: those of
/// [`Policies::write_headers`], and some that a server adds.
const REFUSAL_HEADERS: usize = 12;

static X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
static X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
static X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
static RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
static RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
static RATE_LIMIT_LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
static RATE_LIMIT_REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
static RATE_LIMIT_RESET: HeaderName = HeaderName::from_static("ratelimit-reset");

/// The policies of all limits of a check, in its order. Writes the headers and bodies of responses.
///
/// The constant parts of the headers are rendered once, when it is created. Policies of one check may have different
/// styles. `x` shows the most restrictive of the policies that have this style. If some have `ietf` and others
/// `draft-6`, all of these are shown in the style of the first one, because a response has one `RateLimit-Policy`.
#[derive(Clone, Debug)]
pub struct Policies {
    policies: Box<[Arc<Policy>]>,
    /// Whether a policy has the style `x`.
    shows_x: bool,
    /// The draft of the first policy that has one.
    draft: Option<IetfDraft>,
    /// The limit statuses that are shown in `RateLimit`. Each refers to a part of `shown_text`.
    shown: SmallVec<[ShownLimit; 2]>,
    /// The constant parts of `RateLimit`, concatenated.
    shown_text: Box<[u8]>,
    /// The value of `RateLimit-Policy`, if not empty.
    advertised: Option<HeaderValue>,
    /// The values of `Access-Control-Expose-Headers`, if it is to be written.
    exposed: Option<Exposed>,
    /// The number of headers to reserve, so that the map grows at most once.
    ///
    /// It covers the headers of an admission and `Content-Length`, which is often added last.
    room: usize,
}

/// A limit that is shown in `RateLimit`: its index in a decision, and where its constant text in `shown_text` ends.
///
/// The text begins where that of the previous entry of `shown` ends; the first begins at 0.
#[derive(Clone, Debug)]
struct ShownLimit {
    /// The index of the limit status in the decision.
    index: usize,
    /// The end of its constant part in `shown_text`, exclusive.
    ///
    /// The part is `"per-minute";r=`, after a comma and a space unless it is the first. The remaining units follow it.
    end: usize,
}

/// The values of `Access-Control-Expose-Headers` for each set of rate-limit headers that can occur. `None` if empty.
///
/// The first index is 1 if the response has `X-RateLimit-Reset` (not if the request can never pass), the second index
/// is 1 if it has `Retry-After`.
#[derive(Clone, Debug)]
struct Exposed([[Option<HeaderValue>; 2]; 2]);

impl Policies {
    /// Combines the policies of a check: one per limit, in the order of the check.
    ///
    /// Policies with equal names are renamed, so that clients can tell them apart. A policy with a
    /// [rule](Policy::with_rule) gets the name of the rule as a prefix (`search.per-minute`). If an earlier policy
    /// still has the same name, a number is appended (`per-minute-2`).
    pub fn new<P: Into<Arc<Policy>>>(policies: impl IntoIterator<Item = P>) -> Policies {
        let policies = with_distinct_names(policies.into_iter().map(Into::into).collect());
        let draft = policies.iter().find_map(|policy| policy.styles().draft());
        let shows_x = policies.iter().any(|policy| policy.styles().contains(Style::X));
        let advertised = draft.and_then(|draft| advertise(draft, &policies));
        let draft_headers = match draft {
            Some(IetfDraft::Latest) => 1,
            Some(IetfDraft::Sixth) => 3,
            None => 0,
        };
        let room = 1 + 3 * usize::from(shows_x) + draft_headers + usize::from(advertised.is_some());
        let (mut shown, mut shown_text) = (SmallVec::new(), Vec::new());
        for (index, policy) in policies.iter().enumerate().filter(|(_, policy)| policy.styles().draft().is_some()) {
            let comma = if shown.is_empty() { "" } else { ", " };
            shown_text.extend_from_slice(comma.as_bytes());
            shown_text.extend_from_slice(policy.rendered.ietf_open.as_bytes());
            shown.push(ShownLimit { index, end: shown_text.len() });
        }
        let (policies, shown_text) = (policies.into(), shown_text.into());
        Policies { policies, shows_x, draft, shown, shown_text, advertised, exposed: None, room }
    }

    /// Sets whether scripts of other origins may read the rate-limit headers in a browser. Defaults to `false`.
    ///
    /// If `true`, `Access-Control-Expose-Headers` lists the rate-limit headers that the response has, and
    /// `Retry-After`.
    #[must_use]
    pub fn with_exposed_headers(mut self, exposed: bool) -> Policies {
        self.exposed = exposed.then(|| {
            let list = |reset, retry| self.exposed_list(reset, retry);
            Exposed([[list(false, false), list(false, true)], [list(true, false), list(true, true)]])
        });
        self
    }

    /// Returns a copy with only the policies for whose index `is_kept` returns `true`.
    pub(crate) fn subset(&self, is_kept: impl Fn(usize) -> bool) -> Policies {
        let kept = self.policies.iter().enumerate().filter(|(index, _)| is_kept(*index));
        Policies::new(kept.map(|(_, policy)| policy.clone())).with_exposed_headers(self.exposed.is_some())
    }

    /// Iterates over the policies, in the order of the limits of the check, with the names that clients see.
    pub fn policies(&self) -> impl ExactSizeIterator<Item = &Policy> {
        self.policies.iter().map(|policy| &**policy)
    }

    /// Writes the rate-limit headers of a response, on a denial also `Retry-After` and `Cache-Control: no-store`.
    ///
    /// `decision` must have one limit status per policy, in the same order; policies without a status are not shown.
    /// Existing headers of these names are replaced; `Access-Control-Expose-Headers` is added to existing ones.
    /// `Retry-After` is not written if the request can never pass. No rate-limit headers are written for a decision of
    /// [`Source::None`] (the store did not answer and the failure policy admitted the request) or without limits.
    pub fn write_headers(&self, decision: &Decision, headers: &mut HeaderMap) {
        if !decision.allowed() {
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            if let Some(secs) = retry_after_secs(decision.retry_after()) {
                headers.insert(RETRY_AFTER, HeaderValue::from(secs));
            }
        }
        if decision.source == Source::None || decision.limits.is_empty() {
            return;
        }
        headers.reserve(self.room);
        if self.shows_x {
            self.write_x(decision, headers);
        }
        match self.draft {
            Some(IetfDraft::Latest) => self.write_ietf(decision, headers),
            Some(IetfDraft::Sixth) => self.write_draft_6(decision, headers),
            None => {}
        }
        if let Some(Exposed(lists)) = &self.exposed {
            let (has_reset, has_retry) = (headers.contains_key(&X_RESET), headers.contains_key(RETRY_AFTER));
            if let Some(list) = &lists[usize::from(has_reset)][usize::from(has_retry)] {
                headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, list.clone());
            }
        }
    }

    /// Builds the response to a denied request: status 429, the headers of
    /// [`write_headers`](Policies::write_headers), and a body.
    ///
    /// `decision` must be a denial, with one limit status per policy, in the same order. The body is in the format of
    /// the policy that denied the request; if several did, of the one with the longest wait. `request` holds the
    /// request's headers: if `Accept` names `application/problem+json`, a JSON body becomes an RFC 9457 problem
    /// document. For a decision that a ban refused, use [`Refusal::by_ban`](crate::engine::Refusal::by_ban) instead.
    ///
    /// ```
    /// use http::HeaderMap;
    /// use tidegate::answer::{Policies, Policy};
    /// use tidegate::{Check, Demand, Key, Limit, MemoryStore};
    ///
    /// let limit: Limit = "1/min".parse()?;
    /// let policies = Policies::new([Policy::of(limit)]);
    /// let store = MemoryStore::new();
    /// let demand = Demand::new(limit, Key::new("user:42")?);
    /// assert!(store.check(&Check::one(&demand)).allowed());
    ///
    /// let denied = store.check(&Check::one(&demand));
    /// let response = policies.refuse(&denied, &HeaderMap::new());
    /// assert_eq!(response.status(), 429);
    /// assert_eq!(response.headers()["retry-after"], "60");
    /// assert!(response.body().starts_with(br#"{"error":"rate_limited""#));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn refuse(&self, decision: &Decision, request: &HeaderMap) -> Response<Bytes> {
        let refusal = self.refusal(decision);
        let mut response = respond(&refusal, refusal.policy().map(Policy::format), request);
        self.write_headers(decision, response.headers_mut());
        response
    }

    /// Returns the details of a denial, for a body or a protocol of your own: policies, wait and message.
    ///
    /// `decision` must be a denial, with one limit status per policy, in the same order.
    pub fn refusal<'a>(&'a self, decision: &'a Decision) -> RefusalDetails<'a> {
        RefusalDetails::denied(decision, self.with_statuses(decision))
    }

    /// Builds the response to a request that is refused because the store did not answer: status 503.
    ///
    /// For the failure policy `deny`. The body is in the first policy's format, and in JSON without policies.
    /// `Retry-After` is one second, and `Cache-Control` is `no-store`. There are no rate-limit headers. `request` holds
    /// the request's headers, of which `Accept` is read.
    pub fn unavailable(&self, request: &HeaderMap) -> Response<Bytes> {
        let refusal = RefusalDetails::unavailable();
        let mut response = respond(&refusal, self.policies.first().map(|policy| policy.format()), request);
        self.write_unavailable_headers(response.headers_mut());
        response
    }

    /// Writes the headers of [`Policies::unavailable`], without the content type.
    pub(crate) fn write_unavailable_headers(&self, headers: &mut HeaderMap) {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        let retry_after = RefusalDetails::unavailable().retry_after_secs().unwrap_or(1);
        headers.insert(RETRY_AFTER, HeaderValue::from(retry_after));
        if self.exposed.is_some() {
            headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("Retry-After"));
        }
    }

    /// Iterates over the policies, each with its limit status in `decision`, in the order of the check.
    ///
    /// Ends with the shorter of the two lists.
    fn with_statuses<'a>(
        &'a self,
        decision: &'a Decision,
    ) -> impl Iterator<Item = (&'a Policy, &'a LimitStatus)> + Clone {
        self.policies.iter().map(|policy| &**policy).zip(&decision.limits)
    }

    fn write_x(&self, decision: &Decision, headers: &mut HeaderMap) {
        let shown = self.with_statuses(decision).filter(|(policy, _)| policy.styles().contains(Style::X));
        let Some((policy, status)) = strictest(shown) else { return };
        headers.insert(&X_LIMIT, policy.rendered.quota.clone());
        headers.insert(&X_REMAINING, HeaderValue::from(status.remaining));
        match until_next(status).as_micros() {
            Some(wait_us) => {
                let reset_us = decision.at.as_micros().saturating_add(wait_us);
                headers.insert(&X_RESET, HeaderValue::from(reset_us.div_ceil(1_000_000)));
            }
            None => {
                headers.remove(&X_RESET);
            }
        }
    }

    fn write_ietf(&self, decision: &Decision, headers: &mut HeaderMap) {
        // The value of a few policies fits into the stack buffer, so that the header value is the only allocation.
        let mut short = [0_u8; STACK_BYTES];
        let mut free = &mut short[..];
        let value = if self.render_ietf(decision, &mut free).is_ok() {
            let length = STACK_BYTES - free.len();
            HeaderValue::from_bytes(&short[..length])
        } else {
            let mut text = Vec::new();
            // Writing into a vector cannot fail.
            let _ = self.render_ietf(decision, &mut text);
            HeaderValue::try_from(text)
        };
        if let Ok(value) = value {
            headers.insert(&RATE_LIMIT, value);
        }
        self.write_advertised(headers);
    }

    /// Writes the value of `RateLimit` to `text`, up to the first shown limit for which `decision` has no status.
    ///
    /// # Errors
    /// If it does not fit. A part of it has then been written.
    #[inline]
    fn render_ietf(&self, decision: &Decision, text: &mut impl Write) -> io::Result<()> {
        let mut begin = 0;
        for &ShownLimit { index, end } in &self.shown {
            let Some(status) = decision.limits.get(index) else { break };
            text.write_all(&self.shown_text[begin..end])?;
            begin = end;
            text.write_all(itoa::Buffer::new().format(status.remaining).as_bytes())?;
            if let Some(secs) = until_next(status).as_secs_ceil() {
                text.write_all(b";t=")?;
                text.write_all(itoa::Buffer::new().format(secs).as_bytes())?;
            }
        }
        Ok(())
    }

    fn write_draft_6(&self, decision: &Decision, headers: &mut HeaderMap) {
        let shown = self.with_statuses(decision).filter(|(policy, _)| policy.styles().draft().is_some());
        let Some((policy, status)) = strictest(shown) else { return };
        // This style requires a reset. For a request that can never pass it is the time until one more unit is
        // available.
        let wait = until_next(status).as_secs_ceil().or(status.next_after.as_secs_ceil());
        headers.insert(&RATE_LIMIT_LIMIT, policy.rendered.quota.clone());
        headers.insert(&RATE_LIMIT_REMAINING, HeaderValue::from(status.remaining));
        headers.insert(&RATE_LIMIT_RESET, HeaderValue::from(wait.unwrap_or(i32::MAX as u64)));
        self.write_advertised(headers);
    }

    fn write_advertised(&self, headers: &mut HeaderMap) {
        if let Some(advertised) = &self.advertised {
            headers.insert(&RATE_LIMIT_POLICY, advertised.clone());
        }
    }

    fn exposed_list(&self, has_reset: bool, has_retry: bool) -> Option<HeaderValue> {
        let mut names = Vec::new();
        match self.draft {
            Some(IetfDraft::Latest) => names.push("RateLimit"),
            Some(IetfDraft::Sixth) => names.extend(["RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"]),
            None => {}
        }
        if self.advertised.is_some() {
            names.push("RateLimit-Policy");
        }
        if self.shows_x {
            names.extend(["X-RateLimit-Limit", "X-RateLimit-Remaining"]);
        }
        if has_reset {
            names.push("X-RateLimit-Reset");
        }
        if has_retry {
            names.push("Retry-After");
        }
        HeaderValue::try_from(names.join(", ")).ok().filter(|list| !list.is_empty())
    }
}

/// Returns the wait that headers show for a limit.
///
/// If the limit denied the request, it is the time until the request would pass, else until one more unit is available.
fn until_next(status: &LimitStatus) -> Wait {
    if status.allowed { status.next_after } else { status.retry_after }
}

fn respond(refusal: &RefusalDetails<'_>, format: Option<&BodyFormat>, request: &HeaderMap) -> Response<Bytes> {
    let body = format.unwrap_or(&BodyFormat::Json).body(refusal, request);
    let mut response = Response::new(body.bytes);
    *response.status_mut() = refusal.verdict().http();
    response.headers_mut().reserve(REFUSAL_HEADERS);
    response.headers_mut().insert(CONTENT_TYPE, body.content_type);
    response
}

/// Renders the value of `RateLimit-Policy` from the policies with an IETF style. Returns `None` if it would be empty.
///
/// In draft 6, limits whose window is not a whole number of seconds are left out.
fn advertise(draft: IetfDraft, policies: &[Arc<Policy>]) -> Option<HeaderValue> {
    let shown = policies.iter().filter(|policy| policy.styles().draft().is_some());
    let texts: Vec<&str> = match draft {
        IetfDraft::Latest => shown.map(|policy| &*policy.rendered.ietf_policy).collect(),
        IetfDraft::Sixth => shown.filter_map(|policy| policy.rendered.draft_6_policy.as_deref()).collect(),
    };
    HeaderValue::try_from(texts.join(", ")).ok().filter(|value| !value.is_empty())
}

/// Makes the names of policies unique.
///
/// First qualifies equal names by their rules. Then appends a number to each name that an earlier policy has: the
/// smallest one, from 2, that makes the name unique.
fn with_distinct_names(mut policies: Vec<Arc<Policy>>) -> Vec<Arc<Policy>> {
    let is_repeated =
        |policy: &Arc<Policy>| policies.iter().filter(|other| other.name() == policy.name()).nth(1).is_some();
    let repeated: SmallVec<[bool; 8]> = policies.iter().map(is_repeated).collect();
    for (policy, _) in policies.iter_mut().zip(repeated).filter(|(_, is_repeated)| *is_repeated) {
        *policy = Arc::new(policy.qualified());
    }
    for index in 1..policies.len() {
        let is_taken =
            |name: &str| policies.iter().enumerate().any(|(at, policy)| at != index && policy.name() == name);
        let name = policies[index].name();
        if policies[..index].iter().any(|earlier| earlier.name() == name) {
            let free = (2..).map(|number| format!("{name}-{number}")).find(|name| !is_taken(name));
            policies[index] = Arc::new(policies[index].renamed(&free.unwrap_or_default()));
        }
    }
    policies
}
