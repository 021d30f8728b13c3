//! HTTP/2, TLS on both sides, upgrades, `Expect`, trailers, large bodies and trusted proxies.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, mpsc};

use tidegate_testkit::poll::eventually;

use tidegate_testkit::http::upstream::Upstream;
use tidegate_testkit::http::upstream::ok;
use tidegate_testkit::program::GatewayProcess;
use tidegate_testkit::program::PATIENCE;

/// Sends bytes and returns what is received until `end`.
fn exchange(stream: &mut std::net::TcpStream, bytes: &[u8], end: &str) -> String {
    stream.write_all(bytes).unwrap();
    receive_until(stream, end)
}

pub(super) fn receive_until(stream: &mut std::net::TcpStream, end: &str) -> String {
    let (mut received, mut byte) = (Vec::new(), [0]);
    while !received.ends_with(end.as_bytes()) {
        match stream.read(&mut byte) {
            Ok(1) => received.push(byte[0]),
            ended => panic!("{ended:?} after {:?}", String::from_utf8_lossy(&received)),
        }
    }
    String::from_utf8(received).unwrap()
}

fn curl(arguments: &[&str]) -> String {
    let output = Command::new("curl").arg("-sS").args(arguments).output().expect("curl is installed");
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn the_lists_of_a_trusted_proxy_are_extended_and_others_are_dropped() {
    let upstream = Upstream::hello();
    let sent = [("x-forwarded-for", "198.51.100.7"), ("x_forwarded_for", "6.6.6.6"), ("x-forwarded-proto", "https")];
    let of = |proxies: &str| {
        let rule = "[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['100/h']\n";
        let url = upstream.url();
        let gateway = GatewayProcess::configured(
            &format!("{proxies}\n{rule}[[upstreams]]\nname = 'web'\nservers = ['{url}']\n"),
            &[],
        );
        assert_eq!(gateway.client().ask("GET", "/", &sent, "").status, 200);
        let received = upstream.last();
        let line = |name| received.header(name).map(str::to_owned);
        let lines = ["x-forwarded-for", "x-real-ip", "x-forwarded-proto", "forwarded", "x_forwarded_for"].map(line);
        lines.map(Option::unwrap_or_default)
    };
    let untrusted = ["127.0.0.1", "127.0.0.1", "http", "for=127.0.0.1;host=x;proto=http", ""];
    assert_eq!(of("").each_ref().map(String::as_str), untrusted);
    let trusted =
        ["198.51.100.7, 127.0.0.1", "198.51.100.7", "https", "for=198.51.100.7, for=127.0.0.1;host=x;proto=http", ""];
    assert_eq!(of("trusted_proxies = ['127.0.0.0/8']").each_ref().map(String::as_str), trusted);
}

#[test]
fn a_client_that_has_closed_its_sending_side_gets_a_response_that_comes_soon() {
    let (gave_up, has_given_up) = mpsc::channel();
    let upstream = Upstream::start(move |request, stream| {
        if request.path() == "/slow" {
            let _ = stream.read(&mut [0]);
            let _ = gave_up.send(());
            return false;
        }
        ok(stream, "", b"hello")
    });
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url()]);
    let ask = |request: &str| {
        let mut stream = gateway.connect();
        stream.write_all(request.as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut received = String::new();
        stream.read_to_string(&mut received).unwrap();
        received
    };
    for request in [
        "GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET / HTTP/1.0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\nbody",
        "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
    ] {
        // On a busy machine, a response may come too late.
        let is_answered = |received: &String| received.contains(" 200 OK\r\n") && received.ends_with("hello");
        eventually(request, || ask(request), is_answered);
    }
    assert_eq!(ask("GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"), "");
    has_given_up.recv_timeout(PATIENCE).expect("the request to the upstream is cancelled");
}

