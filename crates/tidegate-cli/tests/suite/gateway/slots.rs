//! Clients that try to hold the slots of an upstream: by not reading, by sending slowly, by many requests at once.

use std::io::{Read, Write};
use std::time::Duration;

use tidegate_testkit::poll::eventually;

use super::protocols::receive_until;
use tidegate_testkit::http::frames;
use tidegate_testkit::http::upstream::Upstream;
use tidegate_testkit::http::upstream::ok;
use tidegate_testkit::program::GatewayProcess;

/// More bytes than the buffers of all sockets between an upstream and a client.
const LARGE_BYTES: usize = 32 << 20;

/// An upstream that sends a large body for `/large` and answers all other requests at once.
fn upstream() -> Upstream {
    let large = vec![b'x'; LARGE_BYTES];
    Upstream::start(move |request, stream| match request.path() {
        "/large" => ok(stream, "", &large),
        _ => ok(stream, "", b"hello"),
    })
}

/// Starts a gateway with `settings` for its listener, and an upstream with four slots and no queue.
fn gateway(upstream: &Upstream, settings: &str, of_upstream: &str) -> GatewayProcess {
    let url = upstream.url();
    let configuration = format!(
        "[gateway]\n{settings}\n[[upstreams]]\nname = 'web'\nservers = ['{url}']\nmax_concurrent = 4\nqueue = 0\n{of_upstream}\n"
    );
    GatewayProcess::configured(&configuration, &[])
}

fn until_no_slot_is_taken(gateway: &GatewayProcess) {
    gateway.until("/metrics", |answer| answer.body.contains("tidegate_upstream_in_flight{upstream=\"web\"} 0\n"));
    assert_eq!(gateway.get("/").status, 200);
}

#[test]
fn streams_without_a_window_are_reset_when_their_time_is_over() {
    // The total time must be enough for the head of the response on a busy machine.
    for timeouts in ["{ idle = '300ms' }", "{ total = '2s', idle = '1h' }"] {
        let upstream = upstream();
        let gateway = gateway(&upstream, "", &format!("max_concurrent_per_address = 4\ntimeouts = {timeouts}"));
        let mut stream = frames::begin(gateway.connect(), Some(0));
        for number in [1, 3, 5, 7] {
            frames::request(&mut stream, number, "GET", "/large", false);
        }
        let mut reset = Vec::new();
        while reset.len() < 4 {
            let (kind, _, number) = frames::read(&mut stream).expect("the connection stays open");
            reset.extend((kind == frames::RST_STREAM).then_some(number));
        }
        reset.sort_unstable();
        assert_eq!(reset, [1, 3, 5, 7], "{timeouts}");
        until_no_slot_is_taken(&gateway);
        // The connection serves further streams.
        frames::request(&mut stream, 9, "HEAD", "/", false);
        while frames::read(&mut stream).expect("the connection stays open") != (1, 5, 9) {}
    }
}

