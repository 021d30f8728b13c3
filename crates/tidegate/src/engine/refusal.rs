//! A refused request: the reason, and the responses that report it.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response};
use tidegate_core::{Decision, Source, Wait};

use crate::answer::{Body, Policies, RefusalDetails, RefusalFields, Verdict, grpc};

const BANNED: &str = "this caller is banned";
const PATH_TOO_LONG: &str = "the path of this request is too long";

/// A refused request: denied by a limit, refused because the store is unavailable, banned, or with a path that is too
/// long. Builds the responses.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// A limit denied the request.
    #[non_exhaustive]
    Denied {
        /// The decision.
        decision: Decision,
        /// The policies of the decision's limits, in the same order.
        policies: Arc<Policies>,
    },
    /// The store did not answer, and the failure policy of a rule is `deny`. Also if the limits of the rules that match
    /// the request cannot be decided together, because two of them count on one counter or there are too many.
    #[non_exhaustive]
    Unavailable {
        /// The policies of the limits that could not be decided.
        policies: Arc<Policies>,
    },
    /// The configuration or the ban list bans the client's address, an API key in the request or its user; or the store
    /// holds a ban of a subject by which the request is counted.
    #[non_exhaustive]
    Banned {
        /// The time until the ban ends; [`Wait::NEVER`] if it is permanent.
        remaining: Wait,
        /// The component that reported the ban. [`Source::None`] for a ban in the configuration.
        source: Source,
    },
    /// The path is longer than the rules accept.
    #[non_exhaustive]
    PathTooLong {
        /// The maximum number of bytes in a path, without its query.
        max_bytes: usize,
    },
}

impl Refusal {
    /// Creates the refusal of a decision by a ban in the store, or `None` if no ban refused it.
    pub fn by_ban(decision: &Decision) -> Option<Refusal> {
        decision.ban.map(|remaining| Refusal::Banned { remaining, source: decision.source })
    }

    /// Creates the refusal of a decision that is not an admission: by a ban if the decision has one, else by its
    /// limits.
    ///
    /// `policies` must be those of the decision's limits, in the same order.
    pub fn by_decision(decision: Decision, policies: Arc<Policies>) -> Refusal {
        Refusal::by_ban(&decision).unwrap_or(Refusal::Denied { decision, policies })
    }

    /// Creates the refusal of a check whose store did not answer. `policies` must be those of the check's limits.
    pub fn unavailable(policies: Arc<Policies>) -> Refusal {
        Refusal::Unavailable { policies }
    }

    /// Returns the verdict, which determines status codes and error names.
    pub fn verdict(&self) -> Verdict {
        match self {
            Refusal::Denied { .. } => Verdict::Denied,
            Refusal::Unavailable { .. } => Verdict::Unavailable,
            Refusal::Banned { .. } => Verdict::Banned,
            Refusal::PathTooLong { .. } => Verdict::PathTooLong,
        }
    }

    /// Returns the decision if a limit denied the request, else `None`.
    pub fn decision(&self) -> Option<&Decision> {
        match self {
            Refusal::Denied { decision, .. } => Some(decision),
            Refusal::Unavailable { .. } | Refusal::Banned { .. } | Refusal::PathTooLong { .. } => None,
        }
    }

    /// Returns the source of the denial, or of the ban in the store. [`Source::None`] for a ban in the configuration, a
    /// path that is too long, and an unavailable store.
    pub fn source(&self) -> Source {
        match self {
            Refusal::Denied { decision, .. } => decision.source,
            Refusal::Banned { source, .. } => *source,
            Refusal::Unavailable { .. } | Refusal::PathTooLong { .. } => Source::None,
        }
    }

