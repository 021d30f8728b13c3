//! Maps each verdict to HTTP, gRPC and RESP.
//!
//! A denial or a ban is a decision, not an error: in RESP it is an ordinary reply, so it has no error code. An unavailable
//! store is never reported as a denial: a client that receives 429 has to slow down, one that receives 503 does not.

use http::StatusCode;

/// The outcome of a request: allowed, denied, banned, or an error.
///
/// Its methods return the status or error code of the outcome in each protocol.
///
/// ```
/// use tidegate::answer::{GrpcCode, Verdict};
///
/// assert_eq!(Verdict::Denied.http(), 429);
/// assert_eq!(Verdict::Denied.grpc(), GrpcCode::ResourceExhausted);
/// assert_eq!(Verdict::Unavailable.resp(), Some("UNAVAILABLE"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Verdict {
    /// Every limit admitted the request. HTTP 200, gRPC `OK`.
    Allowed,
    /// At least one limit denied the request. HTTP 429, gRPC `RESOURCE_EXHAUSTED`.
    Denied,
    /// A ban refused the request. Its limits were not considered. HTTP 403, gRPC `PERMISSION_DENIED`.
    Banned,
    /// The store did not answer, and the failure policy is to refuse. HTTP 503, gRPC `UNAVAILABLE`.
    Unavailable,
    /// The path is longer than accepted. HTTP 414, gRPC `INVALID_ARGUMENT`.
    PathTooLong,
    /// Tidegate itself failed. HTTP 500, gRPC `INTERNAL`.
    Internal,
}

/// The error name of one verdict in JSON bodies, and its codes in HTTP, gRPC and RESP.
struct Row {
    error: &'static str,
    http: StatusCode,
    grpc: GrpcCode,
    resp: Option<&'static str>,
}

impl Verdict {
    /// All verdicts.
    pub const ALL: [Verdict; 6] = [
        Verdict::Allowed,
        Verdict::Denied,
        Verdict::Banned,
        Verdict::Unavailable,
        Verdict::PathTooLong,
        Verdict::Internal,
    ];

    #[rustfmt::skip]
    const fn row(self) -> Row {
        use GrpcCode as G;
        use StatusCode as H;
        let (error, http, grpc, resp) = match self {
            //                            error in bodies     HTTP                        gRPC                   RESP
            Verdict::Allowed         => ("allowed",           H::OK,                    G::Ok,                None),
            Verdict::Denied          => ("rate_limited",      H::TOO_MANY_REQUESTS,     G::ResourceExhausted, None),
            Verdict::Banned          => ("banned",            H::FORBIDDEN,             G::PermissionDenied,  None),
            Verdict::Unavailable     => ("unavailable",       H::SERVICE_UNAVAILABLE,   G::Unavailable,       Some("UNAVAILABLE")),
            Verdict::PathTooLong     => ("path_too_long",     H::URI_TOO_LONG,          G::InvalidArgument,   Some("ERR")),
            Verdict::Internal        => ("internal",          H::INTERNAL_SERVER_ERROR, G::Internal,          Some("ERR")),
        };
        Row { error, http, grpc, resp }
    }

    /// Returns the value of the field `error` in JSON bodies, for example `rate_limited`.
    pub const fn error(self) -> &'static str {
        self.row().error
    }

    /// Returns the HTTP status.
    pub const fn http(self) -> StatusCode {
        self.row().http
    }

    /// Returns the gRPC status code.
    pub const fn grpc(self) -> GrpcCode {
        self.row().grpc
    }

    /// Returns the code at the beginning of the RESP error, without the dash, such as `UNAVAILABLE`.
    ///
    /// `None` for `Allowed`, `Denied` and `Banned`, which RESP reports in an ordinary reply.
    pub const fn resp(self) -> Option<&'static str> {
        self.row().resp
    }
}

/// A gRPC status code that a [`Verdict`] maps to, with its number in the gRPC specification.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(i32)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are those of the specification
pub enum GrpcCode {
    Ok = 0,
    InvalidArgument = 3,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    Internal = 13,
    Unavailable = 14,
}

tidegate_core::__names! {
    "gRPC status code" GrpcCode {
        Ok = "OK",
        InvalidArgument = "INVALID_ARGUMENT",
        PermissionDenied = "PERMISSION_DENIED",
        ResourceExhausted = "RESOURCE_EXHAUSTED",
        Internal = "INTERNAL",
        Unavailable = "UNAVAILABLE",
    }
}

impl GrpcCode {
    /// Returns the number of the code in the gRPC specification, such as 8 for `ResourceExhausted`.
    pub const fn number(self) -> i32 {
        self as i32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unavailable_store_is_never_reported_as_a_denial_in_any_protocol() {
        let row = |verdict: Verdict| (verdict.http().as_u16(), verdict.grpc().as_str(), verdict.resp());
        assert_eq!(row(Verdict::Denied), (429, "RESOURCE_EXHAUSTED", None));
        assert_eq!(row(Verdict::Unavailable), (503, "UNAVAILABLE", Some("UNAVAILABLE")));
        for verdict in Verdict::ALL.into_iter().filter(|verdict| *verdict != Verdict::Denied) {
            assert_ne!(verdict.http(), 429, "{verdict:?}");
            assert_ne!(verdict.grpc(), GrpcCode::ResourceExhausted, "{verdict:?}");
            assert_ne!(verdict.error(), "rate_limited", "{verdict:?}");
        }
    }

    #[test]
    fn only_decisions_have_no_resp_error_and_only_allowed_is_a_success() {
        for verdict in Verdict::ALL {
            let is_answer = matches!(verdict, Verdict::Allowed | Verdict::Denied | Verdict::Banned);
            assert_eq!(verdict.resp().is_none(), is_answer, "{verdict:?}");
            assert_eq!(verdict.http().is_success(), verdict == Verdict::Allowed, "{verdict:?}");
            assert_eq!(verdict.grpc().number() == 0, verdict == Verdict::Allowed, "{verdict:?}");
        }
    }
}
