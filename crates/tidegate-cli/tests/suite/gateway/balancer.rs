//! The gateway behind a balancer that forwards connections, and on a socket that another process holds.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tidegate_testkit::poll::eventually;

use crate::inherited::inherit;
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::http::upstream::Upstream;
use tidegate_testkit::program::GatewayProcess;
use tidegate_testkit::program::Serving;

const RESTARTS: usize = 3;

/// A configuration with two requests per address, and this content of `[gateway]`.
fn configuration(upstream: &Upstream, trusted: &str, gateway: &str) -> String {
    format!(
        "trusted_proxies = [\"{trusted}\"]\n[gateway]\n{gateway}\n\
         [[upstreams]]\nname = \"web\"\nservers = [\"{}\"]\n\
         [[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"2/h\"]\n",
        upstream.url()
    )
}

/// A PROXY protocol header of version 1 for a client with this address.
fn v1(client: &str) -> Vec<u8> {
    format!("PROXY TCP4 {client} 198.51.100.7 56324 443\r\n").into_bytes()
}

/// A PROXY protocol header of version 2 for a client with this address.
fn v2(client: [u8; 4]) -> Vec<u8> {
    [b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c", &client[..], &[198, 51, 100, 7, 0xdc, 4, 1, 0xbb]].concat()
}

#[test]
fn clients_of_a_balancer_are_those_of_its_proxy_headers() {
    let upstream = Upstream::hello();
    let gateway = GatewayProcess::configured(&configuration(&upstream, "127.0.0.1", "proxy_protocol = true"), &[]);
    for (client, statuses) in [("203.0.113.9", [200, 200, 429]), ("203.0.113.10", [200, 200, 429])] {
        for (header, status) in
            [v1(client), v2(client.parse::<std::net::Ipv4Addr>().unwrap().octets()), v1(client)].iter().zip(statuses)
        {
            let mut connection = gateway.client();
            connection.raw(header);
            assert_eq!(connection.ask("GET", "/", &[], "").status, status, "{client}");
        }
        assert_eq!(upstream.last().header("x-forwarded-for"), Some(client));
    }

    let mut without = gateway.client();
    without.send("GET", "/", &[], "");
    assert!(without.receive().is_none(), "a connection of the balancer without a header is closed");
    gateway.wait_for_log("expected a PROXY protocol header, version 1 or 2");
    assert_eq!(upstream.requests().len(), 4);
}

#[test]
fn proxy_header_of_any_other_client_is_malformed_http() {
    let upstream = Upstream::hello();
    let gateway = GatewayProcess::configured(&configuration(&upstream, "10.0.0.0/8", "proxy_protocol = true"), &[]);
    for header in [v1("203.0.113.9"), v2([203, 0, 113, 9])] {
        let mut client = gateway.client();
        client.raw(&header);
        assert_eq!(client.ask("GET", "/", &[], "").status, 400);
    }
    assert_eq!(upstream.requests().len(), 0);
    assert_eq!(gateway.get("/").status, 200, "without a header");
    assert_eq!(upstream.last().header("x-forwarded-for"), Some("127.0.0.1"));
}

#[test]
fn one_address_has_a_bound_on_its_connections_and_others_are_not_affected() {
    let upstream = Upstream::hello();
    let gateway = "proxy_protocol = true\nconnections_per_address = 2";
    let gateway = GatewayProcess::configured(&configuration(&upstream, "127.0.0.1", gateway), &[]);
    let open = |client: &str| {
        let mut connection = gateway.client();
        connection.raw(&v1(client));
        let status = connection.ask("GET", "/", &[], "").status;
        (connection, status)
    };
    let held = [open("203.0.113.9"), open("203.0.113.9")];
    assert_eq!(held.each_ref().map(|(_, status)| *status), [200, 200]);
    assert_eq!(open("203.0.113.9").1, 503, "a third connection");
    assert_eq!(open("203.0.113.10").1, 200, "another address");
    drop(held);
    // The limit of two requests is used up, so 429 is the answer on a connection that is served.
    eventually("a free connection", || open("203.0.113.9").1, |status| *status == 429);
}

#[test]
fn no_request_fails_while_the_gateway_is_restarted_on_an_inherited_socket() {
    let upstream = Upstream::hello();
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let start = || {
        let arguments = ["--upstream", &upstream.url(), "--listen", &address];
        GatewayProcess::start_as(inherit(Serving::command(), &[&socket]), &arguments, None)
    };
    let (ends, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut gateway = start();
    let clients: Vec<_> = (0..3)
        .map(|_| {
            let (address, ends, answered) = (address.clone(), ends.clone(), answered.clone());
            std::thread::spawn(move || {
                while !ends.load(Ordering::Relaxed) {
                    let mut client = HttpClient::open(&address);
                    for _ in 0..20 {
                        let answer = client.ask("GET", "/", &[], "");
                        assert_eq!(answer.status, 200, "{answer:?}");
                        answered.fetch_add(1, Ordering::Relaxed);
                        if answer.headers.get("connection").is_some_and(|value| value == "close") {
                            break;
                        }
                    }
                }
            })
        })
        .collect();
    for _ in 0..RESTARTS {
        let before = answered.load(Ordering::Relaxed);
        eventually("some requests", || answered.load(Ordering::Relaxed), |now| *now > before + 100);
        let next = start();
        gateway.signal("TERM");
        assert_eq!(gateway.child.wait().unwrap().code(), Some(0));
        gateway = next;
    }
    ends.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| client.join().expect("no request failed"));
}

#[test]
fn proxy_protocol_without_trusted_proxies_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, "[gateway]\nproxy_protocol = true\n").unwrap();
    let output = tidegate_testkit::program::command().arg("validate").arg(&file).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("accepted only from trusted_proxies"), "{text}");
}
