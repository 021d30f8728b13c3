//! Requests and responses through the gateway.

use std::io::{Read, Write};

use tidegate_testkit::http::upstream::Upstream;
use tidegate_testkit::http::upstream::{ok, reply};
use tidegate_testkit::program::GatewayProcess;
use tidegate_testkit::program::{command, ended};

#[test]
fn requests_are_forwarded_until_the_limit_refuses_them() {
    let upstream = Upstream::start(|request, stream| ok(stream, "x-of: upstream\r\n", &request.body));
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url(), "--limit", "3/h"]);
    let mut client = gateway.client();
    for (remaining, (method, path, body)) in
        [("GET", "/a?b=c", ""), ("POST", "/echo", "a body"), ("DELETE", "/x", "")].into_iter().enumerate()
    {
        let answer = client.ask(method, path, &[("x-mine", "1")], body);
        assert_eq!((answer.status, answer.body.as_str()), (200, body), "{answer:?}");
        assert_eq!(answer.headers["x-of"], "upstream");
        assert_eq!(answer.headers["x-ratelimit-remaining"], (2 - remaining).to_string());
        let received = upstream.last();
        assert!(received.head.starts_with(&format!("{method} {path} HTTP/1.1\r\n")), "{received:?}");
        assert_eq!((received.header("x-mine"), received.header("host")), (Some("1"), Some("x")), "{received:?}");
        assert_eq!(received.body, body.as_bytes());
    }
    let (connections, requests) = (upstream.connections(), upstream.requests().len());
    assert_eq!((connections, requests), (1, 3), "the connection is kept");
    for body in ["", "a body"] {
        let refused = gateway.client().ask("POST", "/echo", &[], body);
        assert_eq!(refused.status, 429, "{refused:?}");
        assert!(refused.body.contains(r#""error":"rate_limited""#) && refused.headers.contains_key("retry-after"));
    }
    assert_eq!((upstream.connections(), upstream.requests().len()), (1, 3), "a refusal does not reach the upstream");
}

#[test]
fn a_refusal_does_not_read_the_body() {
    let upstream = Upstream::hello();
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url(), "--limit", "1/h"]);
    assert_eq!(gateway.get("/").status, 200);
    let mut client = gateway.client();
    // The body never arrives.
    client.raw(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n");
    assert_eq!(client.receive().unwrap().status, 429);
    client.raw(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1000000\r\n\r\n");
    assert_eq!(
        client.receive().map(|answer| answer.status),
        None,
        "the connection ends, because its body was not read"
    );
    let mut client = gateway.client();
    client.raw(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1000000\r\n\r\n");
    assert_eq!(client.receive().unwrap().status, 429, "100 is not sent for a refused request");
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn statuses_and_headers_of_the_upstream_are_forwarded() {
    let upstream = Upstream::start(|request, stream| {
        let headers = "connection: x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\nset-cookie: a=1\r\nset-cookie: b=2\r\n\
                       x-ratelimit-limit: 7\r\n";
        match request.path() {
            "/missing" => reply(stream, "404 Not Found", headers, b"nothing here"),
            "/moved" => reply(stream, "301 Moved Permanently", "location: /elsewhere\r\n", b""),
            _ => reply(stream, "204 No Content", "", b""),
        }
    });
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url()]);
    gateway.wait_for_log("nothing is limited");
    let missing = gateway.get("/missing");
    assert_eq!((missing.status, missing.body.as_str()), (404, "nothing here"));
    assert!(!missing.headers.contains_key("x-hop") && !missing.headers.contains_key("keep-alive"), "{missing:?}");
    assert_eq!(missing.headers["x-ratelimit-limit"], "7", "without a rule, the upstream's own limits are kept");
    assert_eq!(gateway.get("/moved").headers["location"], "/elsewhere");
    assert_eq!(gateway.get("/").status, 204);
    let mut stream = gateway.connect();
    stream.write_all(b"HEAD /missing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut head = String::new();
    stream.read_to_string(&mut head).unwrap();
    assert!(head.starts_with("HTTP/1.1 404 ") && head.contains("content-length: 12\r\n"), "{head}");
    assert!(head.ends_with("\r\n\r\n"), "a response to HEAD has no body: {head}");
}

#[test]
fn the_gateway_does_not_start_without_a_usable_upstream() {
    for (arguments, phrase) in [
        (&["gateway"][..], "the gateway has no upstream"),
        (&["gateway", "--upstream", "ftp://127.0.0.1:3000"], "the scheme must be http or https"),
        (&["gateway", "--upstream", "127.0.0.1:3000"], "did you mean http://127.0.0.1:3000?"),
        (&["gateway", "--upstream", "http://u:planted@127.0.0.1:3000"], "must not contain a user or password"),
        (&["gateway", "--upstream", "http://127.0.0.1:3000/api"], "must not contain a path"),
        (&["gateway", "--upstream", "http://127.0.0.1:3000?x=1"], "must not contain a query"),
        (&["gateway", "--upstream", "http://127.0.0.1:3000", "--limit", "0/min"], "quota"),
        (&["gateway", "--upstream", "http://127.0.0.1:3000", "--tls-cert", "cert.pem"], "--tls-key"),
    ] {
        let output = ended(command().args(arguments));
        let said = String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(phrase), "{phrase}: {said}");
    }
}
