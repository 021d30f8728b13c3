//! WebSocket (RFC 6455) through the gateway: handshake, messages in both directions, close, and refused handshakes.

use std::io::{Read, Write};
use std::net::TcpStream;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

use super::protocols::receive_until;
use tidegate_testkit::http::upstream::Upstream;
use tidegate_testkit::http::upstream::reply;
use tidegate_testkit::program::GatewayProcess;

const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// The key and the accept value of the example in RFC 6455, section 1.3.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

/// Returns the value of `Sec-WebSocket-Accept` for a key.
fn accept_value(key: &str) -> String {
    let text = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes()))
}

/// Writes a final frame. Frames of a client have a mask.
fn write_frame(stream: &mut TcpStream, opcode: u8, payload: &[u8], mask: Option<[u8; 4]>) {
    let mask_bit = if mask.is_some() { 0x80 } else { 0 };
    let mut frame = vec![0x80 | opcode];
    match payload.len() {
        length @ 0..=125 => frame.push(mask_bit | length as u8),
        length @ 126..=0xffff => {
            frame.push(mask_bit | 126);
            frame.extend((length as u16).to_be_bytes());
        }
        length => {
            frame.push(mask_bit | 127);
            frame.extend((length as u64).to_be_bytes());
        }
    }
    frame.extend(mask.iter().flatten());
    let mask = mask.unwrap_or_default();
    frame.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    stream.write_all(&frame).unwrap();
}

/// Reads a final frame. Returns its opcode, its payload without the mask, and whether there was a mask.
fn read_frame(stream: &mut TcpStream) -> (u8, Vec<u8>, bool) {
    let mut head = [0; 2];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(head[0] & 0xf0, 0x80, "a final frame without reserved bits");
    let (is_masked, length) = (head[1] & 0x80 != 0, head[1] & 0x7f);
    let mut extended = [0; 8];
    let bytes = match length {
        126 => 2,
        127 => 8,
        _ => 0,
    };
    stream.read_exact(&mut extended[8 - bytes..]).unwrap();
    let length = if bytes == 0 { u64::from(length) } else { u64::from_be_bytes(extended) };
    let mut mask = [0; 4];
    if is_masked {
        stream.read_exact(&mut mask).unwrap();
    }
    let mut payload = vec![0; usize::try_from(length).unwrap()];
    stream.read_exact(&mut payload).unwrap();
    payload.iter_mut().zip(mask.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
    (head[0] & 0x0f, payload, is_masked)
}

/// Starts a WebSocket server that sends every message back, answers a ping, and completes a close.
fn echo_server() -> Upstream {
    Upstream::start(|request, stream| {
        let is_handshake = request.head.starts_with("GET ")
            && request.header("upgrade").is_some_and(|value| value.eq_ignore_ascii_case("websocket"))
            && request.header("connection").is_some_and(|value| value.eq_ignore_ascii_case("upgrade"))
            && request.header("sec-websocket-version") == Some("13");
        let Some(key) = request.header("sec-websocket-key").filter(|_| is_handshake) else {
            return reply(stream, "426 Upgrade Required", "upgrade: websocket\r\n", b"");
        };
        let accept = accept_value(key);
        let protocol = request.header("sec-websocket-protocol").map_or(String::new(), |offered| {
            format!("sec-websocket-protocol: {}\r\n", offered.split(',').next().unwrap().trim())
        });
        let head = format!(
            "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\
             sec-websocket-accept: {accept}\r\n{protocol}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        loop {
            let (opcode, payload, is_masked) = read_frame(stream);
            assert!(is_masked, "a client masks its frames");
            write_frame(stream, if opcode == PING { PONG } else { opcode }, &payload, None);
            if opcode == CLOSE {
                return false;
            }
        }
    })
}

fn handshake(path: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Protocol: chat, other\r\n\r\n"
    )
}

