//! Time limits of a connection, on a clock that the test moves.

use std::sync::Arc;

use tidegate::Limiter;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::{Instant, sleep};

use super::*;
use crate::budget::EvictingBudget;
use crate::listeners::http::HttpListener;
use crate::listeners::http::general::full_body;
use crate::listeners::http::test_support::{IDLE, PEER};

/// The pause between two bytes of a slow client.
const STEP: Duration = Duration::from_secs(1);
const BODY: &str = r#"{"key":"a","limit":"10/min"}"#;

fn head(length: usize) -> String {
    format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n")
}

/// Returns the client's end of a connection to a listener of its own.
fn connect(limiter: &Limiter) -> DuplexStream {
    let (client, server) = tokio::io::duplex(64 * 1024);
    let listener = Arc::new(HttpListener::new(limiter.clone(), IDLE));
    tokio::spawn(async move {
        let (_stage, context) = ConnectionContext::unshared();
        drop(listener.serve_stream(server, PEER, context).await);
    });
    client
}

/// Sends a byte at a time with a pause after each, until the connection ends. Returns what was received.
async fn trickle(client: DuplexStream, text: String, step: Duration) -> String {
    let (mut reader, mut writer) = tokio::io::split(client);
    let sending = tokio::spawn(async move {
        for byte in text.bytes() {
            if writer.write_all(&[byte]).await.is_err() {
                return;
            }
            sleep(step).await;
        }
        std::future::pending::<()>().await;
    });
    let mut answer = String::new();
    let ended = tokio::time::timeout(20 * IDLE, reader.read_to_string(&mut answer)).await;
    assert!(ended.is_ok(), "the connection never ends; received {answer:?}");
    sending.abort();
    answer
}