#[test]
fn connections_that_do_not_read_are_closed_when_their_time_is_over() {
    // The total time must be enough for the head of the response on a busy machine.
    for timeouts in ["{ idle = '300ms' }", "{ total = '2s', idle = '1h' }"] {
        let upstream = upstream();
        let gateway = gateway(&upstream, "", &format!("max_concurrent_per_address = 4\ntimeouts = {timeouts}"));
        let mut streams: Vec<_> = (0..4).map(|_| gateway.connect()).collect();
        for stream in &mut streams {
            stream.write_all(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        }
        eventually("all are at the upstream", || upstream.requests().len(), |count| *count == 4);
        until_no_slot_is_taken(&gateway);
        for stream in &mut streams {
            let mut received = Vec::new();
            let _ = stream.read_to_end(&mut received);
            assert!(received.len() < LARGE_BYTES, "the response was cut off");
        }
    }
}

#[test]
fn a_body_that_arrives_byte_by_byte_is_408() {
    let upstream = upstream();
    let gateway = gateway(&upstream, "body_timeout = '1s'\nbody_rate_min = 1000", "max_concurrent_per_address = 4");
    let head = b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n";
    let mut slow = gateway.connect();
    slow.write_all(head).unwrap();
    slow.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    // Each byte is in time, and together they are far too slow.
    let mut received = Vec::new();
    let response = loop {
        let _ = slow.write_all(b"x");
        let mut bytes = [0; 1024];
        match slow.read(&mut bytes) {
            Ok(0) => break String::from_utf8(received).unwrap(),
            Ok(count) => received.extend_from_slice(&bytes[..count]),
            Err(_) => {}
        }
    };
    assert!(response.starts_with("HTTP/1.1 408 "), "{response}");

    let mut stream = frames::begin(gateway.connect(), None);
    frames::request(&mut stream, 1, "POST", "/slow", true);
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let ended = || {
        stream.write_all(&frames::frame(0, 0, 1, b"x")).unwrap();
        let mut frames = std::iter::from_fn(|| frames::read(&mut stream));
        frames.any(|(kind, _, number)| number == 1 && kind == frames::RST_STREAM)
    };
    eventually("the stream is reset", ended, |is_reset| *is_reset);
    until_no_slot_is_taken(&gateway);
}

#[test]
fn an_address_has_a_share_of_the_slots() {
    let upstream = Upstream::start(|request, stream| match request.path() {
        "/held" => {
            let _ = stream.read(&mut [0]);
            false
        }
        _ => ok(stream, "", b"hello"),
    });
    let gateway = gateway(&upstream, "", "");
    // The default is a quarter of four.
    let mut held = gateway.client();
    held.send("GET", "/held", &[], "");
    eventually("it is at the upstream", || upstream.requests().len(), |count| *count == 1);
    let refused = gateway.get("/");
    assert_eq!((refused.status, refused.headers["retry-after"].as_str()), (429, "1"), "{refused:?}");
    assert!(refused.body.contains(r#""error":"too_many_concurrent_requests""#), "{refused:?}");
    assert_eq!(gateway.client_from("127.0.0.2").ask("GET", "/", &[], "").status, 200);
    let metrics = gateway.until("/metrics", |answer| answer.status == 200).body;
    let count = "tidegate_upstream_errors_total{upstream=\"web\",reason=\"address_limit\"} 1\n";
    assert!(metrics.contains(count), "{metrics}");
    drop(held);
    until_no_slot_is_taken(&gateway);

    // Behind a trusted proxy, the client that it reports has the share. The proxy itself has none.
    let trusting = format!(
        "trusted_proxies = ['127.0.0.0/8']\n[[upstreams]]\nname = 'web'\nservers = ['{}']\nmax_concurrent = 4\nqueue = 0\n",
        upstream.url()
    );
    let gateway = GatewayProcess::configured(&trusting, &[]);
    let mut held = gateway.client();
    held.send("GET", "/held", &[("x-forwarded-for", "203.0.113.9")], "");
    eventually("it is at the upstream", || upstream.unanswered().len(), |count| *count == 1);
    let status = |headers: &[(&str, &str)]| gateway.client().ask("GET", "/", headers, "").status;
    eventually("the share is used up", || status(&[("x-forwarded-for", "203.0.113.9")]), |status| *status == 429);
    assert_eq!((status(&[("x-forwarded-for", "203.0.113.10")]), status(&[])), (200, 200));
}

/// Events that the upstream sends slowly, and tunnels, are not slow clients.
#[test]
fn slow_events_and_tunnels_are_not_cut_off() {
    let upstream = Upstream::start(|request, stream| {
        if request.path() == "/tunnel" {
            let head = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
            stream.write_all(head).unwrap();
            let mut byte = [0];
            while stream.read(&mut byte).is_ok_and(|count| count == 1) {
                stream.write_all(&byte).unwrap();
            }
            return false;
        }
        let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        stream.write_all(head).unwrap();
        for _ in 0..30 {
            // The pace of the events is what is tested: the response takes longer than a client may be slow.
            std::thread::sleep(Duration::from_millis(100));
            stream.write_all(b"9\r\ndata: x\n\n\r\n").unwrap();
        }
        stream.write_all(b"0\r\n\r\n").is_ok()
    });
    // The events take three seconds. A client that took them as slowly would be cut off after two.
    let gateway = gateway(
        &upstream,
        "body_timeout = '2s'\nbody_rate_min = 1000000",
        "max_concurrent_per_address = 4\ntimeouts = { idle = '2s' }",
    );
    let mut events = gateway.connect();
    events.write_all(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let received = receive_until(&mut events, "0\r\n\r\n");
    assert_eq!(received.matches("data: x\n\n").count(), 30, "{received}");

    let mut http2 = frames::begin(gateway.connect(), None);
    frames::request(&mut http2, 1, "GET", "/events", false);
    let mut count = 0;
    loop {
        match frames::read(&mut http2).expect("the connection stays open") {
            (0, flags, 1) => {
                count += 1;
                if flags & 1 == 1 {
                    break;
                }
            }
            (kind, _, number) => assert!((kind, number) != (frames::RST_STREAM, 1), "after {count} frames"),
        }
    }
    assert!(count >= 30, "{count}");

    // A tunnel has no total time.
    let limits = "body_timeout = '2s'\nbody_rate_min = 1000000";
    let gateway = super::slots::gateway(&upstream, limits, "timeouts = { total = '1s', idle = '2s' }");
    let mut tunnel = gateway.connect();
    tunnel.write_all(b"GET /tunnel HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n").unwrap();
    assert!(receive_until(&mut tunnel, "\r\n\r\n").starts_with("HTTP/1.1 101 "));
    for _ in 0..20 {
        // The tunnel must outlive the total time of a response, by the clock of the gateway's process.
        std::thread::sleep(Duration::from_millis(100));
        tunnel.write_all(b"x").unwrap();
        tunnel.read_exact(&mut [0]).unwrap();
    }
}

/// A client that accepts a byte from time to time is cut off, although the response is never idle for long.
#[test]
fn a_window_that_opens_byte_by_byte_does_not_keep_a_slot() {
    let upstream = upstream();
    let gateway =
        gateway(&upstream, "body_rate_min = 1000", "max_concurrent_per_address = 4\ntimeouts = { idle = '1s' }");
    let mut stream = frames::begin(gateway.connect(), Some(0));
    frames::request(&mut stream, 1, "GET", "/large", false);
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let mut is_reset = || {
        // Opens the window of the stream by one byte.
        let _ = stream.write_all(&frames::frame(8, 0, 1, &1_u32.to_be_bytes()));
        let mut frames = std::iter::from_fn(|| frames::read(&mut stream));
        frames.any(|(kind, _, number)| number == 1 && kind == frames::RST_STREAM)
    };
    eventually("the stream is reset", &mut is_reset, |is_reset| *is_reset);
    let metrics = gateway.until("/metrics", |answer| answer.status == 200).body;
    let count = "tidegate_upstream_errors_total{upstream=\"web\",reason=\"slow_client\"} 1\n";
    assert!(metrics.contains(count), "{metrics}");
    until_no_slot_is_taken(&gateway);
}
