//! `TIDEGATE.REQUEST`: decides a described request by the rules.
//!
//! ```text
//!   TIDEGATE.REQUEST method path peer [name value ...]
//!   ──▶ [allowed, status, retry_after_ms, rule, plan, [[name, value] ...], body]
//! ```
//!
//! The reply has everything that the Tower layer would send for this request: the whole response to a refused one, and the
//! headers to add to the response to an admitted one. A caller that relays it needs to know nothing about rules.

use std::net::IpAddr;

use http::{HeaderMap, Request, StatusCode};
use tidegate::engine::{Outcome, Permit, Refusal, RequestOptions};
use tokio::io::{AsyncRead, AsyncWrite};

use super::RespConnection;
use super::check::saturating;
use super::command::usage;
use super::frame::Args;
use super::reply::Replies;
use crate::listeners::described::{DescriptionError, HeaderLines, described_request, peer_address};
use crate::stream::Cork;

const NO_RULES: &str =
    "ERR this instance has no rules; start it with --config FILE, or send TIDEGATE.CHECK with keys and limits";

/// Parses `TIDEGATE.REQUEST` into a request and the address of its peer. `Err` is the error reply.
pub(super) fn parse_request(buffer: &[u8], args: &Args) -> Result<(Request<()>, IpAddr), String> {
    let arg = |index| args.get(buffer, index).unwrap_or_default();
    let count = args.len();
    if count < 4 || count % 2 == 1 {
        return Err(usage("TIDEGATE.REQUEST method path peer [name value ...]"));
    }
    let parse = || {
        let peer = peer_address(arg(3))?;
        let mut lines = HeaderLines::default();
        for index in (4..count).step_by(2) {
            let name = lines.name(arg(index))?;
            lines.add(name, arg(index + 1))?;
        }
        Ok((described_request(arg(1), arg(2), lines.headers)?, peer))
    };
    parse().map_err(|error: DescriptionError| format!("ERR {error}"))
}

impl<S: AsyncRead + AsyncWrite + Cork + Unpin> RespConnection<S> {
    /// Decides a described request by the rules, and appends the reply.
    ///
    /// Charges are kept, because the client does not report how the request ends.
    pub(super) async fn request(&mut self, request: &Request<()>, peer: IpAddr) {
        let decider = &self.listener.decider;
        if decider.rules().is_none() {
            return self.replies.error(NO_RULES);
        }
        match decider.check_request(request, peer, RequestOptions::default()).await {
            Outcome::Admitted(permit) => {
                reply_admitted(&permit, &mut self.replies);
                permit.keep();
            }
            Outcome::Refused(refusal) => reply_refused(&refusal, request.headers(), &mut self.replies),
        }
    }
}

/// Appends the reply to an admitted request: status 200, the delay of a leaky bucket, and the headers to add.
fn reply_admitted(permit: &Permit, replies: &mut Replies) {
    let mut headers = HeaderMap::new();
    permit.write_headers(&mut headers);
    let delay_ms = permit.wait().as_micros().div_ceil(1_000);
    replies.array(7);
    replies.integer(1);
    replies.integer(StatusCode::OK.as_u16().into());
    replies.integer(i64::try_from(delay_ms).unwrap_or(i64::MAX));
    replies.null();
    replies.null();
    reply_headers(&headers, replies);
    replies.bulk(b"");
}

/// Appends the reply to a refused request: the response to send. `request` holds the request's headers.
fn reply_refused(refusal: &Refusal, request: &HeaderMap, replies: &mut Replies) {
    let response = refusal.response_to(request);
    let fields = refusal.fields();
    replies.array(7);
    replies.integer(0);
    replies.integer(response.status().as_u16().into());
    replies.integer(fields.retry_after_ms().map_or(-1, saturating));
    for name in [fields.rule(), fields.plan()] {
        match name {
            Some(name) => replies.bulk(name.as_bytes()),
            None => replies.null(),
        }
    }
    reply_headers(response.headers(), replies);
    replies.bulk(response.body());
}

fn reply_headers(headers: &HeaderMap, replies: &mut Replies) {
    replies.array(headers.len());
    for (name, value) in headers {
        replies.array(2);
        replies.bulk(name.as_str().as_bytes());
        replies.bulk(value.as_bytes());
    }
}
