//! Start and shutdown.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::io::{Read, Write};
use std::net::TcpStream;

use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::{Serving, command};
use tidegate_testkit::server::Server;

const CHECK: &str = r#"{"key":"user:42","limit":"1000/h"}"#;

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
    let down = serving.visit("/readyz");
    assert_eq!(down.status, 503, "{down:?}");
    assert!(down.body.contains(r#""reachable":false"#), "{down:?}");
    assert_eq!(serving.visit("/healthz").status, 200, "the process is alive");
    (0..5).for_each(|_| assert_eq!(serving.check(CHECK).status, 200, "decided by the local share"));
    assert!(serving.visit("/readyz").body.contains(r#""breaker":"open""#));

    redis.restart();
    let up = serving.until("/readyz", |answer| answer.status == 200);
    assert!(up.body.contains(r#""reachable":true"#) && up.body.contains(r#""breaker":"closed""#), "{up:?}");
    assert!(serving.check(CHECK).body.contains(r#""source":"store""#));

    redis.kill9();
    serving.until("/readyz", |answer| answer.status == 503);
    redis.restart();
    serving.until("/readyz", |answer| answer.status == 200);
}

#[test]
fn after_sigterm_readyz_fails_while_requests_are_still_served() {
    let serving = Serving::start(&["--drain", "1h"]);
    let mut open = HttpClient::open(&serving.http);
    assert_eq!(open.ask("POST", "/v1/check", &[], CHECK).status, 200);
    serving.signal("TERM");
    let draining = serving.until("/readyz", |answer| answer.status == 503);
    assert!(draining.body.contains(r#""shutting_down":true"#), "{draining:?}");
    assert_eq!(serving.visit("/healthz").status, 200);
    assert_eq!(open.ask("POST", "/v1/check", &[], CHECK).status, 200, "on an open connection");
    assert_eq!(serving.check(CHECK).status, 200, "on a new connection");
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
    let mut http = HttpClient::open(&serving.http);
    // A connection that got a response was accepted; one that only connected may still be in the queue.
    assert_eq!(http.ask("POST", "/v1/check", &[], CHECK).status, 200);
    let half = format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", CHECK.len());
    http.raw(half.as_bytes());
    let mut resp = TcpStream::connect(&serving.resp).unwrap();
    resp.write_all(b"PING\r\n").unwrap();
    let mut pong = [0; 7];
    resp.read_exact(&mut pong).unwrap();

    serving.signal("TERM");
    serving.wait_for_log("shutting down");
    let mut rest = String::new();
    resp.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "", "an idle connection is closed, not reset");
    http.raw(CHECK.as_bytes());
    let answer = http.receive().expect("a request that was started is answered");
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(http.receive().is_none(), "the connection is closed after this response");
    assert_eq!(serving.end().code(), Some(0));
}

#[test]
fn a_second_signal_exits_at_once() {
    let mut serving = Serving::start(&["--drain", "1h"]);
    serving.signal("TERM");
    serving.wait_for_log("shutting down");
    serving.signal("INT");
    assert_eq!(serving.end().code(), Some(1));
}

#[test]
fn a_connection_over_the_limit_is_rejected_with_an_answer() {
    let serving = Serving::start(&["--connections", "2"]);
    let mut open: Vec<HttpClient> = (0..2).map(|_| HttpClient::open(&serving.http)).collect();
    open.iter_mut().for_each(|client| assert_eq!(client.ask("POST", "/v1/check", &[], CHECK).status, 200));
    let refused = HttpClient::open(&serving.http).receive().expect("an answer");
    assert_eq!((refused.status, refused.headers["connection"].as_str()), (503, "close"));
    let resp: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(&serving.resp).unwrap()).collect();
    let mut said = String::new();
    TcpStream::connect(&serving.resp).unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "-ERR max number of clients reached\r\n");
    let metrics = serving.visit("/metrics").body;
    assert!(metrics.contains("tidegate_connections_refused_total{listener=\"http\"} 1\n"), "{metrics}");
    assert!(metrics.contains("tidegate_connections{listener=\"http\"} 2\n"), "{metrics}");
    drop((open, resp));
    serving.until("/metrics", |answer| answer.body.contains("tidegate_connections{listener=\"http\"} 0\n"));
    assert_eq!(serving.check(CHECK).status, 200, "a closed connection makes room for another");
}

#[test]
fn an_idle_connection_is_closed() {
    let serving = Serving::start(&["--idle", "1s"]);
    let mut http = HttpClient::open(&serving.http);
    assert_eq!(http.ask("POST", "/v1/check", &[], CHECK).status, 200);
    assert!(http.receive().is_none(), "an idle connection is closed");
    let mut slow = HttpClient::open(&serving.http);
    slow.raw(b"POST /v1/check HTTP/1.1\r\nhost:");
    let timed_out = slow.receive();
    assert!(timed_out.is_none_or(|answer| answer.status == 408), "an unfinished header");
    let mut resp = TcpStream::connect(&serving.resp).unwrap();
    resp.write_all(b"*1\r\n$4\r\nPI").unwrap();
    let mut rest = String::new();
    resp.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "");
}

#[test]
fn a_request_that_is_too_large_is_refused() {
    let serving = Serving::start(&[]);
    let mut http = HttpClient::open(&serving.http);
    let long = "x".repeat(1024 * 1024);
    http.raw(format!("POST /v1/check HTTP/1.1\r\nhost: x\r\nx-long: {long}\r\n\r\n").as_bytes());
    // The listener stops reading in the middle of the request, so the response may be lost.
    assert!(http.receive().is_none_or(|answer| answer.status == 431));
    let large = format!(r#"{{"key":"{}","limit":"1/s"}}"#, "k".repeat(600 * 1024));
    let mut http = HttpClient::open(&serving.http);
    assert_eq!(http.ask("POST", "/v1/check", &[], &large).status, 413);
    let mut admin = HttpClient::open(&serving.admin);
    admin.raw(format!("GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: {long}\r\n\r\n").as_bytes());
    assert!(admin.receive().is_none_or(|answer| answer.status == 431));
    assert_eq!(serving.check(CHECK).status, 200, "other requests are served");
}

#[test]
fn an_address_in_use_is_reported_with_the_option_to_change() {
    let serving = Serving::start(&[]);
    let output =
        command().args(["serve", "--http", &serving.http, "--resp", "off", "--admin", "off"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    let expected = format!("cannot open the http listener on {}: address already in use", serving.http);
    assert!(said.contains(&expected) && said.contains("--http ADDRESS"), "{said}");
}
