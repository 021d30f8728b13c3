//! Bytes of one protocol on the listener of another: HTTP on RESP, as a web page can make a browser send it, and RESP
//! on HTTP.
//!
//! No command in such bytes is executed, the connection is closed, and the service continues.

use std::io::{Read, Write};
use std::net::TcpStream;

use tidegate_testkit::conformance::Random;
use tidegate_testkit::server::Reply;

use crate::campaign::{random, record, scale};
use tidegate_testkit::program::{PATIENCE, Serving};

/// The key of an exhausted counter, and of one that was never used.
const SPENT: &str = "spent";
const UNUSED: &str = "unused";
const LIMIT: &str = "1/day";

/// Commands that an attacker would like to run.
const COMMANDS: [&str; 4] = [
    "TIDEGATE.RESET spent 1/day\r\n",
    "TIDEGATE.CHECK unused 1/day\r\n",
    "*3\r\n$14\r\nTIDEGATE.RESET\r\n$5\r\nspent\r\n$5\r\n1/day\r\n",
    "*3\r\n$14\r\nTIDEGATE.CHECK\r\n$6\r\nunused\r\n$5\r\n1/day\r\n",
];

/// Returns the head of a request as a browser sends it.
fn head(random: &mut Random, length: usize) -> String {
    let methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"];
    let method = methods[random.below(methods.len() as u64) as usize];
    let headers = [
        "Connection: keep-alive\r\n",
        "Origin: https://attacker.example\r\n",
        "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n",
        "Content-Type: text/plain;charset=UTF-8\r\n",
        "Accept: */*\r\nAccept-Language: en\r\n",
        "Referer: https://attacker.example/\r\n",
    ];
    let chosen: String = headers.into_iter().filter(|_| random.below(2) == 0).collect();
    format!("{method} / HTTP/1.1\r\nHost: 127.0.0.1:6380\r\n{chosen}Content-Length: {length}\r\n\r\n")
}

/// Changes, removes, repeats or inserts up to three bytes, or truncates.
fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..random.below(4) {
        let at = random.below(bytes.len() as u64) as usize;
        let byte = match random.below(3) {
            0 => random.below(256) as u8,
            1 => b"\r\n *$:\0+-"[random.below(9) as usize],
            _ => bytes[random.below(bytes.len() as u64) as usize],
        };
        match random.below(4) {
            0 => bytes[at] = byte,
            1 => bytes.insert(at, byte),
            2 if bytes.len() > 1 => drop(bytes.remove(at)),
            _ => bytes.truncate(at.max(1)),
        }
    }
}

/// Sends bytes, in one piece or cut in two, and returns everything received until the server closes the connection.
fn answer(address: &str, random: &mut Random, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let cut = random.below(bytes.len() as u64 + 1) as usize;
    // A server that closes does not read to the end.
    let _ = stream.write_all(&bytes[..cut]).and_then(|()| stream.write_all(&bytes[cut..]));
    let (mut received, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => received.extend_from_slice(&chunk[..read]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(error) => panic!("not closed: {error} after {:?}", String::from_utf8_lossy(bytes)),
        }
    }
    String::from_utf8_lossy(&received).into_owned()
}

/// Panics if one of the two counters was changed.
fn assert_nothing_ran(serving: &Serving, bytes: &[u8]) {
    let mut connection = serving.connect();
    let mut left = |key: &str| match connection.call(&["TIDEGATE.PEEK", key, LIMIT]).unwrap() {
        Reply::Array(items) => items[2].integer(),
        other => panic!("{other:?}"),
    };
    assert_eq!((left(SPENT), left(UNUSED)), (0, 1), "after {:?}", String::from_utf8_lossy(bytes));
}

#[test]
fn commands_in_bytes_of_another_protocol_are_not_executed() {
    let mut random = random("protocols");
    let mut serving = Serving::start(&[]);
    assert_eq!(serving.connect().call(&["TIDEGATE.CHECK", SPENT, LIMIT]).unwrap().items()[0], Reply::Integer(1));
    let rounds = scale(300, 20_000);
    for _ in 0..rounds {
        // The page chooses the body, and its browser writes the head, which is mutated here.
        let body = COMMANDS[random.below(4) as usize].repeat(1 + random.below(3) as usize);
        let mut request = head(&mut random, body.len()).into_bytes();
        let is_whole = {
            let before = request.clone();
            mutate(&mut random, &mut request);
            request == before
        };
        // Without any of the head, only commands remain, which are valid RESP.
        if request.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        if !request.contains(&b'\n') {
            request.extend_from_slice(b"\r\n");
        }
        request.extend_from_slice(body.as_bytes());
        let received = answer(&serving.resp, &mut random, &request);
        assert!(received.is_empty() || !is_whole, "{received}");
        assert_nothing_ran(&serving, &request);
    }
    for _ in 0..rounds {
        let question = format!(r#"{{"key":"{UNUSED}","limit":"{LIMIT}"}}"#);
        let http =
            format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{question}", question.len());
        let command = COMMANDS[random.below(4) as usize];
        // A Redis client with the wrong port. An attacker chooses its keys.
        let mut bytes = match random.below(3) {
            0 => command.repeat(3).into_bytes(),
            1 => format!("*2\r\n$4\r\nECHO\r\n${}\r\n{http}\r\n", http.len()).into_bytes(),
            _ => format!("{command}{http}").into_bytes(),
        };
        bytes[0] ^= random.below(2) as u8;
        // The listener rejects bytes once they may contain a whole head, so this completes it.
        bytes.extend_from_slice(b"\r\n\r\n");
        let received = answer(&serving.http, &mut random, &bytes);
        assert!(received.is_empty() || received.starts_with("HTTP/1.1 400 "), "{received}");
        assert_nothing_ran(&serving, &bytes);
    }
    assert!(serving.is_alive());
    let rejected = serving.visit("/metrics").body;
    let rejected = rejected.lines().find(|line| line.starts_with("tidegate_requests_rejected_total{listener=\"resp\""));
    record("protocols", "requests of either kind", rounds);
    record("protocols", "recognised as HTTP on RESP", rejected.unwrap_or_default());
}
