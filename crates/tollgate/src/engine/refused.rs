//! A request that does not go on, and what it is told.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response};
use tollgate_core::{Decision, Timestamp};

#[cfg(feature = "tower")]
use crate::answer::Body;
use crate::answer::{Policies, Refusal, Verdict, grpc};

const BANNED: &str = "this caller is banned";
const PATH_TOO_LONG: &str = "the path of this request is too long";

/// A request that does not go on, and why.
#[derive(Debug)]
pub struct Refused {
    /// Which of the reasons.
    pub verdict: Verdict,
    /// What to answer over HTTP.
    pub response: Response<Bytes>,
    /// The decision, if limits refused it.
    pub decision: Option<Decision>,
    /// Whose limits the lines of the decision are.
    pub policies: Option<Arc<Policies>>,
}

impl Refused {
    pub(super) fn denied(policies: Arc<Policies>, decision: Decision, request: &HeaderMap) -> Refused {
        let response = policies.refuse(&decision, request);
        Refused { verdict: Verdict::Denied, response, decision: Some(decision), policies: Some(policies) }
    }

    pub(super) fn unavailable(policies: &Policies, request: &HeaderMap) -> Refused {
        let response = policies.unavailable(request);
        Refused { verdict: Verdict::Unavailable, response, decision: None, policies: None }
    }

    /// 403, and until when.
    pub(super) fn banned(until: Option<Timestamp>, now: Timestamp) -> Refused {
        let mut refused = Refused::without_limits(Verdict::Forbidden, BANNED);
        if let Some(until) = until {
            let seconds = until.as_micros().saturating_sub(now.as_micros()).div_ceil(1_000_000).max(1);
            refused.response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        refused
    }

    /// 414, and how long a path may be.
    pub(super) fn path_too_long(bytes_max: usize) -> Refused {
        let message = format!("{PATH_TOO_LONG}; at most {bytes_max} bytes are accepted");
        Refused::without_limits(Verdict::PathTooLong, &message)
    }

    fn without_limits(verdict: Verdict, message: &str) -> Refused {
        let body = serde_json::json!({ "error": verdict.error(), "message": message });
        let mut response = Response::new(Bytes::from(body.to_string()));
        *response.status_mut() = verdict.http();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Refused { verdict, response, decision: None, policies: None }
    }

    /// The facts, for whoever writes about them; a ban and a path that is too long have none.
    fn refusal(&self) -> Option<Refusal<'_>> {
        match (&self.policies, &self.decision) {
            (Some(policies), Some(decision)) => Some(policies.refusal(decision)),
            _ if self.verdict == Verdict::Unavailable => Some(Refusal::unavailable()),
            _ => None,
        }
    }

    /// What to answer over HTTP, with a body that somebody else writes.
    #[cfg(feature = "tower")]
    pub(crate) fn into_written(mut self, write_body: &dyn Fn(&Refusal<'_>) -> Body) -> Response<Bytes> {
        let body = self.refusal().map(|refusal| write_body(&refusal));
        if let Some(Body { content_type, bytes }) = body {
            self.response.headers_mut().insert(CONTENT_TYPE, content_type);
            *self.response.body_mut() = bytes;
        }
        self.response
    }

    /// What to answer over gRPC, to a request of this [content type](grpc::content_type): the same facts as a status
    /// and metadata.
    pub fn into_grpc(self, content_type: &HeaderValue) -> Response<Bytes> {
        let without_limits = if self.verdict == Verdict::PathTooLong { PATH_TOO_LONG } else { BANNED };
        let message = self.refusal().map_or_else(|| without_limits.to_owned(), |refusal| refusal.message());
        grpc::refusal(self.verdict, &message, self.response.into_parts().0.headers, content_type)
    }
}
