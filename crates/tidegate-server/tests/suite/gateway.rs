//! Requests through the gateway: their charges, whatever way they end, and the bytes that are held of incomplete ones.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::Limiter;
use tidegate::config::Loader;
use tidegate::engine::Engine;
use tidegate_server::listeners::gateway::GATEWAY;
use tidegate_server::{Bounds, Gateway, ServerOptions, run};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::PATIENCE;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Builder;

use crate::deployment::load;
use crate::http_subject::exchange;
use crate::site::listen;

/// Answers by the path of a request: with its status, by closing the connection, or not until the gateway closes it.
async fn answer(mut stream: tokio::net::TcpStream, hanging: &Mutex<HashSet<String>>) {
    let mut head = Vec::new();
    while stream.read_buf(&mut head).await.is_ok_and(|count| count > 0) {
        if !head.ends_with(b"\r\n\r\n") {
            continue;
        }
        let text = String::from_utf8(std::mem::take(&mut head)).unwrap();
        match text.split(' ').nth(1).unwrap() {
            "/reset" => return,
            "/garbage" => drop(stream.write_all(b"this is not HTTP\r\n\r\n").await),
            path if path.starts_with("/hang") => {
                hanging.lock().unwrap().insert(path.to_owned());
                drop(stream.read_to_end(&mut Vec::new()).await);
            }
            "/" => drop(stream.write_all(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n").await),
            status => {
                let head = format!("HTTP/1.1 {} X\r\ncontent-length: 0\r\n\r\n", &status[1..]);
                drop(stream.write_all(head.as_bytes()).await);
            }
        }
    }
}

fn get(gateway: SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(gateway).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).unwrap();
    stream
}

/// `TIDEGATE_GATEWAY_ENDINGS` sets the number of requests; `make gateway` uses 10,000.
#[test]
fn requests_are_charged_exactly_whatever_way_they_end() {
    let count = std::env::var("TIDEGATE_GATEWAY_ENDINGS").ok().and_then(|text| text.parse().ok()).unwrap_or(400_u64);
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _context = runtime.enter();
    let (upstream, upstream_at) = listen();
    let hanging: &'static Mutex<HashSet<String>> = Box::leak(Box::default());
    tokio::spawn(async move {
        while let Ok((stream, _)) = upstream.accept().await {
            tokio::spawn(answer(stream, hanging));
        }
    });
    let configuration = format!(
        "[[rules]]\nname = 'failures'\nby = ['ip']\nlimits = ['1000000/day']\ncharge = 'on_failure'\n\
         [[upstreams]]\nname = 'web'\nservers = ['http://{upstream_at}']\ntimeouts = {{ header = '100ms' }}\n"
    );
    let loaded = load(&Loader::new(), &configuration);
    let limiter = Limiter::memory();
    let engine = Engine::new(limiter, loaded.rules.clone());
    let (socket, gateway) = listen();
    let options = ServerOptions::new(engine).gateway(Gateway::new(&loaded.gateway).unwrap());
    tokio::spawn(run([(&GATEWAY, socket)], options, std::future::pending()));

    let failures = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let failures = &failures;
            scope.spawn(move || {
                let mut random = random_numbers(thread + 1);
                for round in 0..count / 8 {
                    let gone = format!("/hang/{thread}/{round}");
                    let (path, is_failure, is_awaited) = match random() % 10 {
                        0..4 => ("/200", false, true),
                        4 => ("/404", true, true),
                        5 => ("/503", true, true),
                        6 => ("/reset", true, true),
                        7 => ("/garbage", true, true),
                        8 => ("/hang", true, true),
                        // The client is gone before there is a response.
                        _ => (gone.as_str(), true, false),
                    };
                    let stream = get(gateway, path);
                    if is_awaited {
                        let status = exchange(&mut HttpClient::on(stream), "").status;
                        assert_eq!(status >= 400, is_failure, "{path}: {status}");
                    } else {
                        let is_there = || hanging.lock().unwrap().contains(path);
                        assert!(tidegate_testkit::poll::poll(is_there), "{path} does not arrive");
                    }
                    failures.fetch_add(u64::from(is_failure), Ordering::Relaxed);
                }
            });
        }
    });
    // The charge of a client that is gone may still be under way.
    let remaining = || {
        let response = exchange(&mut HttpClient::on(get(gateway, "/200")), "");
        response.headers["x-ratelimit-remaining"].parse::<u64>().unwrap()
    };
    let expected = 1_000_000 - failures.load(Ordering::Relaxed);
    println!("{count} requests, {} failures", failures.load(Ordering::Relaxed));
    tidegate_testkit::poll::eventually("all failures are charged", remaining, |remaining| *remaining == expected);
}

/// Each connection sends most of a head. Together they exceed the budget, so the oldest are dropped.
#[test]
fn the_bytes_of_incomplete_heads_are_bounded() {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _context = runtime.enter();
    let (upstream, upstream_at) = listen();
    tokio::spawn(async move {
        while let Ok((stream, _)) = upstream.accept().await {
            tokio::spawn(answer(stream, Box::leak(Box::default())));
        }
    });
    let servers = vec![format!("http://{upstream_at}").parse().unwrap()];
    let settings = tidegate::gateway::GatewaySettings::default().with_servers(servers);
    let (socket, gateway) = listen();
    let bounds = Bounds { receive_bytes: 100_000, ..Bounds::default() };
    let options = ServerOptions::new(Limiter::memory()).gateway(Gateway::new(&settings).unwrap()).bounds(bounds);
    tokio::spawn(run([(&GATEWAY, socket)], options, std::future::pending()));

    // Complete requests do not count, however many a connection has sent: none of these is dropped.
    let complete = format!("GET / HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "x".repeat(4_000));
    let mut kept: Vec<_> = (0..6).map(|_| HttpClient::open(gateway)).collect();
    for _ in 0..20 {
        kept.iter_mut().for_each(|stream| assert_eq!(exchange(stream, &complete).status, 404));
    }
    drop(kept);

    let head = format!("GET / HTTP/1.1\r\nhost: x\r\nx: {}", "x".repeat(20_000));
    let mut incomplete = Vec::new();
    for _ in 0..12 {
        let mut stream = TcpStream::connect(gateway).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        incomplete.push(stream);
    }
    let mut received = Vec::new();
    let _ = incomplete[0].read_to_end(&mut received);
    assert!(received.is_empty(), "the oldest is closed: {:?}", String::from_utf8_lossy(&received));
    let mut youngest = incomplete.pop().unwrap();
    youngest.write_all(b"\r\n\r\n").unwrap();
    assert_eq!(exchange(&mut HttpClient::on(youngest), "").status, 404, "the youngest is served");
}

/// A random sequence that depends on the seed alone.
fn random_numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    }
}
