//! Clients that try to be counted as another client, or to get their units back.

use std::io::{Read, Write};
use std::net::Shutdown;

use tidegate_testkit::poll::eventually;

use tidegate_testkit::http::upstream::Upstream;
use tidegate_testkit::http::upstream::{ok, reply};
use tidegate_testkit::program::GatewayProcess;

/// Starts a gateway with these settings and rules.
fn gateway(upstream: &Upstream, configuration: &str) -> GatewayProcess {
    let url = upstream.url();
    GatewayProcess::configured(&format!("{configuration}\n[[upstreams]]\nname = 'web'\nservers = ['{url}']\n"), &[])
}

#[test]
fn headers_with_underscores_do_not_reach_the_upstream() {
    let upstream = Upstream::hello();
    let rules = "api_keys = 'any'\nforwarding_header = 'CF-Connecting-IP'\ntrusted_proxies = ['10.0.0.0/8']\n\
                 [[rules]]\nname = 'all'\nlimits = ['100/h']\n";
    let sent = [
        ("X_API_Key", "other"),
        ("x-api_key", "other"),
        ("X_Kind", "full"),
        ("X_HTTP_Method_Override", "DELETE"),
        ("CF_Connecting_IP", "6.6.6.6"),
        ("x-api-key", "mine"),
    ];
    for (settings, forwarded) in [
        ("", &["x-api-key"][..]),
        (
            "[gateway]\nunderscores_in_headers = true\n",
            &["x_api_key", "x-api_key", "x_kind", "x_http_method_override", "x-api-key"],
        ),
    ] {
        let gateway = gateway(&upstream, &format!("{rules}{settings}"));
        assert_eq!(gateway.client().ask("GET", "/", &sent, "").status, 200);
        let received = upstream.last();
        let received: Vec<&str> =
            sent.iter().map(|(name, _)| *name).filter(|name| received.header(name).is_some()).collect();
        let received: Vec<String> = received.iter().map(|name| name.to_ascii_lowercase()).collect();
        assert_eq!(received, forwarded, "{settings}");
    }
}

#[test]
fn a_header_that_identifies_the_client_cannot_be_removed_by_connection() {
    let upstream = Upstream::hello();
    let gateway = gateway(&upstream, "api_keys = 'any'\n[[rules]]\nname = 'all'\nlimits = ['1/h']\n");
    for named in ["x-api-key", "close, X-Api-Key", "authorization", "cookie", "keep-alive, x-kind"] {
        let sent =
            [("connection", named), ("x-api-key", "a"), ("authorization", "b"), ("cookie", "c=d"), ("x-kind", "e")];
        let answer = gateway.client().ask("GET", "/", &sent, "");
        assert_eq!(answer.status, 400, "{named}: {answer:?}");
        assert!(answer.body.contains("the Connection header names a header"), "{answer:?}");
    }
    assert_eq!(upstream.requests().len(), 0);
    let sent = [("connection", "keep-alive, te, x-absent"), ("te", "trailers"), ("x-api-key", "a")];
    assert_eq!(gateway.client().ask("GET", "/", &sent, "").status, 200);
    assert_eq!(upstream.last().header("x-api-key"), Some("a"));
}

#[test]
fn aborting_a_body_gives_nothing_back() {
    let upstream = Upstream::start(|request, stream| match request.path() {
        "/500" => reply(stream, "500 Internal Server Error", "", b""),
        _ => ok(stream, "", b"hello"),
    });
    let rules = "[gateway]\nbody_timeout = '200ms'\n\
                 [[rules]]\nname = 'all'\nlimits = ['10/h']\ncharge = 'on_success'\n";
    let gateway = gateway(&upstream, rules);
    let remaining = || gateway.get("/500").headers["x-ratelimit-remaining"].parse::<u32>().unwrap();
    assert_eq!(remaining(), 10, "a failure of the upstream is refunded");
    let half = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf";
    let metric = "tidegate_upstream_in_flight{upstream=\"web\"} 0\n";
    for (number, ending) in ["closes", "closes one side", "stops sending", "malformed"].into_iter().enumerate() {
        let mut stream = gateway.connect();
        match ending {
            "malformed" => {
                let head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
                stream.write_all(&[&head[..], b"5\r\nhello\r\nnot a size\r\n"].concat()).unwrap();
            }
            _ => stream.write_all(half).unwrap(),
        }
        match ending {
            "closes" => drop(stream),
            _ => {
                if ending == "closes one side" {
                    stream.shutdown(Shutdown::Write).unwrap();
                }
                let _ = stream.read_to_end(&mut Vec::new());
            }
        }
        gateway.until("/metrics", |answer| answer.body.contains(metric));
        let expected = 10 - 1 - u32::try_from(number).unwrap();
        eventually(ending, remaining, |remaining| *remaining == expected);
        assert_eq!(remaining(), expected, "{ending}");
    }
}

#[test]
fn an_upstream_that_answers_408_before_the_end_of_the_body_gives_nothing_back() {
    // Answers as soon as it has the head.
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in socket.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let _ = stream.read(&mut [0; 4096]);
        }
    });
    let configuration = format!(
        "[[upstreams]]\nname = 'web'\nservers = ['{url}']\n[[rules]]\nname = 'all'\nlimits = ['10/h']\ncharge = 'on_success'\n"
    );
    let gateway = GatewayProcess::configured(&configuration, &[]);
    let mut stream = gateway.connect();
    stream.write_all(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf").unwrap();
    let mut received = [0; 4096];
    let count = stream.read(&mut received).unwrap();
    let received = String::from_utf8_lossy(&received[..count]);
    assert!(received.starts_with("HTTP/1.1 408 ") && received.contains("x-ratelimit-remaining: 9\r\n"), "{received}");
    let answer = gateway.get("/");
    assert_eq!((answer.status, answer.headers["x-ratelimit-remaining"].as_str()), (408, "9"), "{answer:?}");
}

#[test]
fn an_upstream_cannot_open_a_tunnel_that_was_not_asked_for() {
    let upstream = Upstream::start(|request, stream| {
        let protocol = &request.path()[1..];
        let head = format!("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\r\n");
        let _ = stream.write_all(head.as_bytes());
        let _ = stream.read(&mut [0]);
        false
    });
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url()]);
    let upgrade = [("connection", "upgrade"), ("upgrade", "websocket, echo")];
    for (path, headers, status) in
        [("/websocket", &upgrade[..], 101), ("/other", &upgrade, 502), ("/websocket", &[], 502), ("/", &upgrade, 502)]
    {
        let mut client = gateway.client();
        client.send("GET", path, headers, "");
        assert_eq!(client.receive().unwrap().status, status, "{path}");
    }
}
