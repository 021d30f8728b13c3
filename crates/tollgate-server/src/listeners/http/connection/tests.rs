//! Whoever takes too long is shown out, by a clock that the test moves.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::{Instant, sleep};
use tollgate::Limiter;

use super::*;
use crate::listeners::http::HttpListener;

const IDLE: Duration = Duration::from_secs(60);
/// Between two pieces of what comes slowly.
const STEP: Duration = Duration::from_secs(1);
const BODY: &str = r#"{"key":"a","limit":"10/min"}"#;

fn head(length: usize) -> String {
    format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n")
}

/// The client's end of a connection to a door.
fn connect(limiter: &Limiter) -> DuplexStream {
    let (client, server) = tokio::io::duplex(64 * 1024);
    let door = Arc::new(HttpListener::new(limiter.clone()));
    tokio::spawn(async move {
        let (_open, context) = Context::alone();
        drop(door.serve(server, IDLE, context).await);
    });
    client
}

/// Sends a byte at a time with a pause after each, until the door closes or all is sent; then what was answered.
async fn trickle(client: DuplexStream, text: String, step: Duration) -> String {
    let (mut hearing, mut speaking) = tokio::io::split(client);
    let speaking = tokio::spawn(async move {
        for byte in text.bytes() {
            if speaking.write_all(&[byte]).await.is_err() {
                return;
            }
            sleep(step).await;
        }
        std::future::pending::<()>().await;
    });
    let mut answer = String::new();
    let heard = tokio::time::timeout(20 * IDLE, hearing.read_to_string(&mut answer)).await;
    assert!(heard.is_ok(), "the door never closes; so far it said {answer:?}");
    speaking.abort();
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
async fn a_body_that_trickles_is_refused_after_its_time_and_charges_nothing() {
    let limiter = Limiter::memory();
    let mut client = connect(&limiter);
    client.write_all(head(BODY.len()).as_bytes()).await.unwrap();
    let start = Instant::now();
    let answer = trickle(client, BODY.to_owned(), STEP).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(answer.contains("the body did not come in time"), "{answer}");
    assert!((BODY_WITHIN..BODY_WITHIN + STEP).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert_eq!(remaining(&limiter).await, "10");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_comes_slowly_but_in_time_is_answered() {
    let limiter = Limiter::memory();
    let mut client = connect(&limiter);
    client.write_all(head(BODY.len()).as_bytes()).await.unwrap();
    let step = BODY_WITHIN / (BODY.len() as u32 + 1);
    let answer = trickle(client, BODY.to_owned(), step).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(remaining(&limiter).await, "9");
}

/// Each byte is a sign of life, but the header as a whole has its time.
#[tokio::test(start_paused = true)]
async fn a_header_that_trickles_is_shown_out_after_its_time() {
    let client = connect(&Limiter::memory());
    let start = Instant::now();
    let endless = format!("POST /v1/check HTTP/1.1\r\nhost: {}", "x".repeat(600));
    let answer = trickle(client, endless, STEP).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!((IDLE..IDLE + 2 * STEP).contains(&start.elapsed()), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_connection_on_which_nothing_is_asked_is_closed_after_its_time() {
    let limiter = Limiter::memory();
    let start = Instant::now();
    assert_eq!(trickle(connect(&limiter), String::new(), STEP).await, "", "before its first question");
    assert_eq!(start.elapsed().as_secs(), IDLE.as_secs());

    let mut client = connect(&limiter);
    let start = Instant::now();
    client.write_all((head(BODY.len()) + BODY).as_bytes()).await.unwrap();
    let answer = trickle(client, String::new(), STEP).await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("]}"), "after an answer: {answer}");
    assert_eq!(start.elapsed().as_secs(), IDLE.as_secs());
}

/// One who asks and asks, and never reads what is answered, would hold a place for ever.
#[tokio::test(start_paused = true)]
async fn a_client_that_reads_no_answers_is_let_go() {
    let mut client = connect(&Limiter::memory());
    let question = head(BODY.len()) + BODY;
    let asking = async { while client.write_all(question.as_bytes()).await.is_ok() {} };
    let start = Instant::now();
    tokio::time::timeout(10 * IDLE, asking).await.expect("the door closes");
    assert!(start.elapsed() < 2 * IDLE, "{:?}", start.elapsed());
}

/// There may be ten thousand of them.
#[tokio::test]
async fn a_connection_takes_little_room() {
    let (_client, server) = tokio::io::duplex(64);
    let (_open, context) = Context::alone();
    let door = HttpListener::new(Limiter::memory());
    let size = size_of_val(&door.serve(server, IDLE, context));
    assert!(size < 4 * 1024, "{size} bytes");
}
