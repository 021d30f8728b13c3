//! Beginning and ending: ready when it is, gone when it said so.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::serving::{Client, Serving, command};
use tollgate_testkit::server::Server;

const QUESTION: &str = r#"{"key":"user:42","limit":"1000/h"}"#;

#[test]
fn in_memory_it_is_ready_from_the_start() {
    let serving = Serving::start(&[]);
    let ready = serving.visit("/readyz");
    assert_eq!(ready.status, 200, "{ready:?}");
    assert!(ready.body.contains(r#""ready":true"#) && ready.body.contains(r#""kind":"memory""#), "{ready:?}");
    assert_eq!(serving.visit("/healthz").status, 200);
}

#[test]
fn it_starts_while_redis_is_down_says_so_and_is_ready_soon_after_redis_is_up() {
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
fn told_to_end_it_first_says_that_it_is_leaving_and_serves_on_meanwhile() {
    let mut serving = Serving::start(&["--drain", "700ms"]);
    let mut inside = Client::open(&serving.http);
    assert_eq!(inside.ask("POST", "/v1/check", &[], QUESTION).status, 200);
    serving.signal("TERM");
    let leaving = serving.until("/readyz", |answer| answer.status == 503);
    assert!(leaving.body.contains(r#""shutting_down":true"#), "{leaving:?}");
    assert_eq!(serving.visit("/healthz").status, 200);
    assert_eq!(inside.ask("POST", "/v1/check", &[], QUESTION).status, 200, "those inside are served");
    assert_eq!(serving.check(QUESTION).status, 200, "and so are those who come while it drains");
    assert_eq!(serving.end().code(), Some(0));
}

#[test]
fn whoever_is_inside_when_the_doors_close_gets_an_answer() {
    let mut serving = Serving::start(&["--drain", "0s"]);
    let mut http = Client::open(&serving.http);
    // Who has heard an answer is inside; a connection by itself may still be waiting for the door to open.
    assert_eq!(http.ask("POST", "/v1/check", &[], QUESTION).status, 200);
    let half = format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", QUESTION.len());
    http.raw(half.as_bytes());
    let mut resp = TcpStream::connect(&serving.resp).unwrap();
    resp.write_all(b"PING\r\n").unwrap();
    let mut pong = [0; 7];
    resp.read_exact(&mut pong).unwrap();

    serving.signal("TERM");
    serving.hear("closing the doors");
    let mut rest = String::new();
    resp.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "", "an idle connection is closed, not reset");
    http.raw(QUESTION.as_bytes());
    let answer = http.hear().expect("a question that was begun is answered");
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(http.hear().is_none(), "and it was the last");
    assert_eq!(serving.end().code(), Some(0));
}

#[test]
fn told_twice_it_ends_at_once() {
    let mut serving = Serving::start(&["--drain", "1h"]);
    serving.signal("TERM");
    serving.hear("closing the doors");
    serving.signal("INT");
    assert_eq!(serving.end().code(), Some(1));
}

#[test]
fn a_door_lets_in_as_many_as_it_has_places_and_tells_the_next_one() {
    let serving = Serving::start(&["--connections", "2"]);
    let mut inside: Vec<Client> = (0..2).map(|_| Client::open(&serving.http)).collect();
    inside.iter_mut().for_each(|client| assert_eq!(client.ask("POST", "/v1/check", &[], QUESTION).status, 200));
    let refused = Client::open(&serving.http).hear().expect("it is told");
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
fn whoever_is_silent_for_too_long_is_shown_out() {
    let serving = Serving::start(&["--idle", "200ms"]);
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
fn what_is_larger_than_any_question_is_refused() {
    let serving = Serving::start(&[]);
    let mut http = Client::open(&serving.http);
    let long = "x".repeat(1024 * 1024);
    http.raw(format!("POST /v1/check HTTP/1.1\r\nhost: x\r\nx-long: {long}\r\n\r\n").as_bytes());
    // The door stops listening in the middle of it, so the answer may be lost on the way.
    assert!(http.hear().is_none_or(|answer| answer.status == 431));
    let large = format!(r#"{{"key":"{}","limit":"1/s"}}"#, "k".repeat(600 * 1024));
    let mut http = Client::open(&serving.http);
    assert_eq!(http.ask("POST", "/v1/check", &[], &large).status, 413);
    let mut admin = Client::open(&serving.admin);
    admin.raw(format!("GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: {long}\r\n\r\n").as_bytes());
    assert!(admin.hear().is_none_or(|answer| answer.status == 431));
    assert_eq!(serving.check(QUESTION).status, 200, "and it goes on");
}

#[test]
fn a_door_can_stay_closed_and_a_place_that_is_taken_is_told() {
    let serving = Serving::start(&[]);
    let output =
        command().args(["serve", "--http", &serving.http, "--resp", "off", "--admin", "off"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("--http ADDRESS") && said.contains(&serving.http), "{said}");
}
