//! What must hold for any bytes whatever that arrive at the door.

use std::cell::RefCell;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};
use tollgate::Limiter;

use super::connection::read_body;
use super::fast_path::usual;
use super::general::{RequestBody, exchange};
use super::{BODY_BYTES_MAX, HttpListener};
use crate::accept::Context;

/// The longest that an answer may grow, whatever was asked: it goes back over the wire.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// Nobody waits for anything here.
const IDLE: Duration = Duration::from_secs(60);

/// The whole of a fuzz target: takes what the fuzzer invents, as the beginning of a connection, and panics when something is wrong with it.
///
/// # Panics
/// When what is taken for a usual request is another one for hyper, or when a question is not answered with JSON.
pub fn any_bytes(bytes: &[u8]) {
    let Some(body) = usual(bytes) else { return };
    assert!(body.start <= bytes.len(), "a body from {} of {} bytes on", body.start, bytes.len());
    // One whose body is still to come is the same request once it is there.
    let Some(question) = bytes.get(body.clone()) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let heard = runtime.block_on(read_by_hyper(&bytes[..body.end]));
    let is_same = matches!(&heard[..], [(Method::POST, path, body)] if path == "/v1/check" && body == question);
    assert!(is_same, "hyper reads {heard:?}");

    let answer = runtime.block_on(HttpListener::new(Limiter::memory()).check(question));
    assert!(matches!(answer.status().as_u16(), 200 | 400 | 429), "{answer:?}");
    assert!(answer.body().len() <= ANSWER_BYTES_MAX, "{} bytes", answer.body().len());
    assert!(serde_json::from_slice::<serde_json::Value>(answer.body()).is_ok(), "{answer:?}");
}

/// The requests in these bytes, as the long way understands them.
async fn read_by_hyper(bytes: &[u8]) -> Vec<(Method, String, Bytes)> {
    let heard = RefCell::new(Vec::new());
    let answer = async |request: Request<RequestBody>| {
        let (head, body) = request.into_parts();
        if let Ok(body) = read_body(body, BODY_BYTES_MAX).await {
            heard.borrow_mut().push((head.method, head.uri.to_string(), body));
        }
        Response::new(Bytes::new())
    };
    let (_open, context) = Context::alone();
    let (_, is_last) = exchange(Bytes::copy_from_slice(bytes), false, IDLE, &context, &answer).await;
    assert!(!is_last, "a usual request is never the last");
    heard.take()
}