#[test]
fn an_upgraded_connection_is_a_tunnel() {
    let upstream = Upstream::start(|request, stream| {
        assert_eq!((request.header("upgrade"), request.header("connection")), (Some("echo"), Some("upgrade")));
        stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n").unwrap();
        let mut bytes = [0; 1024];
        while let Ok(count @ 1..) = stream.read(&mut bytes) {
            stream.write_all(&bytes[..count]).unwrap();
        }
        false
    });
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url(), "--limit", "2/h"]);
    let upgrade = b"GET /ws HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, Upgrade\r\nupgrade: echo\r\n\r\nfirst ";
    let mut stream = gateway.connect();
    // The first bytes of the new protocol come with the request.
    let head = exchange(&mut stream, upgrade, "\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 101 ") && head.contains("upgrade: echo\r\n"), "{head}");
    assert!(head.contains("x-ratelimit-remaining: 1\r\n"), "{head}");
    assert_eq!(exchange(&mut stream, b"second.", "."), "first second.");
    for round in 0..100 {
        let message = format!("message {round}.");
        assert_eq!(exchange(&mut stream, message.as_bytes(), "."), message);
    }
    drop(stream);
    gateway.until("/metrics", |answer| {
        answer.body.contains("tidegate_upstream_in_flight{upstream=\"upstream\"} 0\n")
            && answer.body.contains("tidegate_connections{listener=\"gateway\"} 0\n")
    });
    assert_eq!(upstream.requests().len(), 1);
}

#[test]
fn an_upgrade_to_http2_is_not_forwarded() {
    let upstream = Upstream::hello();
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url()]);
    let headers =
        [("connection", "upgrade, http2-settings"), ("upgrade", "h2c"), ("http2-settings", "AAMAAABkAAQAAP__")];
    assert_eq!(gateway.client().ask("GET", "/", &headers, "").status, 200);
    let received = upstream.last();
    for name in ["connection", "upgrade", "http2-settings"] {
        assert_eq!(received.header(name), None, "{received:?}");
    }
}

#[test]
fn a_client_that_expects_100_continue_gets_it_when_the_request_is_admitted() {
    let upstream = Upstream::start(|request, stream| ok(stream, "", &request.body));
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url()]);
    let mut stream = gateway.connect();
    let head = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n";
    assert_eq!(exchange(&mut stream, head, "\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
    let response = exchange(&mut stream, b"body", "body");
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    assert_eq!(upstream.last().header("expect"), None);
}

#[test]
fn trailers_are_forwarded_in_both_directions() {
    let upstream = Upstream::start(|_, stream| {
        let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n";
        stream.write_all(format!("{head}5\r\nhello\r\n0\r\nx-sum: 5\r\n\r\n").as_bytes()).is_ok()
    });
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url()]);
    let mut stream = gateway.connect();
    let head = "POST / HTTP/1.1\r\nhost: x\r\nte: trailers\r\ntransfer-encoding: chunked\r\ntrailer: x-count, x-real-ip\r\n\r\n";
    let request = format!("{head}3\r\nabc\r\n0\r\nx-count: 3\r\nx-real-ip: 6.6.6.6\r\n\r\n");
    let response = exchange(&mut stream, request.as_bytes(), "x-sum: 5\r\n\r\n");
    assert!(response.contains("5\r\nhello\r\n0\r\n"), "{response}");
    let received = upstream.last();
    assert_eq!((received.body.as_slice(), received.trailers.as_str()), (&b"abc"[..], "x-count: 3\r\n"));
    assert_eq!(received.header("te"), Some("trailers"));
}

