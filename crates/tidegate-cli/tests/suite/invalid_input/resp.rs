//! The RESP listener: many pipelined commands, malformed frames, unfinished commands, and clients that do not read
//! replies.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use tidegate_testkit::server::Reply;

use tidegate_testkit::program::Serving;

/// Maximum growth of the process: a few hundred connections, each with the longest unfinished command.
const GROWTH_BYTES_MAX: u64 = 200 * 1024 * 1024;

fn connect(serving: &Serving) -> TcpStream {
    let stream = TcpStream::connect(&serving.resp).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    stream
}

/// Sends bytes. The listener may close the connection or stop reading before it has received all of them.
fn try_send(stream: &mut TcpStream, bytes: &[u8]) {
    match stream.write_all(bytes) {
        Ok(()) => {}
        Err(error) => assert!(
            matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::WouldBlock),
            "{error}"
        ),
    }
}

/// Returns everything received until the listener closes the connection. A reset, which unread bytes cause, counts as a
/// close.
fn until_closed(stream: &mut TcpStream) -> String {
    let mut said = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => said.extend_from_slice(&chunk[..read]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => panic!("neither a reply nor the end of the connection: {error}"),
        }
    }
    String::from_utf8_lossy(&said).into_owned()
}

#[test]
fn a_hundred_thousand_pipelined_commands_have_an_exact_count_of_verdicts() {
    let serving = Serving::start(&[]);
    let mut connection = serving.connect();
    let command = b"*3\r\n$14\r\nTIDEGATE.CHECK\r\n$7\r\nuser:42\r\n$9\r\n30000/day\r\n";
    let mut writer = connection.try_clone_stream().unwrap();
    let sender = std::thread::spawn(move || writer.write_all(&command.repeat(100_000)));
    let mut left = Vec::new();
    for _ in 0..100_000 {
        let reply = connection.receive().unwrap();
        if reply.items()[0] == Reply::Integer(1) {
            left.push(reply.items()[2].integer());
        }
    }
    sender.join().unwrap().unwrap();
    // Besides their number: each admission leaves one unit less than the one before it.
    assert_eq!(left, (0..30_000).rev().collect::<Vec<i64>>());
}

#[test]
fn hostile_frames_are_refused_and_do_not_affect_others() {
    let mut serving = Serving::start(&[]);
    let mut bystander = serving.connect();
    let huge_line = vec![b'x'; 4 << 20];
    let deep = b"*1\r\n".repeat(100_000);
    let many_large =
        [&b"*64\r\n"[..], &[&b"$65536\r\n"[..], &vec![b'x'; 65_536], b"\r\n"].concat().repeat(64)].concat();
    for frame in [
        &b"*99999999999999999999999999\r\n"[..],
        b"*2147483647\r\n",
        b"*1025\r\n",
        b"*-1\r\n",
        b"*-9223372036854775808\r\n",
        b"*\r\n",
        b"*1\n$4\nPING\n",
        b"*1\r\n$18446744073709551615\r\n",
        b"*1\r\n$536870912\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$\r\nPING\r\n",
        b"*1\r\n$4\r\nPINGPING",
        b"*1\r\n$3\r\nPING\r\n",
        b"*1\r\n:4\r\n",
        b"*1\r\n+PING\r\n",
        b"*2\r\n$4\r\nECHO\r\n*1\r\n$2\r\nhi\r\n",
        b"*1\r\n$0x4\r\nPING\r\n",
        b"*+1\r\n$4\r\nPING\r\n",
        b"*1\r\n$4\0\r\nPING\r\n",
        b"*1\0\r\n",
        &deep,
        &huge_line,
        &many_large,
    ] {
        let mut stream = connect(&serving);
        try_send(&mut stream, frame);
        let said = until_closed(&mut stream);
        // If the listener closes with unread bytes, the reset may discard its reply.
        let named = String::from_utf8_lossy(&frame[..frame.len().min(60)]).into_owned();
        assert!(
            said.starts_with("-ERR Protocol error: ") || (said.is_empty() && frame.len() > 65_536),
            "{named:?}: {said:?}"
        );
        assert_eq!(bystander.call(&["PING"]).unwrap(), Reply::Simple("PONG".into()), "after {named:?}");
    }
    assert!(serving.is_alive());
}

#[test]
fn a_key_may_contain_any_bytes() {
    let serving = Serving::start(&[]);
    let mut connection = serving.connect();
    let mut left = |key: &[u8]| {
        let reply = connection.call(&[&b"TIDEGATE.CHECK"[..], key, b"3/h"]).unwrap();
        reply.items()[2].integer()
    };
    for key in [&b"k"[..], b"k\0", b"\0k", b"k\r\n", b"*3\r\n$4\r\nPING\r\n", b"\xff\xfe", &[b'x'; 65_536]] {
        assert_eq!((left(key), left(key)), (2, 1), "{:?}", String::from_utf8_lossy(&key[..key.len().min(20)]));
    }
}