#[test]
fn websocket_messages_are_forwarded_in_both_directions() {
    assert_eq!(accept_value(KEY), ACCEPT);
    let server = echo_server();
    let gateway = GatewayProcess::start(&["--upstream", &server.url(), "--limit", "2/h"]);
    let mut stream = gateway.connect();
    stream.write_all(handshake("/chat").as_bytes()).unwrap();
    let head = receive_until(&mut stream, "\r\n\r\n");
    let has_line = |line: &str| head.lines().any(|other| other.eq_ignore_ascii_case(line));
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(has_line("upgrade: websocket") && has_line("connection: upgrade"), "{head}");
    assert!(head.contains(&format!("sec-websocket-accept: {ACCEPT}\r\n")), "{head}");
    assert!(has_line("sec-websocket-protocol: chat") && has_line("x-ratelimit-remaining: 1"), "{head}");

    // Sizes around those at which the length of a frame is written differently.
    for (number, length) in [0, 1, 125, 126, 127, 65_535, 65_536, 1_000_000].into_iter().enumerate() {
        let (opcode, reply) = [(TEXT, TEXT), (BINARY, BINARY), (PING, PONG)][if length > 125 { 1 } else { number }];
        let payload: Vec<u8> = (0..length).map(|index| b'a' + (index % 26) as u8).collect();
        write_frame(&mut stream, opcode, &payload, Some([number as u8, 1, 2, 3]));
        let (received, echoed, is_masked) = read_frame(&mut stream);
        assert_eq!((received, is_masked), (reply, false), "{length}");
        assert!(echoed == payload, "{length} bytes");
    }
    let metrics = gateway.until("/metrics", |answer| answer.status == 200).body;
    assert!(metrics.contains("tidegate_upstream_in_flight{upstream=\"upstream\"} 1\n"), "{metrics}");

    let going_away = [&1001_u16.to_be_bytes()[..], b"bye"].concat();
    write_frame(&mut stream, CLOSE, &going_away, Some([9; 4]));
    assert_eq!(read_frame(&mut stream), (CLOSE, going_away, false));
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the server closes the connection first");
    drop(stream);
    gateway.until("/metrics", |answer| {
        answer.body.contains("tidegate_upstream_in_flight{upstream=\"upstream\"} 0\n")
            && answer.body.contains("tidegate_connections{listener=\"gateway\"} 0\n")
    });
}

#[test]
fn refused_websocket_handshake_opens_no_upstream_connection() {
    let server = echo_server();
    let gateway = GatewayProcess::start(&["--upstream", &server.url(), "--limit", "1/h"]);
    let mut admitted = gateway.connect();
    admitted.write_all(handshake("/chat").as_bytes()).unwrap();
    assert!(receive_until(&mut admitted, "\r\n\r\n").starts_with("HTTP/1.1 101 "));
    for _ in 0..5 {
        let mut client = gateway.client();
        client.raw(handshake("/chat").as_bytes());
        let answer = client.receive().unwrap();
        assert_eq!(answer.status, 429, "{answer:?}");
        assert!(!answer.headers.contains_key("upgrade"), "{answer:?}");
    }
    assert_eq!((server.connections(), server.requests().len()), (1, 1));
    // The tunnel is still open.
    write_frame(&mut admitted, TEXT, b"still there", Some([7; 4]));
    assert_eq!(read_frame(&mut admitted), (TEXT, b"still there".to_vec(), false));
}

#[test]
fn websocket_handshake_that_the_server_refuses_is_an_ordinary_response() {
    let server = echo_server();
    let gateway = GatewayProcess::start(&["--upstream", &server.url()]);
    let mut client = gateway.client();
    client.raw(handshake("/chat").replace("Sec-WebSocket-Version: 13", "Sec-WebSocket-Version: 8").as_bytes());
    assert_eq!(client.receive().unwrap().status, 426);
    // The connection can be used for another request.
    assert_eq!(client.ask("GET", "/", &[], "").status, 426);
}
