//! Properties that hold for any bytes that arrive on the HTTP listener.

use std::cell::RefCell;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};
use tidegate::Limiter;

use super::connection::read_body;
use super::fast_path::{ParsedHead, RequestHead};
use super::general::{AfterExchange, RequestBody, Supply, exchange, full_body};
use super::{BODY_BYTES_MAX, HttpListener};
use crate::listener::ConnectionContext;

/// The most bytes of a response body, whatever the request contains.
const RESPONSE_BYTES_MAX: usize = 64 * 1024;
/// Longer than anything takes here.
const IDLE: Duration = Duration::from_secs(60);

/// Runs a fuzz target on the beginning of a connection.
///
/// # Panics
/// If the fast path takes the bytes for a plain check and hyper reads them differently, or if a check is not answered
/// with JSON of bounded length.
pub fn any_bytes(bytes: &[u8]) {
    let ParsedHead::Complete(head) = RequestHead::parse(bytes) else { return };
    let body = head.body_at..head.end;
    if !head.is_plain {
        return;
    }
    assert!(body.start <= bytes.len(), "a body from {} of {} bytes on", body.start, bytes.len());
    // A request whose body is incomplete is covered by the same request with the whole body.
    let Some(check) = bytes.get(body.clone()) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let requests = runtime.block_on(read_by_hyper(&bytes[..body.end], body.start));
    let is_same = matches!(&requests[..], [(Method::POST, path, body)] if path == "/v1/check" && body == check);
    assert!(is_same, "hyper reads {requests:?}");

    let response = runtime.block_on(HttpListener::new(Limiter::memory(), IDLE).check_at_once(check));
    let Some(response) = response else { return };
    assert!(matches!(response.status().as_u16(), 200 | 400 | 429), "{response:?}");
    assert!(response.body().len() <= RESPONSE_BYTES_MAX, "{} bytes", response.body().len());
    assert!(serde_json::from_slice::<serde_json::Value>(response.body()).is_ok(), "{response:?}");
}

/// Returns the requests in these bytes, as the general path reads them. The body of the first begins at `body_at`.
async fn read_by_hyper(bytes: &[u8], body_at: usize) -> Vec<(Method, String, Bytes)> {
    let requests = RefCell::new(Vec::new());
    let handler = async |request: Request<RequestBody>| {
        let (head, body) = request.into_parts();
        if let Ok(body) = read_body(body, BODY_BYTES_MAX).await {
            requests.borrow_mut().push((head.method, head.uri.to_string(), body));
        }
        Response::new(full_body(Bytes::new()))
    };
    let (_stage, mut context) = ConnectionContext::unshared();
    let (_client, mut server) = tokio::io::duplex(RESPONSE_BYTES_MAX);
    let mut buffer = bytes.into();
    let after = exchange(Supply::Head(body_at), &mut server, &mut buffer, IDLE, &mut context, &handler).await;
    assert!(buffer.is_empty(), "hyper leaves {buffer:?}");
    assert!(matches!(after, Ok(AfterExchange::KeepAlive)), "a plain check is never the last request: {after:?}");
    requests.take()
}