async fn remaining(limiter: &Limiter) -> String {
    let mut client = connect(limiter);
    let peek = BODY.replace('}', r#","cost":0}"#);
    client.write_all(head(peek.len()).replace("host: x", "connection: close").as_bytes()).await.unwrap();
    client.write_all(peek.as_bytes()).await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    let (_, rest) = answer.split_once("\"remaining\":").expect("a decision");
    rest.split(',').next().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn a_body_that_arrives_too_slowly_is_rejected_and_charges_nothing() {
    let limiter = Limiter::memory();
    let mut client = connect(&limiter);
    client.write_all(head(BODY.len()).as_bytes()).await.unwrap();
    let start = Instant::now();
    let answer = trickle(client, BODY.to_owned(), STEP).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(answer.contains("the body did not arrive in time"), "{answer}");
    assert!((BODY_TIMEOUT..BODY_TIMEOUT + STEP).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert_eq!(remaining(&limiter).await, "10");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_arrives_slowly_but_in_time_is_answered() {
    let limiter = Limiter::memory();
    let mut client = connect(&limiter);
    client.write_all(head(BODY.len()).as_bytes()).await.unwrap();
    let step = BODY_TIMEOUT / (BODY.len() as u32 + 1);
    let answer = trickle(client, BODY.to_owned(), step).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(remaining(&limiter).await, "9");
}

/// Each byte ends the silence, but the header as a whole has a deadline.
#[tokio::test(start_paused = true)]
async fn a_header_that_arrives_too_slowly_ends_the_connection() {
    let client = connect(&Limiter::memory());
    let start = Instant::now();
    let endless = format!("POST /v1/check HTTP/1.1\r\nhost: {}", "x".repeat(600));
    let answer = trickle(client, endless, STEP).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!((IDLE..IDLE + 2 * STEP).contains(&start.elapsed()), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_closed() {
    let limiter = Limiter::memory();
    let start = Instant::now();
    assert_eq!(trickle(connect(&limiter), String::new(), STEP).await, "", "before its first request");
    assert_eq!(start.elapsed().as_secs(), IDLE.as_secs());

    let mut client = connect(&limiter);
    let start = Instant::now();
    client.write_all((head(BODY.len()) + BODY).as_bytes()).await.unwrap();
    let answer = trickle(client, String::new(), STEP).await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("]}"), "after an answer: {answer}");
    assert_eq!(start.elapsed().as_secs(), IDLE.as_secs());
}

/// A client that sends requests and never reads responses would otherwise hold its connection forever.
#[tokio::test(start_paused = true)]
async fn a_client_that_reads_no_responses_is_disconnected() {
    let mut client = connect(&Limiter::memory());
    let request = head(BODY.len()) + BODY;
    let sending = async { while client.write_all(request.as_bytes()).await.is_ok() {} };
    let start = Instant::now();
    tokio::time::timeout(10 * IDLE, sending).await.expect("the connection ends");
    assert!(start.elapsed() < 2 * IDLE, "{:?}", start.elapsed());
}

/// An instance may have ten thousand connections.
#[tokio::test]
async fn the_future_of_a_connection_is_small() {
    let (_client, server) = tokio::io::duplex(64);
    let (_stage, context) = ConnectionContext::unshared();
    let listener = HttpListener::new(Limiter::memory(), IDLE);
    let size = size_of_val(&listener.serve_stream(server, PEER, context));
    assert!(size < 4 * 1024, "{size} bytes");
}

/// A body that sends what it gets from a channel.
struct ChannelBody(tokio::sync::mpsc::UnboundedReceiver<&'static str>);

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, BoxError>>> {
        self.0.poll_recv(cx).map(|chunk| chunk.map(|chunk| Ok(hyper::body::Frame::data(chunk.into()))))
    }
}

/// Reads until the bytes so far end with `end`.
async fn read_until(client: &mut DuplexStream, end: &str) -> String {
    let mut received = Vec::new();
    let reading = async {
        while !received.ends_with(end.as_bytes()) {
            received.push(client.read_u8().await.expect("the connection is open"));
        }
    };
    let in_time = tokio::time::timeout(IDLE / 2, reading).await.is_ok();
    let received = String::from_utf8(received).unwrap();
    assert!(in_time, "{end:?} is not sent; received {received:?}");
    received
}

#[tokio::test(start_paused = true)]
async fn a_response_body_is_sent_as_it_is_produced_and_the_connection_continues() {
    let (mut client, server) = tokio::io::duplex(64 * 1024);
    let (chunks, body) = tokio::sync::mpsc::unbounded_channel();
    let body = parking_lot::Mutex::new(Some(body));
    tokio::spawn(async move {
        let (_stage, context) = ConnectionContext::unshared();
        let handler = |_: Request<RequestBody>| {
            let body =
                body.lock().take().map_or_else(|| full_body("after".into()), |body| ChannelBody(body).boxed_unsync());
            std::future::ready(Response::new(body))
        };
        drop(serve(server, IDLE, context, None, handler).await);
    });
    // The second request is there before the first is answered.
    client.write_all(&b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n".repeat(2)).await.unwrap();
    for (chunk, end) in [("one", "3\r\none\r\n"), ("three", "5\r\nthree\r\n")] {
        chunks.send(chunk).unwrap();
        let received = read_until(&mut client, end).await;
        assert_eq!(received.contains("transfer-encoding: chunked"), chunk == "one", "{received}");
    }
    drop(chunks);
    read_until(&mut client, "0\r\n\r\n").await;
    let next = read_until(&mut client, "\r\n\r\nafter").await;
    assert!(next.starts_with("HTTP/1.1 200 OK\r\n"), "{next}");
}

/// An admin listener with as many streams as it has slots would otherwise answer no probe.
#[tokio::test(start_paused = true)]
async fn a_streaming_connection_is_evicted_when_a_new_connection_needs_its_slot() {
    let slots = EvictingBudget::new(1, Arc::default());
    let slot = slots.reserve(1).await;
    let (mut client, server) = tokio::io::duplex(64 * 1024);
    let (chunks, body) = tokio::sync::mpsc::unbounded_channel();
    let body = parking_lot::Mutex::new(Some(body));
    tokio::spawn(async move {
        let (_stage, context) = ConnectionContext::unshared();
        let handler = |_: Request<RequestBody>| {
            std::future::ready(Response::new(ChannelBody(body.lock().take().unwrap()).boxed_unsync()))
        };
        drop(serve(server, IDLE, ConnectionContext { slot, ..context }, None, handler).await);
    });
    client.write_all(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    chunks.send("one").unwrap();
    read_until(&mut client, "3\r\none\r\n").await;
    let reserved = tokio::time::timeout(STEP, slots.reserve(1)).await.expect("the slot is given back");
    assert!(reserved.is_some());
    assert_eq!(client.read(&mut [0]).await.unwrap(), 0, "the stream has ended");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_stops_the_producer_of_a_body() {
    struct Endless(Arc<std::sync::atomic::AtomicUsize>);

    impl Body for Endless {
        type Data = Bytes;
        type Error = BoxError;

        fn poll_frame(
            self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, BoxError>>> {
            self.0.fetch_add(1_024, std::sync::atomic::Ordering::Relaxed);
            std::task::Poll::Ready(Some(Ok(hyper::body::Frame::data(Bytes::from_static(&[b'x'; 1_024])))))
        }
    }

    let (mut client, server) = tokio::io::duplex(64 * 1024);
    let produced = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let body = produced.clone();
    let start = Instant::now();
    let serving = tokio::spawn(async move {
        let (_stage, context) = ConnectionContext::unshared();
        let handler = |_: Request<RequestBody>| std::future::ready(Response::new(Endless(body.clone()).boxed_unsync()));
        serve(server, IDLE, context, None, handler).await
    });
    client.write_all(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let error = serving.await.unwrap().expect_err("the client accepts nothing");
    assert_eq!(error.downcast_ref::<std::io::Error>().map(std::io::Error::kind), Some(std::io::ErrorKind::TimedOut));
    assert!((IDLE..IDLE + STEP).contains(&start.elapsed()), "{:?}", start.elapsed());
    let produced = produced.load(std::sync::atomic::Ordering::Relaxed);
    assert!(produced < 512 * 1024, "{produced} bytes for a client that reads none");
}

#[test]
fn a_message_that_quotes_a_large_input_is_cut() {
    let name = "é".repeat(500_000);
    let message = format!("unknown field `{name}`, expected one of `key`, `limit`, `cost`");
    let response = super::problem(http::StatusCode::BAD_REQUEST, "bad_request", &message);
    let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
    let shown = body["message"].as_str().unwrap();
    assert!(shown.starts_with("unknown field `éé") && shown.ends_with("é`, expected one of `key`, `limit`, `cost`"));
    assert!(shown.contains("é…é") && shown.chars().count() < 500, "{shown}");
    let short = super::problem(http::StatusCode::BAD_REQUEST, "bad_request", "short");
    assert_eq!(&short.body()[..], br#"{"error":"bad_request","message":"short"}"#);
}
