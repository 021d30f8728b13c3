//! The HTTP listener answers an invalid request with a 4xx status and a message that says what was expected.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use tidegate_testkit::program::Serving;

const GOOD: &str = r#"{"key":"user:42","limit":"10/min"}"#;

fn request(body: &str) -> String {
    format!("POST /v1/check HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("no status: {answer:?}"))
}

#[test]
fn an_invalid_body_is_refused_with_what_was_expected() {
    let serving = Serving::start(&[]);
    let deep = format!("{{\"checks\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let long_key = format!(r#"{{"key":"{}","limit":"1/s"}}"#, "k".repeat(65_537));
    let many = format!(r#"{{"checks":[{}]}}"#, vec![r#"{"key":"a","limit":"1/s"}"#; 33].join(","));
    let example = r#"such as {\"key\": \"user:42\", \"limit\": \"10/min\"}"#;
    for (body, phrase) in [
        ("", example),
        ("{", example),
        ("nonsense", example),
        ("{\"key\":\"a\",}", example),
        (r#"{"key":"a","limit":"1/s"} and more"#, example),
        ("{\"key\":\"\u{1}\",\"limit\":\"1/s\"}", example),
        (r#"{"key":"\ud800","limit":"1/s"}"#, example),
        (deep.as_str(), "expected"),
        ("[]", "expected an object with key and limit"),
        ("42", "expected an object with key and limit"),
        ("{}", "expected one of"),
        (r#"{"key":"a"}"#, "expected one of"),
        (r#"{"limit":"1/s"}"#, "expected one of"),
        (r#"{"key":"a","limit":"1/s","checks":[]}"#, "expected one of"),
        (r#"{"key":5,"limit":"1/s"}"#, "expected a string at line 1 column 8"),
        (r#"{"key":"a","limit":["1/s"]}"#, "found a list; several limits are entries of checks"),
        (r#"{"key":"a","key":"b","limit":"1/s"}"#, "duplicate field `key`"),
        (r#"{"key":"a","limit":"1/s","Cost":2}"#, "unknown field `Cost`, expected one of `key`, `limit`, `cost`"),
        (
            r#"{"checks":[{"key":"a","limit":"1/s","cots":2}]}"#,
            "unknown field `cots`, expected one of `key`, `limit`, `cost`",
        ),
        (r#"{"key":"a","limit":"1/s","cost":-1}"#, "cost must be a whole number from 0 to 4294967295, found -1"),
        (r#"{"key":"a","limit":"1/s","cost":1.5}"#, "cost must be a whole number"),
        (r#"{"key":"a","limit":"1/s","cost":"1"}"#, "cost must be a whole number"),
        (r#"{"key":"a","limit":"1/s","cost":1e300}"#, "cost must be a whole number from 0 to 4294967295"),
        (
            r#"{"key":"a","limit":"1/s","cost":18446744073709551615}"#,
            "cost must be a whole number from 0 to 4294967295",
        ),
        (r#"{"checks":[]}"#, "1 to 32 entries, found none"),
        (many.as_str(), "1 to 32 entries, found more"),
        (r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"9/s"}]}"#, "same counter"),
        (r#"{"key":"a","limit":""}"#, "limit: "),
        (r#"{"key":"a","limit":"10"}"#, "limit: "),
        (r#"{"key":"a","limit":"0/s"}"#, "expected a quota"),
        (r#"{"key":"a","limit":"10/fortnight"}"#, "us, ms, s, min, h, day, week"),
        (r#"{"key":"a","limit":"10/min slidding"}"#, "sliding"),
        (r#"{"key":"a","limit":"10/min burst=3"}"#, "limit: "),
        (r#"{"key":"a","limit":"99999999999999999999/s"}"#, "limit: "),
        (r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"b","limit":"1/x"}]}"#, "checks[1].limit: "),
        (r#"{"key":"","limit":"1/s"}"#, "key must not be empty"),
        (r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"","limit":"1/s"}]}"#, "checks[1].key must not be empty"),
        (long_key.as_str(), "key: a key can have at most 65536 bytes; this one has 65537"),
        (r#"{"request":{"method":"GET","path":"/"}}"#, "missing field `peer`"),
        (r#"{"request":{"method":"GET","path":"/","peer":"here"}}"#, "request.peer: expected an IP address"),
        (r#"{"request":{"method":"GET","path":"/","peer":"::1"}}"#, "start it with --config FILE"),
    ] {
        let answer = serving.post(body);
        let shown = &body[..body.len().min(80)];
        assert_eq!(status(&answer), 400, "{shown}: {answer}");
        let told = answer.split_once("\r\n\r\n").expect("a body").1;
        assert!(told.starts_with(r#"{"error":"bad_request","message":""#), "{shown}: {told}");
        assert!(told.contains(phrase), "{shown}: {told}");
        assert!(told.len() < 1_000, "{shown}: {} bytes of error", told.len());
    }
    assert_eq!(status(&serving.post(GOOD)), 200);
}

#[test]
fn an_invalid_request_is_refused_with_what_was_expected() {
    let serving = Serving::start(&[]);
    let large = "x".repeat(600_000);
    for (request, expected, phrase) in [
        ("GET /v1/check HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_owned(), 405, "expected POST"),
        ("DELETE /v1/check HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_owned(), 405, "expected POST"),
        ("POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_owned(), 404, "POST /v1/check"),
        ("POST /v1/check/../check HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_owned(), 404, "POST /v1/check"),
        (request(&large), 413, "larger than 524288 bytes"),
        // Refused by its header, before the body is sent.
        (
            "POST /v1/check HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 10000000000\r\n\r\n".to_owned(),
            413,
            "larger than 524288 bytes",
        ),
        (
            format!(
                "POST /v1/check HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n927c0\r\n{large}"
            ),
            413,
            "larger than 524288 bytes",
        ),
        // A content-length that is too small truncates the JSON. The bytes after it are not a second request.
        (request(GOOD).replace("content-length: 34", "content-length: 10"), 400, "such as"),
    ] {
        let answer = serving.send(&request);
        let shown = &request[..request.len().min(120)];
        assert_eq!(status(&answer), expected, "{shown}: {answer}");
        assert!(answer.contains(phrase), "{shown}: {answer}");
        if expected == 405 {
            assert!(answer.contains("\r\nallow: POST\r\n"), "{answer}");
        }
    }
    assert_eq!(status(&serving.post(GOOD)), 200);
}

/// Bytes that are not a valid HTTP request are answered with a 4xx status, or the connection is closed.
#[test]
fn invalid_http_is_refused_and_does_not_affect_others() {
    let serving = Serving::start(&[]);
    let large_header = format!("POST /v1/check HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(200_000));
    let many_headers = format!("POST /v1/check HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(2_000));
    for request in [
        "nonsense\r\n\r\n",
        "\0\0\0\0\r\n\r\n",
        "POST /v1/check HTTP/9.9\r\n\r\n",
        "POST /v1/check HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        "POST /v1/check HTTP/1.1\r\ncontent-length: 1, 2\r\n\r\n",
        "POST /v1/check HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        "POST /v1/check HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        "POST /v1/check HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n",
        "POST /v1/check HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        "POST /v1/check HTTP/1.1\r\nno colon\r\n\r\n",
        "POST /v1/check HTTP/1.1\r\nbad\0name: x\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        large_header.as_str(),
        many_headers.as_str(),
    ] {
        let mut stream = TcpStream::connect(&serving.http).unwrap();
        let _ = stream.write_all(request.as_bytes());
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        let shown = &request[..request.len().min(80)];
        assert!(answer.is_empty() || (400..500).contains(&status(&answer)), "{shown:?}: {answer}");
        assert_eq!(status(&serving.post(&GOOD.replace('}', r#","cost":0}"#))), 200, "after {shown:?}");
    }
}

#[test]
fn a_truncated_body_is_refused_and_charges_nothing() {
    let serving = Serving::start(&[]);
    for sent in [0, 1, GOOD.len() / 2, GOOD.len() - 1] {
        let mut stream = TcpStream::connect(&serving.http).unwrap();
        let head = request(GOOD);
        stream.write_all(&head.as_bytes()[..head.len() - GOOD.len() + sent]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.is_empty() || status(&answer) == 400, "after {sent} bytes: {answer}");
    }
    assert!(serving.post(GOOD).contains(r#""remaining":9"#));
}
