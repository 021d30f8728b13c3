//! Spans of decisions, as an OpenTelemetry collector receives them.
#![cfg(feature = "otlp")]
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;

use tidegate_testkit::program::{PATIENCE, Serving};

/// Starts a collector. Returns its URL, and a channel with the bodies of the requests that it receives.
fn collector() -> (String, mpsc::Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, bodies) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let (mut length, mut line) = (0, String::new());
            stream.read_line(&mut line).unwrap();
            assert!(line.starts_with("POST /v1/traces "), "{line}");
            loop {
                line.clear();
                stream.read_line(&mut line).unwrap();
                let Some((name, value)) = line.trim_end().split_once(':') else { break };
                if name.eq_ignore_ascii_case("content-length") {
                    length = value.trim().parse().unwrap();
                }
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).unwrap();
            let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            let _ = stream.get_mut().write_all(answer.as_bytes());
            if sender.send(body).is_err() {
                return;
            }
        }
    });
    (address, bodies)
}

fn times(body: &[u8], text: &str) -> usize {
    body.windows(text.len()).filter(|window| *window == text.as_bytes()).count()
}

const RULES: &str = "[[rules]]\nname = \"shorten\"\nby = [\"ip\"]\nlimits = [\"2/h\"]\n";

#[test]
fn each_decision_is_a_span_that_does_not_identify_the_caller() {
    let (address, bodies) = collector();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES).unwrap();
    let mut serving = Serving::start(&["--config", file.to_str().unwrap(), "--otlp", &address, "--drain", "0s"]);
    let asked = r#"{"request":{"method":"GET","path":"/","peer":"203.0.113.9"}}"#;
    (0..3).for_each(|_| drop(serving.check(asked)));
    (0..2).for_each(|_| drop(serving.check(r#"{"key":"planted-caller","limit":"1/h"}"#)));
    serving.signal("TERM");
    assert_eq!(serving.end().code(), Some(0));
    let mut sent = bodies.recv_timeout(PATIENCE).expect("spans are sent at the end");
    sent.extend(bodies.try_iter().flatten());
    assert_eq!(times(&sent, "tidegate.verdict"), 5);
    assert_eq!([times(&sent, "shorten"), times(&sent, "\u{4}deny"), times(&sent, "\u{5}store")], [3, 2, 5]);
    for caller in ["planted-caller", "203.0.113"] {
        assert_eq!(times(&sent, caller), 0, "{caller}");
    }
}

#[test]
fn decisions_are_made_while_the_collector_is_unavailable_and_an_invalid_url_is_rejected() {
    let serving = Serving::start(&["--otlp", "http://127.0.0.1:1"]);
    (0..20).for_each(|_| assert_eq!(serving.check(r#"{"key":"a","limit":"100/h"}"#).status, 200));
    for url in ["ann:planted@127.0.0.1:1", "http://ann:planted@127.0.0.1:1"] {
        let refused = tidegate_testkit::program::ended(
            tidegate_testkit::program::command()
                .args(["serve", "--http", "off", "--resp", "off", "--admin", "off", "--otlp", url]),
        );
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(2), "{said}");
        assert!(said.contains("http://127.0.0.1:4318") && !said.contains("planted"), "{said}");
    }
}