#[test]
fn an_empty_key_is_an_error() {
    let serving = Serving::start(&[]);
    let mut connection = serving.connect();
    for command in [
        &["TIDEGATE.CHECK", "", "3/h"][..],
        &["TIDEGATE.CHECK", "a", "3/h", "", "3/h"],
        &["TIDEGATE.PEEK", "", "3/h"],
        &["TIDEGATE.RESET", "", "3/h"],
        &["CL.THROTTLE", "", "9", "10", "60"],
    ] {
        match connection.call(command).unwrap() {
            Reply::Error(message) => assert!(message.starts_with("ERR a key must not be empty"), "{message}"),
            reply => panic!("{command:?}: {reply:?}"),
        }
    }
}

#[test]
fn unfinished_commands_of_hundreds_of_connections_use_bounded_memory() {
    let mut serving = Serving::start(&[]);
    assert!(serving.is_alive());
    let before = serving.resident_bytes();
    let unfinished =
        [&b"*4\r\n"[..], &[&b"$65000\r\n"[..], &vec![b'x'; 65_000], b"\r\n"].concat().repeat(3), b"$65000\r\nx"]
            .concat();
    let endless = vec![b'x'; 65_000];
    let mut held = Vec::new();
    for n in 0..300 {
        let mut stream = connect(&serving);
        try_send(&mut stream, if n % 2 == 0 { &unfinished } else { &endless });
        held.push(stream);
    }
    assert!(serving.is_alive());
    // A connection can still finish its command.
    try_send(&mut held[0], &[b'x'; 64_999]);
    try_send(&mut held[0], b"\r\n");
    let mut said = [0; 4];
    held[0].read_exact(&mut said).unwrap();
    assert_eq!(&said, b"-ERR", "an unknown command");
    let grown = serving.resident_bytes().saturating_sub(before);
    assert!(grown < GROWTH_BYTES_MAX, "{grown} bytes");
}

#[test]
fn replies_for_a_client_that_does_not_read_are_bounded() {
    let mut serving = Serving::start(&[]);
    assert!(serving.is_alive());
    let before = serving.resident_bytes();
    let echo = [&b"*2\r\n$4\r\nECHO\r\n$60000\r\n"[..], &[b'x'; 60_000], b"\r\n"].concat();
    let mut held = Vec::new();
    for _ in 0..4 {
        let mut stream = connect(&serving);
        // Writing fails once the listener stops reading, because its buffer of unsent replies is full.
        let taken = (0..1_000).take_while(|_| stream.write_all(&echo).is_ok()).count();
        assert!(taken < 1_000, "60 MB were read from a client that does not read its replies");
        held.push(stream);
    }
    assert!(serving.is_alive());
    let grown = serving.resident_bytes().saturating_sub(before);
    assert!(grown < 64 * 1024 * 1024, "{grown} bytes");
}

#[test]
fn extreme_numbers_are_answered_with_an_error_that_says_what_is_accepted() {
    let serving = Serving::start(&[]);
    let mut connection = serving.connect();
    for (arguments, phrase) in [
        ("9223372036854775807 1 1", "max_burst must be a whole number from 0 to"),
        ("18446744073709551616 1 1", "max_burst must be a whole number from 0 to"),
        ("-9223372036854775808 1 1", "max_burst must be a whole number from 0 to"),
        ("4294967295 1 1", "max_burst must be from 0 to 9999999"),
        ("1 9223372036854775807 1", "count must be a whole number from 0 to"),
        ("1 4294967295 1", "count must be from 1 to 10000000"),
        ("1 0 1", "count must be from 1 to 10000000"),
        ("1 1 9223372036854775807", "period must be a whole number from 0 to"),
        ("1 1 4294967295", "period must be from 1 to 34560000 seconds"),
        ("1 1 0", "period must be from 1 to 34560000 seconds"),
        ("1 1 1 9223372036854775807", "quantity must be a whole number from 0 to"),
        ("1 1 1 -1", "quantity must be a whole number from 0 to"),
        ("1.5 1 1", "max_burst must be a whole number from 0 to"),
        ("1e9 1 1", "max_burst must be a whole number from 0 to"),
        ("NaN 1 1", "max_burst must be a whole number from 0 to"),
    ] {
        let command: Vec<&str> = ["CL.THROTTLE", "user"].into_iter().chain(arguments.split(' ')).collect();
        let reply = connection.call(&command).unwrap();
        assert!(reply.error().is_some_and(|error| error.contains(phrase)), "{arguments}: {reply:?}");
    }
    // The largest accepted values get a verdict.
    let reply = connection.call(&["CL.THROTTLE", "user", "9999999", "10000000", "34560000", "4294967295"]).unwrap();
    assert_eq!(reply.items().iter().map(Reply::integer).collect::<Vec<_>>(), [1, 10_000_000, 10_000_000, -1, 0]);
}