/// The upstream answers when it has a hundred requests, so they are under way at the same time.
#[test]
fn http2_with_a_hundred_streams_is_forwarded() {
    let arrived = Arc::new((Mutex::new(0), Condvar::new()));
    let upstream = Upstream::start(move |request, stream| {
        *arrived.0.lock().unwrap() += 1;
        arrived.1.notify_all();
        let all = arrived.1.wait_timeout_while(arrived.0.lock().unwrap(), PATIENCE, |count| *count < 100).unwrap();
        assert!(!all.1.timed_out(), "a hundred requests at the same time");
        drop(all);
        ok(stream, "", request.path().as_bytes())
    });
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url(), "--limit", "100/h"]);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let statuses = runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(&gateway.address).await.unwrap();
        let executor = hyper_util::rt::TokioExecutor::new();
        let handshake = hyper::client::conn::http2::handshake(executor, hyper_util::rt::TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        let mut requests = tokio::task::JoinSet::new();
        for number in 0..101 {
            let uri = format!("http://{}/{number}", gateway.address);
            let request = http::Request::get(uri).body(http_body_util::Empty::<bytes::Bytes>::new()).unwrap();
            requests.spawn(sender.send_request(request));
        }
        let responses = requests.join_all().await;
        responses.into_iter().map(|response| response.unwrap().status().as_u16()).collect::<Vec<_>>()
    });
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 100, "{statuses:?}");
    assert_eq!(statuses.iter().filter(|status| **status == 429).count(), 1, "{statuses:?}");
    let mut paths: Vec<String> = upstream.requests().iter().map(|request| request.path().to_owned()).collect();
    paths.sort();
    paths.dedup();
    assert_eq!(paths.len(), 100);
    let hosts = upstream.requests().into_iter().map(|request| request.header("host").unwrap().to_owned());
    assert!(hosts.into_iter().all(|host| host == gateway.address), "a Host header is made of :authority");
}

