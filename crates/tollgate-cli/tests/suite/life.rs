//! Start and shutdown.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::serving::{Client, Serving, command};
use tollgate_testkit::server::Server;

const QUESTION: &str = r#"{"key":"user:42","limit":"1000/h"}"#;

#[test]
fn with_the_memory_store_serve_is_ready_at_once() {
    let serving = Serving::start(&[]);
    let ready = serving.visit("/readyz");
    assert_eq!(ready.status, 200, "{ready:?}");
    assert!(ready.body.contains(r#""ready":true"#) && ready.body.contains(r#""kind":"memory""#), "{ready:?}");
    assert_eq!(serving.visit("/healthz").status, 200);
}

#[test]
fn serve_starts_while_redis_is_down_and_is_ready_after_redis_is_up() {
    let redis = Server::redis();
    redis.kill9();
    let serving = Serving::start(&["--store", &redis.url()]);
    let away = serving.visit("/readyz");
    assert_eq!(away.status, 503, "{away:?}");
    assert!(away.body.contains(r#""reachable":false"#), "{away:?}");
    assert_eq!(serving.visit("/healthz").status, 200, "alive all the same");
    (0..5).for_each(|_| assert_eq!(serving.check(QUESTION).status, 200, "answers from its share"));
    assert!(serving.visit("/readyz").body.contains(r#""breaker":"open""#));

    redis.restart();
    let there = serving.until("/readyz", |answer| answer.status == 200);
    assert!(there.body.contains(r#""reachable":true"#) && there.body.contains(r#""breaker":"closed""#), "{there:?}");
    assert!(serving.check(QUESTION).body.contains(r#""source":"store""#));

    redis.kill9();
    serving.until("/readyz", |answer| answer.status == 503);
    redis.restart();
    serving.until("/readyz", |answer| answer.status == 200);
}

#[test]
fn after_sigterm_readyz_fails_while_requests_are_still_served() {
    let serving = Serving::start(&["--drain", "1h"]);
    let mut inside = Client::open(&serving.http);
    assert_eq!(inside.ask("POST", "/v1/check", &[], QUESTION).status, 200);
    serving.signal("TERM");
    let leaving = serving.until("/readyz", |answer| answer.status == 503);
    assert!(leaving.body.contains(r#""shutting_down":true"#), "{leaving:?}");
    assert_eq!(serving.visit("/healthz").status, 200);
    assert_eq!(inside.ask("POST", "/v1/check", &[], QUESTION).status, 200, "on an open connection");
    assert_eq!(serving.check(QUESTION).status, 200, "and on a new one");
}

#[test]
fn serve_exits_with_zero_after_the_drain_time() {
    let mut serving = Serving::start(&["--drain", "100ms"]);
    serving.signal("TERM");
    assert_eq!(serving.end().code(), Some(0));
}

#[test]
fn a_request_that_was_started_before_shutdown_is_answered() {
    let mut serving = Serving::start(&["--drain", "0s"]);
    let mut http = Client::open(&serving.http);
    // A connection that got a response was accepted; one that only connected may still be in the queue.
    assert_eq!(http.ask("POST", "/v1/check", &[], QUESTION).status, 200);
    let half = format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", QUESTION.len());
    http.raw(half.as_bytes());
    let mut resp = TcpStream::connect(&serving.resp).unwrap();
    resp.write_all(b"PING\r\n").unwrap();
    let mut pong = [0; 7];
    resp.read_exact(&mut pong).unwrap();

    serving.signal("TERM");
    serving.hear("shutting down");
    let mut rest = String::new();
    resp.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "", "an idle connection is closed, not reset");
    http.raw(QUESTION.as_bytes());
    let answer = http.hear().expect("a request that was started is answered");
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(http.hear().is_none(), "and it was the last");
    assert_eq!(serving.end().code(), Some(0));
}

#[test]
fn a_second_signal_exits_at_once() {
    let mut serving = Serving::start(&["--drain", "1h"]);
    serving.signal("TERM");
    serving.hear("shutting down");
    serving.signal("INT");
    assert_eq!(serving.end().code(), Some(1));
}

#[test]
fn a_connection_over_the_limit_is_rejected_with_an_answer() {
    let serving = Serving::start(&["--connections", "2"]);
    let mut inside: Vec<Client> = (0..2).map(|_| Client::open(&serving.http)).collect();
    inside.iter_mut().for_each(|client| assert_eq!(client.ask("POST", "/v1/check", &[], QUESTION).status, 200));
    let refused = Client::open(&serving.http).hear().expect("an answer");
    assert_eq!((refused.status, refused.headers["connection"].as_str()), (503, "close"));
    let resp: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(&serving.resp).unwrap()).collect();
    let mut said = String::new();
    TcpStream::connect(&serving.resp).unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "-ERR max number of clients reached\r\n");
    let metrics = serving.visit("/metrics").body;
    assert!(metrics.contains("tollgate_connections_refused_total{door=\"http\"} 1\n"), "{metrics}");
    assert!(metrics.contains("tollgate_connections{door=\"http\"} 2\n"), "{metrics}");
    drop((inside, resp));
    serving.until("/metrics", |answer| answer.body.contains("tollgate_connections{door=\"http\"} 0\n"));
    assert_eq!(serving.check(QUESTION).status, 200, "a place is free again");
}

#[test]
fn an_idle_connection_is_closed() {
    let serving = Serving::start(&["--idle", "1s"]);
    let mut http = Client::open(&serving.http);
    assert_eq!(http.ask("POST", "/v1/check", &[], QUESTION).status, 200);
    assert!(http.hear().is_none(), "a connection that asks nothing more");
    let mut slow = Client::open(&serving.http);
    slow.raw(b"POST /v1/check HTTP/1.1\r\nhost:");
    let shown_out = slow.hear();
    assert!(shown_out.is_none_or(|answer| answer.status == 408), "a header that does not come to its end");
    let mut resp = TcpStream::connect(&serving.resp).unwrap();
    resp.write_all(b"*1\r\n$4\r\nPI").unwrap();
    let mut rest = String::new();
    resp.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "");
}

#[test]
fn a_request_that_is_too_large_is_refused() {
    let serving = Serving::start(&[]);
    let mut http = Client::open(&serving.http);
    let long = "x".repeat(1024 * 1024);
    http.raw(format!("POST /v1/check HTTP/1.1\r\nhost: x\r\nx-long: {long}\r\n\r\n").as_bytes());
    // The listener stops reading in the middle of the request, so the response may be lost.
    assert!(http.hear().is_none_or(|answer| answer.status == 431));
    let large = format!(r#"{{"key":"{}","limit":"1/s"}}"#, "k".repeat(600 * 1024));
    let mut http = Client::open(&serving.http);
    assert_eq!(http.ask("POST", "/v1/check", &[], &large).status, 413);
    let mut admin = Client::open(&serving.admin);
    admin.raw(format!("GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: {long}\r\n\r\n").as_bytes());
    assert!(admin.hear().is_none_or(|answer| answer.status == 431));
    assert_eq!(serving.check(QUESTION).status, 200, "it still serves");
}

#[test]
fn a_listener_can_be_off_and_an_address_in_use_is_reported() {
    let serving = Serving::start(&[]);
    let output =
        command().args(["serve", "--http", &serving.http, "--resp", "off", "--admin", "off"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("--http ADDRESS") && said.contains(&serving.http), "{said}");
}
