//! HTTP/2 connections, frame by frame.
#![allow(clippy::unwrap_used)] // a failed step fails its test

use std::io::{Read, Write};
use std::net::TcpStream;

/// The bytes with which a client begins HTTP/2.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The type of a frame that resets a stream.
pub const RST_STREAM: u8 = 3;

/// Returns the bytes of a frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes()[..], payload].concat()
}

/// Returns a header block with a request for this path. Fields are literals without Huffman coding.
pub fn header_block(method: &str, path: &str) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in [(":method", method), (":scheme", "http"), (":path", path), (":authority", "x")] {
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

/// Begins HTTP/2 on a connection. Responses have flow-control windows of `window` bytes; `None` means the default.
pub fn begin(mut stream: TcpStream, window: Option<u32>) -> TcpStream {
    stream.set_nodelay(true).unwrap();
    // Setting 4 is SETTINGS_INITIAL_WINDOW_SIZE.
    let settings = window.map_or(Vec::new(), |bytes| [&[0, 4], &bytes.to_be_bytes()[..]].concat());
    stream.write_all(&[PREFACE, &frame(4, 0, 0, &settings)].concat()).unwrap();
    stream
}

/// Sends the head of a request on stream `number`, which has a body if `has_body`.
pub fn request(stream: &mut TcpStream, number: u32, method: &str, path: &str, has_body: bool) {
    let flags = if has_body { 4 } else { 5 };
    stream.write_all(&frame(1, flags, number, &header_block(method, path))).unwrap();
}

/// Reads a frame and returns its type, its flags and the number of its stream, or `None` if the connection ends.
pub fn read(stream: &mut TcpStream) -> Option<(u8, u8, u32)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).ok()?;
    let mut payload = vec![0; usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2])];
    stream.read_exact(&mut payload).ok()?;
    Some((head[3], head[4], u32::from_be_bytes([head[5], head[6], head[7], head[8]])))
}