    /// Returns the fields of the body in the format `json`.
    pub fn fields(&self) -> RefusalFields<'_> {
        match self {
            Refusal::Denied { decision, policies } => policies.refusal(decision).fields(),
            Refusal::Unavailable { .. } => RefusalDetails::unavailable().fields(),
            Refusal::Banned { remaining, .. } => {
                RefusalFields::without_limit(self.verdict(), BANNED.to_owned(), *remaining)
            }
            Refusal::PathTooLong { max_bytes } => {
                let message = format!("{PATH_TOO_LONG}; at most {max_bytes} bytes are accepted");
                RefusalFields::without_limit(self.verdict(), message, Wait::NEVER)
            }
        }
    }

    /// Writes the headers of [`Refusal::response`], without the content type.
    ///
    /// Only a denial has rate-limit headers.
    pub fn write_headers(&self, headers: &mut HeaderMap) {
        match self {
            Refusal::Denied { decision, policies } => policies.write_headers(decision, headers),
            Refusal::Unavailable { policies } => policies.write_unavailable_headers(headers),
            Refusal::Banned { remaining, .. } => {
                headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
                if let Some(seconds) = remaining.as_secs_ceil() {
                    headers.insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
                }
            }
            Refusal::PathTooLong { .. } => {
                headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            }
        }
    }

    /// Builds the response of a service behind the layer: [`Refusal::grpc_response`] if the request is gRPC, else
    /// [`Refusal::response`]. `request` holds the request's headers.
    pub fn response_to(&self, request: &HeaderMap) -> Response<Bytes> {
        match grpc::content_type(request) {
            Some(content_type) => self.grpc_response(content_type),
            None => self.response(request),
        }
    }

    /// Builds the HTTP response: status (429, 503, 403 or 414, in the order of the variants), headers and body.
    ///
    /// Only a denial has rate-limit headers. `request` holds the request's headers; its `Accept` header may change the
    /// format of the body.
    pub fn response(&self, request: &HeaderMap) -> Response<Bytes> {
        match self {
            Refusal::Denied { decision, policies } => policies.refuse(decision, request),
            Refusal::Unavailable { policies } => policies.unavailable(request),
            Refusal::Banned { .. } | Refusal::PathTooLong { .. } => {
                let Body { content_type, bytes } = self.fields().body();
                let mut response = Response::new(bytes);
                *response.status_mut() = self.verdict().http();
                response.headers_mut().insert(CONTENT_TYPE, content_type);
                self.write_headers(response.headers_mut());
                response
            }
        }
    }

    /// Builds the HTTP response of [`Refusal::response`], with the body and content type that `write_body` returns.
    ///
    /// A ban and a path that is too long keep their own body, and `write_body` is not called.
    #[cfg(feature = "tower")]
    pub(crate) fn response_with_body(
        &self,
        request: &HeaderMap,
        write_body: &dyn Fn(&RefusalDetails<'_>) -> Body,
    ) -> Response<Bytes> {
        let mut response = self.response(request);
        if let Some(details) = self.details() {
            let Body { content_type, bytes } = write_body(&details);
            response.headers_mut().insert(CONTENT_TYPE, content_type);
            *response.body_mut() = bytes;
        }
        response
    }

    /// Builds the gRPC response to a request of this [content type](grpc::content_type): gRPC status and message, the
    /// headers of [`Refusal::response`], and no body.
    pub fn grpc_response(&self, content_type: &HeaderValue) -> Response<Bytes> {
        let message = match self.details() {
            Some(details) => details.message(),
            None if self.verdict() == Verdict::PathTooLong => PATH_TOO_LONG.to_owned(),
            None => BANNED.to_owned(),
        };
        let (head, _) = self.response(&HeaderMap::new()).into_parts();
        grpc::refusal(self.verdict(), &message, head.headers, content_type)
    }

    /// Returns the input of custom bodies; `None` for a ban and for a path that is too long.
    fn details(&self) -> Option<RefusalDetails<'_>> {
        match self {
            Refusal::Denied { decision, policies } => Some(policies.refusal(decision)),
            Refusal::Unavailable { .. } => Some(RefusalDetails::unavailable()),
            Refusal::Banned { .. } | Refusal::PathTooLong { .. } => None,
        }
    }
}