/// A certificate authority, and certificates for 127.0.0.1 and other.test.
pub(super) struct Certificates {
    dir: tempfile::TempDir,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Certificates {
    pub(super) fn new() -> Certificates {
        let dir = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, "an authority for tests");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        std::fs::write(dir.path().join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        let certificates = Certificates { dir, issuer: rcgen::Issuer::new(params, key) };
        ["127.0.0.1", "other.test"].into_iter().for_each(|name| certificates.renew(name));
        certificates
    }

    /// Writes a new certificate for this name, and its key.
    pub(super) fn renew(&self, name: &str) {
        let key = rcgen::KeyPair::generate().unwrap();
        let leaf = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &self.issuer).unwrap();
        for (kind, text) in [("cert", leaf.pem()), ("key", key.serialize_pem())] {
            let file = self.path(&format!("{name}.{kind}"));
            std::fs::write(file.with_extension("draft"), text).unwrap();
            std::fs::rename(file.with_extension("draft"), file).unwrap();
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts a gateway with the certificate for this name.
    pub(super) fn gateway(&self, name: &str, upstream: &Upstream) -> GatewayProcess {
        let [certificate, key] = ["cert", "key"].map(|kind| self.path(&format!("{name}.{kind}")));
        let (certificate, key) = (certificate.to_str().unwrap(), key.to_str().unwrap());
        GatewayProcess::start(&["--upstream", &upstream.url(), "--tls-cert", certificate, "--tls-key", key])
    }
}

#[test]
fn clients_choose_http2_or_http1_in_the_tls_handshake() {
    let certificates = Certificates::new();
    let upstream = Upstream::hello();
    let gateway = certificates.gateway("127.0.0.1", &upstream);
    let authority = certificates.path("ca.pem");
    for (option, version) in [("--http2", "2"), ("--http1.1", "1.1")] {
        let url = gateway.url("https", "/");
        let output = curl(&[option, "--cacert", authority.to_str().unwrap(), "-w", " %{http_version}", &url]);
        assert_eq!(output, format!("hello {version}"));
        let received = upstream.last();
        assert_eq!(received.header("x-forwarded-proto"), Some("https"));
        let port = gateway.address.rsplit(':').next();
        assert_eq!(received.header("x-forwarded-port"), port);
    }
}

/// The upstream is a gateway with TLS.
#[test]
fn the_certificate_of_an_upstream_is_checked() {
    let certificates = Certificates::new();
    let upstream = Upstream::hello();
    let authority = certificates.path("ca.pem");
    for (name, authorities, status) in [("127.0.0.1", true, 200), ("127.0.0.1", false, 502), ("other.test", true, 502)]
    {
        let inner = certificates.gateway(name, &upstream);
        let ca_file = if authorities { format!("ca_file = '{}'\n", authority.display()) } else { String::new() };
        let configuration = format!("[[upstreams]]\nname = 'tls'\nservers = ['https://{}']\n{ca_file}", inner.address);
        let outer = GatewayProcess::configured(&configuration, &[]);
        assert_eq!(outer.get("/").status, status, "{name}, {authorities}");
    }
}

/// `TIDEGATE_GATEWAY_BODY_MIB` sets the size of the body; `make gateway` uses 1 GiB.
#[test]
fn large_bodies_are_streamed_in_both_directions_with_flat_memory() {
    let mib: usize = std::env::var("TIDEGATE_GATEWAY_BODY_MIB").ok().and_then(|text| text.parse().ok()).unwrap_or(64);
    let block = vec![b'x'; 1 << 20];
    // Reads the body itself, because the recording server would keep it.
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    let echo = std::thread::spawn({
        let block = block.clone();
        move || {
            let (mut stream, _) = socket.accept().unwrap();
            let _ = receive_until(&mut stream, "\r\n\r\n");
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", mib << 20);
            let mut received = vec![0; 1 << 20];
            for _ in 0..mib {
                stream.read_exact(&mut received).unwrap();
                assert!(received == block);
            }
            stream.write_all(head.as_bytes()).unwrap();
            (0..mib).for_each(|_| stream.write_all(&block).unwrap());
        }
    });
    let gateway = GatewayProcess::start(&["--upstream", &url]);
    let mut stream = gateway.connect();
    let before = gateway.resident_bytes_with_files();
    stream
        .write_all(format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", mib << 20).as_bytes())
        .unwrap();
    (0..mib).for_each(|_| stream.write_all(&block).unwrap());
    let head = receive_until(&mut stream, "\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let mut received = vec![0; 1 << 20];
    for _ in 0..mib {
        stream.read_exact(&mut received).unwrap();
        assert!(received == block);
    }
    echo.join().unwrap();
    let most = gateway.peak_bytes();
    let grown = most - before;
    println!("bodies of {mib} MiB in both directions: {} KiB before, {} KiB at most", before >> 10, most >> 10);
    assert!(grown < 16 << 20, "the memory grew by {} MiB for bodies of {mib} MiB", grown >> 20);
}

#[test]
fn a_client_that_does_not_send_its_body_gets_408() {
    let upstream = Upstream::hello();
    let configuration =
        format!("[gateway]\nbody_timeout = '300ms'\n[[upstreams]]\nname = 'web'\nservers = ['{}']\n", upstream.url());
    let gateway = GatewayProcess::configured(&configuration, &[]);
    let mut client = gateway.client();
    client.raw(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf");
    assert_eq!(client.receive().unwrap().status, 408);
    let mut client = gateway.client();
    client.raw(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nthis is no chunk\r\n");
    assert_eq!(client.receive().unwrap().status, 400);
    assert_eq!(upstream.requests().len(), 0, "an incomplete request is never complete at the upstream");
    assert_eq!(gateway.get("/").status, 200, "the server is not blamed");
}

#[test]
fn requests_under_way_are_finished_at_shutdown() {
    let (release, released) = std::sync::mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let upstream = Upstream::start(move |_, stream| {
        let _ = released.lock().unwrap().recv();
        ok(stream, "", b"finished")
    });
    let mut gateway = GatewayProcess::start(&["--upstream", &upstream.url()]);
    let mut client = gateway.client();
    client.send("GET", "/", &[], "");
    tidegate_testkit::poll::eventually("the request arrives", || upstream.requests().len(), |count| *count == 1);
    gateway.signal("TERM");
    gateway.until("/readyz", |answer| answer.status == 503);
    release.send(()).unwrap();
    let answer = client.receive().unwrap();
    assert_eq!((answer.status, answer.body.as_str()), (200, "finished"));
    assert_eq!(answer.headers["connection"], "close");
    assert!(gateway.child.wait().unwrap().success());
}
