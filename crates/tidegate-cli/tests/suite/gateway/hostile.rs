//! Hostile requests: smuggling, malformed, oversized, truncated and slow ones, over HTTP/1.1 and HTTP/2.
//!
//! The quota is large, so none is merely refused. For each: no request reaches the upstream that was not decided, no
//! response is an error of the gateway (5xx), and the connection ends within the timeouts. The upstream reads strictly: a
//! request that is not exactly framed closes its connection, which would be a 502.

use std::io::{Read, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_testkit::http::upstream::Recorded;
use tidegate_testkit::http::upstream::Upstream;
use tidegate_testkit::program::GatewayProcess;

/// A hostile connection: its name, the bytes that are sent, and the most requests that may reach the upstream.
struct Case {
    name: String,
    bytes: Vec<u8>,
    forwarded_max: usize,
}

fn case(name: impl Into<String>, bytes: impl Into<Vec<u8>>, forwarded_max: usize) -> Case {
    Case { name: name.into(), bytes: bytes.into(), forwarded_max }
}

const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";

/// Headers that some servers take for `Transfer-Encoding: chunked` and others do not.
const CODINGS: [&str; 30] = [
    "Transfer-Encoding: chunked",
    "transfer-encoding: CHUNKED",
    "Transfer-Encoding:chunked",
    "Transfer-Encoding:  chunked",
    "Transfer-Encoding:\tchunked",
    "Transfer-Encoding: chunked ",
    "Transfer-Encoding: chunked\t",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding\t: chunked",
    " Transfer-Encoding: chunked",
    "X: y\r\n Transfer-Encoding: chunked",
    "Transfer-Encoding:\r\n chunked",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding: chunke",
    "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding: identity, chunked",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding: ,chunked",
    "Transfer-Encoding: \"chunked\"",
    "Transfer-Encoding: chunked;x=y",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: \u{b}chunked",
    "Transfer-Encoding: chunked\0",
    "X: y\rTransfer-Encoding: chunked",
    "X: y\nTransfer-Encoding: chunked",
    "Transfer_Encoding: chunked",
    "Transfer-Encoding: ",
];

/// Two lengths of the same body: by `Content-Length` and by chunks.
fn two_framings() -> Vec<Case> {
    let mut cases = Vec::new();
    for coding in CODINGS {
        for order in ["length first", "coding first"] {
            let lines = |length: usize| match order {
                "length first" => format!("Content-Length: {length}\r\n{coding}\r\n"),
                _ => format!("{coding}\r\nContent-Length: {length}\r\n"),
            };
            // By chunks, the body ends before the smuggled request; by length, after it.
            let body = format!("0\r\n\r\n{SMUGGLED}");
            let request = format!("POST /case HTTP/1.1\r\nHost: x\r\n{}\r\n{body}", lines(body.len()));
            cases.push(case(format!("CL.TE, {order}: {coding:?}"), request, 1));
        }
        // By length, the body ends before the smuggled request; by chunks, after it. If the header is not a coding for
        // anybody, the client has sent two requests.
        let body = format!("{:x}\r\n{SMUGGLED}\r\n0\r\n\r\n", SMUGGLED.len());
        let lines = format!("Content-Length: 4\r\n{coding}\r\n");
        let forwarded_max = if coding.starts_with("Transfer_") { 2 } else { 1 };
        let request = format!("POST /case HTTP/1.1\r\nHost: x\r\n{lines}\r\n{body}");
        cases.push(case(format!("TE.CL: {coding:?}"), request, forwarded_max));
    }
    cases
}

/// `Content-Length` that servers may read differently.
fn lengths() -> Vec<Case> {
    let lines = [
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 6\r\nContent-Length: 5",
        "Content-Length: 5, 6",
        "Content-Length: +5",
        "Content-Length: -5",
        "Content-Length: 0x5",
        "Content-Length: 5 ",
        "Content-Length: 5.0",
        "Content-Length: 5e0",
        "Content-Length: \"5\"",
        "Content-Length: ",
        "Content-Length: five",
        "Content-Length: 99999999999999999999",
        "Content-Length: 18446744073709551615",
        "Content-Length : 5",
        "Content-Length\t: 5",
        " Content-Length: 5",
        "Content-Length: \u{b}5",
        "Content-Length: 5\0",
        "Content-Length: 05",
        "Content-Length: 5\r\nContent-Length: 5",
        "Content_Length: 5",
        "X: y\rContent-Length: 5",
    ];
    let mut cases: Vec<Case> = Vec::new();
    for line in lines {
        let request = format!("POST /case HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\nhello");
        cases.push(case(format!("length {line:?}"), request, 1));
    }
    // A body with a method that usually has none, and a request behind it.
    for method in ["GET", "HEAD", "OPTIONS", "DELETE"] {
        let request =
            format!("{method} /case HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{SMUGGLED}", SMUGGLED.len());
        cases.push(case(format!("CL.0 {method}"), request, 1));
    }
    cases
}

fn chunks() -> Vec<Case> {
    let bodies = [
        "5\r\nhello\r\n0\r\n\r\n",
        "5;ext=1\r\nhello\r\n0\r\n\r\n",
        "5;\next\r\nhello\r\n0\r\n\r\n",
        "05\r\nhello\r\n0\r\n\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        "+5\r\nhello\r\n0\r\n\r\n",
        "-5\r\nhello\r\n0\r\n\r\n",
        " 5\r\nhello\r\n0\r\n\r\n",
        "5 \r\nhello\r\n0\r\n\r\n",
        "5\nhello\r\n0\r\n\r\n",
        "5\rhello\r\n0\r\n\r\n",
        "5\r\nhelloXX0\r\n\r\n",
        "5\r\nhello0\r\n\r\n",
        "6\r\nhello\r\n0\r\n\r\n",
        "4\r\nhello\r\n0\r\n\r\n",
        "ffffffffffffffff\r\nhello",
        "fffffffffffffffff\r\nhello",
        "100000000000000005\r\nhello\r\n0\r\n\r\n",
        "g\r\nhello\r\n0\r\n\r\n",
        "\r\n\r\n",
        "5\r\nhello\r\n0\r\nX: y",
        "5\r\nhello\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
        "5\r\nhello\r\n0\r\nContent-Length: 100\r\n\r\n",
        "5\r\nhello\r\n0\r\nX y\r\n\r\n",
        "5\r\nhello\r\n0\n\n",
        "5\r\nhello\r\n",
    ];
    let mut cases: Vec<Case> = Vec::new();
    for body in bodies {
        let request = format!("POST /case HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{body}");
        cases.push(case(format!("chunks {body:?}"), request, 1));
    }
    let extension = format!("5;{}\r\nhello\r\n0\r\n\r\n", "x".repeat(100_000));
    let request = format!("POST /case HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{extension}");
    cases.push(case("a long chunk extension", request, 1));
    let trailers = format!("0\r\n{}\r\n", "x: y\r\n".repeat(10_000));
    let request = format!("POST /case HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{trailers}");
    cases.push(case("ten thousand trailers", request, 1));
    cases
}

fn heads() -> Vec<Case> {
    // Valid requests, some of them odd. They are forwarded once, or rejected.
    let accepted = [
        "GET /case HTTP/1.1\nHost: x\n\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nConnection: host\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nConnection: close, x-forwarded-for\r\n\r\n",
        "POST /case HTTP/1.1\r\nHost: x\r\nConnection: content-length\r\nContent-Length: 5\r\n\r\nhello",
        "POST /case HTTP/1.1\r\nHost: x\r\nConnection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET http://x/case HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET //other/case HTTP/1.1\r\nHost: x\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /case#fragment HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /case%0d%0aX:%20y HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /case HTTP/1.1 \r\nHost: x\r\n\r\n",
        "GET /case HTTP/1.0\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        "\r\n\r\nGET /case HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET http://x/case HTTP/1.0\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: planted\r\nX-Real-IP: planted\r\nForwarded: for=planted\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nX_Forwarded_For: planted\r\nX-Real_IP: planted\r\nX-Forwarded-Anything: planted\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nHost_: y\r\nX_Forwarded-Host: planted\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nConnection: x-real-ip, forwarded, x-forwarded-for\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nProxy-Authorization: planted\r\nProxy-Connection: close\r\nKeep-Alive: planted\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nConnection: x-secret\r\nX-Secret: planted\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket, h2c\r\n\r\n",
        "POST /case HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
        "POST /case HTTP/1.1\r\nHost: x\r\nTrailer: x-real-ip, x_forwarded_for\r\nTransfer-Encoding: chunked\r\n\r\n\
         5\r\nhello\r\n0\r\nX-Real-IP: planted\r\nX_Forwarded_For: planted\r\n\r\n",
    ];
    let rejected = [
        "GET /case HTTP/1.1\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x, y\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x@y\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x/smuggled\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost:\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost : x\r\n\r\n",
        "GET /case HTTP/1.1\r\n Host: x\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\0\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nX: a\rb\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nX\0: a\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\n: a\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nX Y: a\r\n\r\n",
        "GET http://other/case HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET http://x/case HTTP/1.1\r\n\r\n",
        "GET http://x:81/case HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET http://x/case HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x:y\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x:80:80\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: [::1\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x y\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x?y\r\n\r\n",
        "OPTIONS *?/case HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET http://x@other/case HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET ftp://x/case HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET case HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET * HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /ca se HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /case\tHTTP/1.1\r\nHost: x\r\n\r\n",
        "GET  /case HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /case  HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /case\u{7f} HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /case HTTP/1.2\r\nHost: x\r\n\r\n",
        "GET /case HTTP/2.0\r\nHost: x\r\n\r\n",
        "GET /case HTTP/0.9\r\n\r\n",
        "GET /case\r\n\r\n",
        "POST /case HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST /case HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "POST /case HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
        "POST /case HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        "POST /case HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "CONNECT other:80 HTTP/1.1\r\nHost: other:80\r\n\r\n",
        "CONNECT /case HTTP/1.1\r\nHost: x\r\n\r\n",
        "TRACE /case HTTP/1.1\r\nHost: x\r\n\r\n",
        "G\0T /case HTTP/1.1\r\nHost: x\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nExpect: magic\r\n\r\n",
        "GET /case HTTP/1.1\r\nHost: x\r\nExpect: 100-continue, magic\r\n\r\n",
        "\0\0\0\0",
        "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0",
    ];
    let mut cases: Vec<Case> = Vec::new();
    for (heads, forwarded_max) in [(&accepted[..], 1), (&rejected[..], 0)] {
        cases.extend(heads.iter().map(|head| case(format!("head {head:?}"), *head, forwarded_max)));
    }
    for (name, head) in [
        ("a long URI", format!("GET /case{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(20_000))),
        ("a long query", format!("GET /case?{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(20_000))),
        ("a longer URI", format!("GET /case{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(200_000))),
        ("a long header", format!("GET /case HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "a".repeat(200_000))),
        ("a long name", format!("GET /case HTTP/1.1\r\nHost: x\r\n{}: y\r\n\r\n", "a".repeat(200_000))),
        ("many headers", format!("GET /case HTTP/1.1\r\nHost: x\r\n{}\r\n", "x: y\r\n".repeat(1_000))),
        ("many hosts", format!("GET /case HTTP/1.1\r\n{}\r\n", "Host: x\r\n".repeat(90))),
        ("a long method", format!("{} /case HTTP/1.1\r\nHost: x\r\n\r\n", "A".repeat(100_000))),
        ("many empty lines", "\r\n".repeat(50_000)),
        ("half a request line", "GET /ca".to_owned()),
        ("half a header", "GET /case HTTP/1.1\r\nHos".to_owned()),
        ("half a body", "POST /case HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf".to_owned()),
        ("nothing", String::new()),
    ] {
        cases.push(case(name, head, 0));
    }
    cases
}

/// Returns the beginning of an HTTP/2 connection with one request. Fields are literals without Huffman coding.
fn http2(fields: &[(&str, &str)], data: &[u8]) -> Vec<u8> {
    let mut block = Vec::new();
    let integer = |block: &mut Vec<u8>, mut value: usize| {
        if value < 127 {
            return block.push(value as u8);
        }
        block.push(127);
        value -= 127;
        while value >= 128 {
            block.push((value % 128) as u8 | 128);
            value /= 128;
        }
        block.push(value as u8);
    };
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            integer(&mut block, text.len());
            block.extend_from_slice(text.as_bytes());
        }
    }
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(4, 0, 0, &[]));
    bytes.extend(frame(1, if data.is_empty() { 5 } else { 4 }, 1, &block));
    if !data.is_empty() {
        bytes.extend(frame(0, 1, 1, data));
    }
    bytes
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes()[..], payload].concat()
}

fn downgrades() -> Vec<Case> {
    let usual = [(":method", "POST"), (":scheme", "http"), (":path", "/case"), (":authority", "x")];
    let with = |more: &[(&'static str, &'static str)], data: &str| http2(&[&usual[..], more].concat(), data.as_bytes());
    let replaced = |name: &str, value: &'static str| {
        let fields = usual.map(|(other, old)| (other, if other == name { value } else { old }));
        http2(&fields, b"hello")
    };
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let settings = [preface.clone(), frame(4, 0, 0, &[])].concat();
    let mut resets = settings.clone();
    for stream in (1..2_000).step_by(2) {
        let block = http2(&usual, &[])[24 + 9 + 9..].to_vec();
        resets.extend(frame(1, 4, stream, &block));
        resets.extend(frame(3, 0, stream, &8_u32.to_be_bytes()));
    }
    let mut continuations = [settings.clone(), frame(1, 0, 1, &[])].concat();
    (0..10_000).for_each(|_| continuations.extend(frame(9, 0, 1, &[0, 1, b'a', 1, b'b'])));
    vec![
        case("h2 a request", with(&[], "hello"), 1),
        case(
            "h2 transfer-encoding",
            with(&[("transfer-encoding", "chunked")], "0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n"),
            0,
        ),
        case("h2 connection", with(&[("connection", "close")], "hello"), 0),
        case("h2 upgrade", with(&[("upgrade", "websocket")], "hello"), 0),
        case("h2 forwarding headers", with(&[("x-forwarded-for", "planted"), ("x_real_ip", "planted")], "hello"), 1),
        case("h2 TE", with(&[("te", "gzip")], "hello"), 1),
        case("h2 many headers", with(&[("x", "y"); 200], "hello"), 0),
        case("h2 TRACE", replaced(":method", "TRACE"), 0),
        case("h2 an expectation", with(&[("expect", "magic")], "hello"), 0),
        case("h2 another scheme", replaced(":scheme", "ftp"), 0),
        case("h2 short length", with(&[("content-length", "1")], "hello"), 0),
        case("h2 long length", with(&[("content-length", "50")], "hello"), 0),
        case("h2 two lengths", with(&[("content-length", "5"), ("content-length", "6")], "hello"), 0),
        case("h2 malformed length", with(&[("content-length", "+5")], "hello"), 0),
        case("h2 line end in a value", with(&[("x", "a\r\nHost: y")], "hello"), 0),
        case("h2 line end in a name", with(&[("x: y\r\nz", "a")], "hello"), 0),
        case("h2 zero in a value", with(&[("x", "a\0b")], "hello"), 0),
        case("h2 upper case", with(&[("X-Upper", "a")], "hello"), 0),
        case("h2 space in a name", with(&[("x y", "a")], "hello"), 0),
        case("h2 unknown pseudo header", with(&[(":x", "a")], "hello"), 0),
        case("h2 another host", with(&[("host", "y")], "hello"), 0),
        case("h2 the same host", with(&[("host", "x")], "hello"), 1),
        case("h2 two hosts", with(&[("host", "x"), ("host", "x")], "hello"), 0),
        case("h2 line end in the path", replaced(":path", "/case HTTP/1.1\r\nX: y"), 0),
        case("h2 space in the path", replaced(":path", "/ca se"), 0),
        case("h2 no slash", replaced(":path", "case"), 0),
        case("h2 empty path", replaced(":path", ""), 0),
        case("h2 method with a space", replaced(":method", "GET /smuggled"), 0),
        case("h2 CONNECT", http2(&[(":method", "CONNECT"), (":authority", "other:80")], b""), 0),
        case("h2 host with a user", replaced(":authority", "u@x"), 0),
        case("h2 host with a path", replaced(":authority", "x/y"), 0),
        case("h2 without a method", http2(&usual[1..], b"hello"), 0),
        case("h2 without a host", http2(&usual[..3], b"hello"), 0),
        case("h2 no settings", [preface, frame(1, 5, 1, &[])].concat(), 0),
        case("h2 an even stream", [settings.clone(), frame(1, 5, 2, &[0x82, 0x84, 0x86])].concat(), 0),
        case("h2 a frame that is too large", [settings.clone(), vec![0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat(), 0),
        case("h2 a window of zero", [settings, frame(8, 0, 0, &[0; 4])].concat(), 0),
        // Those that were accepted before their reset may have been forwarded: each was decided.
        case("h2 a thousand resets", resets, 1_000),
        case("h2 continuation flood", continuations, 0),
    ]
}

#[test]
fn hostile_requests_are_contained() {
    let upstream = Upstream::hello();
    let configuration = format!(
        "[gateway]\nbody_timeout = '500ms'\n[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['1000000/h']\n\
         [[upstreams]]\nname = 'web'\nservers = ['{}']\n",
        upstream.url()
    );
    let gateway = GatewayProcess::configured(&configuration, &["--idle", "1s"]);
    let mut cases = two_framings();
    cases.extend([lengths(), chunks(), heads(), downgrades()].into_iter().flatten());
    assert!(cases.len() >= 150, "{} cases", cases.len());

    for (number, case) in cases.iter_mut().enumerate() {
        mark(&mut case.bytes, number);
    }

    let failures = Mutex::new(Vec::new());
    for round in cases.chunks(16) {
        std::thread::scope(|scope| {
            for case in round {
                let (gateway, failures) = (&gateway, &failures);
                scope.spawn(move || {
                    let mut stream = gateway.connect();
                    let _ = stream.write_all(&case.bytes);
                    let mut received = Vec::new();
                    if let Err(error) = stream.read_to_end(&mut received)
                        && matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
                    {
                        failures.lock().unwrap().push(format!("{}: the connection does not end", case.name));
                    }
                    let text = String::from_utf8_lossy(&received);
                    if text.split("\r\n").any(|line| line.starts_with("HTTP/1.1 5")) {
                        failures.lock().unwrap().push(format!("{}: {text}", case.name));
                    }
                });
            }
        });
    }
    let forwarded = upstream.requests();
    let mut failures = failures.into_inner().unwrap();
    for (number, case) in cases.iter().enumerate() {
        let count = |path: String| forwarded.iter().filter(|request| request.path().contains(&path)).count();
        let (sent, smuggled) = (count(format!("/c{number:03}")), count(format!("/smugg{number:03}")));
        if sent + smuggled > case.forwarded_max || smuggled > case.forwarded_max / 2 {
            failures.push(format!("{}: {sent} forwarded, {smuggled} smuggled", case.name));
        }
    }
    let is_marked = |path: &str| path.starts_with("/c") || path.starts_with("/smugg") || path.starts_with("//other/c");
    for request in &forwarded {
        if !is_marked(request.path()) && !request.head.starts_with("OPTIONS * ") || !is_well_formed(request) {
            failures.push(format!("forwarded: {request:?}"));
        }
    }
    assert!(failures.is_empty(), "{} failures: {failures:#?}", failures.len());

    let metrics = gateway.until("/metrics", |answer| answer.status == 200).body;
    let errors: Vec<&str> = metrics.lines().filter(|line| line.contains("listener=\"gateway\",status=\"5")).collect();
    assert!(errors.is_empty(), "{errors:?}");
    let decided = "tidegate_decisions_total{rule=\"all\",verdict=\"allow\",source=\"store\",mode=\"enforce\"} ";
    let decided: usize = metrics.lines().find_map(|line| line.strip_prefix(decided)).unwrap().parse().unwrap();
    let forwarded = forwarded.len();
    assert!(forwarded <= decided, "{forwarded} requests reached the upstream, and {decided} were decided");
    assert_eq!(gateway.get("/after").status, 200);
    assert!(!gateway.output().contains("WARN"), "a hostile client can fill the log: {}", gateway.output());
}

/// Writes the number of a case into its paths, without changing their lengths.
fn mark(bytes: &mut [u8], number: usize) {
    for (path, marked) in [("/case", format!("/c{number:03}")), ("/smuggled", format!("/smugg{number:03}"))] {
        assert_eq!(path.len(), marked.len());
        let places: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(path.as_bytes())).collect();
        for at in places {
            bytes[at..at + path.len()].copy_from_slice(marked.as_bytes());
        }
    }
}

/// Returns whether servers can interpret a forwarded request only as the gateway did.
fn is_well_formed(request: &Recorded) -> bool {
    let names = || request.head.lines().skip(1).filter_map(|line| line.split_once(':')).map(|(name, _)| name);
    let lengths = request.all("content-length");
    let is_plain = |length: &&str| length.parse::<u64>().is_ok_and(|number| number.to_string() == **length);
    let codings = request.all("transfer-encoding");
    let is_framed_once = lengths.len() + codings.len() <= 1 && lengths.iter().all(is_plain);
    // A header that CGI or WSGI would confuse with another one.
    let is_disguised = |name: &str| {
        let name = name.to_ascii_lowercase().replace('_', "-");
        name.starts_with("x-forwarded-")
            || ["forwarded", "x-real-ip", "host", "content-length", "transfer-encoding"].contains(&name.as_str())
    };
    let is_of_connection = |name: &str| {
        let names = ["keep-alive", "proxy-connection", "proxy-authorization", "http2-settings", "expect"];
        names.iter().any(|other| name.eq_ignore_ascii_case(other))
    };
    is_framed_once
        && request.all("host").len() == 1
        && request.all("connection").iter().all(|option| ["te", "upgrade"].contains(option))
        && request.all("upgrade").iter().all(|protocol| !protocol.to_ascii_lowercase().starts_with("h2"))
        && !names().any(|name| is_of_connection(name) || name.contains('_') && is_disguised(name))
        && request.all("x-real-ip") == ["127.0.0.1"]
        && request.all("x-forwarded-for") == ["127.0.0.1"]
        && request.all("forwarded").iter().all(|value| value.starts_with("for=127.0.0.1;"))
        && !request.head.contains("planted")
        && !request.trailers.contains("planted")
}

/// Connections that send a byte now and then do not keep others from being served.
#[test]
fn slow_connections_do_not_delay_others() {
    let upstream = Upstream::hello();
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url(), "--idle", "2s"]);
    let slow: Vec<_> = (0..300)
        .map(|number| {
            let mut stream = gateway.connect();
            let begin: &[u8] = match number % 3 {
                0 => b"GET /slow HTTP/1.1\r\nhost: x\r\nx: ",
                1 => b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n",
                _ => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            };
            stream.write_all(begin).unwrap();
            stream
        })
        .collect();
    let served = AtomicUsize::new(0);
    (0..50).for_each(|_| {
        served.fetch_add(usize::from(gateway.get("/").status == 200), Ordering::SeqCst);
    });
    assert_eq!(served.load(Ordering::SeqCst), 50);
    // Those without a complete header are closed after the idle time, whatever they send.
    let headers: Vec<_> = slow.into_iter().enumerate().filter(|(number, _)| number % 3 != 1).collect();
    for (number, mut stream) in headers {
        let mut received = Vec::new();
        if let Err(error) = stream.read_to_end(&mut received) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{number}: the connection was not closed");
        }
        assert!(!received.starts_with(b"HTTP/1.1 5"), "{number}: {:?}", String::from_utf8_lossy(&received));
    }
    assert_eq!(gateway.get("/").status, 200);
}
