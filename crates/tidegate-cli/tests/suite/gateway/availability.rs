//! Upstreams that are down, slow, overloaded, or die under load.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use tidegate_testkit::poll::eventually;

use tidegate_testkit::http::upstream::Upstream;
use tidegate_testkit::http::upstream::ok;
use tidegate_testkit::program::GatewayProcess;

/// A gate at which requests wait until it is opened.
#[derive(Clone, Default)]
struct Barrier(Arc<(Mutex<bool>, Condvar)>);

impl Barrier {
    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        drop(self.0.1.wait_while(self.0.0.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
}

/// Opens its gate when it is dropped, so that a failed test does not leave threads behind.
impl Drop for OpenAtEnd {
    fn drop(&mut self) {
        self.0.open();
    }
}

struct OpenAtEnd(Barrier);

#[test]
fn an_upstream_that_is_down_is_502_and_one_that_is_back_is_used_at_once() {
    let mut upstream = Upstream::hello();
    let address = upstream.address;
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url()]);
    assert_eq!(gateway.get("/").status, 200);
    upstream.stop();
    for _ in 0..5 {
        let answer = gateway.client().ask("POST", "/", &[], "x");
        assert_eq!(answer.status, 502, "{answer:?}");
        assert!(answer.body.contains(r#""error":"bad_gateway""#), "{answer:?}");
    }
    let _upstream = Upstream::start_on(address, |_, stream| ok(stream, "", b"back"));
    assert_eq!(gateway.get("/").body, "back");
}

#[test]
fn an_upstream_that_does_not_answer_in_time_is_504() {
    let barrier = Barrier::default();
    let _open = OpenAtEnd(barrier.clone());
    let upstream = Upstream::start(move |request, stream| {
        if request.path() == "/slow" {
            barrier.pass();
        }
        ok(stream, "", b"hello")
    });
    let configuration = format!(
        "[[upstreams]]\nname = 'web'\nservers = ['{}']\ntimeouts = {{ header = '300ms' }}\n[[rules]]\nname = 'all'\nlimits = ['1000/h']\n",
        upstream.url()
    );
    let gateway = GatewayProcess::configured(&configuration, &[]);
    let answer = gateway.get("/slow");
    assert_eq!((answer.status, answer.headers["content-type"].as_str()), (504, "application/json"), "{answer:?}");
    assert_eq!(gateway.get("/").status, 200);
}

/// A listening socket whose queue is full: the kernel ignores further connections.
struct FullSocket {
    url: String,
    _socket: std::net::TcpListener,
    _queued: Vec<TcpStream>,
}

impl FullSocket {
    fn new() -> FullSocket {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let socket = runtime.block_on(async {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
            socket.listen(1).unwrap().into_std().unwrap()
        });
        let address = socket.local_addr().unwrap();
        let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok();
        let queued: Vec<TcpStream> = std::iter::from_fn(connect).take(100).collect();
        assert!(queued.len() < 100, "the queue of the socket is never full");
        FullSocket { url: format!("http://{address}"), _socket: socket, _queued: queued }
    }
}

#[test]
fn an_upstream_that_cannot_be_connected_in_time_is_504() {
    let full = FullSocket::new();
    let configuration = |servers: &str| {
        format!("[[upstreams]]\nname = 'web'\nservers = [{servers}]\ntimeouts = {{ connect = '150ms' }}\n")
    };
    let gateway = GatewayProcess::configured(&configuration(&format!("'{}'", full.url)), &[]);
    for method in ["GET", "POST", "GET"] {
        let answer = gateway.client().ask(method, "/", &[], "");
        assert_eq!(answer.status, 504, "{answer:?}");
        assert!(answer.body.contains(r#""error":"gateway_timeout""#), "{answer:?}");
    }
    gateway.wait_for_log("cannot connect within 150ms");
    let metrics = gateway.until("/metrics", |answer| answer.status == 200).body;
    assert!(metrics.contains("tidegate_upstream_errors_total{upstream=\"web\",reason=\"timeout\"} 3\n"), "{metrics}");

    // Nothing was sent, so another server can have the request, whatever its method.
    let other = Upstream::hello();
    let gateway = GatewayProcess::configured(&configuration(&format!("'{}', '{}'", full.url, other.url())), &[]);
    let statuses = ["GET", "POST", "POST", "GET"].map(|method| gateway.client().ask(method, "/", &[], "").status);
    assert_eq!((statuses, other.requests().len()), ([200; 4], 4));
}

#[test]
fn a_response_that_is_not_complete_in_total_is_504_or_ends_the_connection() {
    let barrier = Barrier::default();
    let _open = OpenAtEnd(barrier.clone());
    let upstream = Upstream::start(move |request, stream| match request.path() {
        "/" => ok(stream, "", b"hello"),
        "/silent" => {
            barrier.pass();
            false
        }
        // Sends some bytes every 10 ms for as long as it can, so no other timeout expires.
        _ => {
            let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
            let mut sent = stream.write_all(head);
            while sent.is_ok() {
                // A pace, not a wait: the body continues until the gateway ends the connection.
                std::thread::sleep(Duration::from_millis(10));
                sent = stream.write_all(b"5\r\nhello\r\n");
            }
            false
        }
    });
    let configuration = format!(
        "[[upstreams]]\nname = 'web'\nservers = ['{}']\ntimeouts = {{ total = '300ms', header = '1h', idle = '1h' }}\n",
        upstream.url()
    );
    let gateway = GatewayProcess::configured(&configuration, &[]);
    let answer = gateway.get("/silent");
    assert_eq!(answer.status, 504, "{answer:?}");
    assert!(answer.body.contains(r#""error":"gateway_timeout""#), "{answer:?}");
    let metrics = gateway.until("/metrics", |answer| answer.status == 200).body;
    assert!(metrics.contains("tidegate_upstream_errors_total{upstream=\"web\",reason=\"timeout\"} 1\n"), "{metrics}");

    let mut stream = gateway.connect();
    stream.write_all(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut received = Vec::new();
    let _ = stream.read_to_end(&mut received);
    let received = String::from_utf8_lossy(&received);
    assert!(received.starts_with("HTTP/1.1 200 ") && received.contains("hello"), "{received}");
    assert!(!received.ends_with("0\r\n\r\n"), "the body must not look complete: {received}");
    assert_eq!(gateway.get("/").body, "hello");
}

#[test]
fn a_response_that_stops_in_the_middle_ends_the_connection() {
    let barrier = Barrier::default();
    let _open = OpenAtEnd(barrier.clone());
    let upstream = Upstream::start(move |_, stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly a part").unwrap();
        barrier.pass();
        false
    });
    let configuration =
        format!("[[upstreams]]\nname = 'web'\nservers = ['{}']\ntimeouts = {{ idle = '300ms' }}\n", upstream.url());
    let gateway = GatewayProcess::configured(&configuration, &[]);
    let mut stream = gateway.connect();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut received = Vec::new();
    let _ = stream.read_to_end(&mut received);
    let received = String::from_utf8_lossy(&received);
    assert!(received.contains("content-length: 100\r\n") && received.ends_with("only a part"), "{received}");
}

#[test]
fn servers_get_requests_in_turn() {
    let servers: Vec<Upstream> = (0..3).map(|_| Upstream::hello()).collect();
    let urls: Vec<String> = servers.iter().map(Upstream::url).collect();
    let arguments: Vec<&str> = urls.iter().flat_map(|url| ["--upstream", url.as_str()]).collect();
    let gateway = GatewayProcess::start(&arguments);
    let mut client = gateway.client();
    (0..9).for_each(|_| assert_eq!(client.ask("GET", "/", &[], "").status, 200));
    assert_eq!(servers.iter().map(|server| server.requests().len()).collect::<Vec<_>>(), [3, 3, 3]);
}

/// A server dies while it has requests that it has not answered. Only those can fail, because the gateway sends all
/// others to the other servers.
#[test]
fn when_one_of_three_servers_dies_only_its_unanswered_requests_fail() {
    const CLIENTS: usize = 6;
    let (is_dying, held) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let dying = Upstream::start({
        let (is_dying, held) = (is_dying.clone(), held.clone());
        move |_, stream| {
            // Holds all requests until its connections are closed. Sending a response then fails.
            if is_dying.load(Ordering::SeqCst) {
                held.fetch_add(1, Ordering::SeqCst);
                let _ = stream.peek(&mut [0]);
            }
            ok(stream, "", b"hello")
        }
    });
    let mut servers = [Upstream::hello(), dying, Upstream::hello()];
    let urls = servers.each_ref().map(Upstream::url);
    let arguments: Vec<&str> = urls.iter().flat_map(|url| ["--upstream", url.as_str()]).collect();
    let gateway = GatewayProcess::start(&arguments);
    let (is_done, sent, failed) = (AtomicBool::new(false), AtomicUsize::new(0), Mutex::new(HashSet::new()));
    let ejections = || {
        let page = gateway.until("/metrics", |answer| answer.status == 200).body;
        let name = "tidegate_upstream_ejections_total{upstream=\"upstream\"} ";
        page.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse::<u32>().unwrap()
    };
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (gateway, is_done, sent, failed) = (&gateway, &is_done, &sent, &failed);
            scope.spawn(move || {
                let mut client = gateway.client();
                for round in 0.. {
                    if is_done.load(Ordering::SeqCst) {
                        break;
                    }
                    let (method, body) = if number % 2 == 0 { ("GET", "") } else { ("POST", "body") };
                    let path = format!("/{method}/{number}/{round}");
                    if client.ask(method, &path, &[], body).status != 200 {
                        failed.lock().unwrap().insert(path);
                    }
                    sent.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        eventually("requests are sent", || sent.load(Ordering::SeqCst), |sent| *sent > 10 * CLIENTS);
        is_dying.store(true, Ordering::SeqCst);
        eventually("all clients wait for it", || held.load(Ordering::SeqCst), |held| *held == CLIENTS);
        let before = ejections();
        servers[1].stop();
        // It is avoided, and after a second a request finds that it still cannot be reached.
        eventually("it is tried again", ejections, |now| *now > before + 1);
        is_done.store(true, Ordering::SeqCst);
    });
    let (sent, failed) = (sent.into_inner(), failed.into_inner().unwrap());
    // The server may still be reading requests that it will not answer.
    let unanswered = || servers[1].unanswered();
    let unanswered = eventually("each failed request was there", unanswered, |unanswered| failed.is_subset(unanswered));
    assert!(failed.len() <= unanswered.len());
    let posts = failed.iter().filter(|path| path.starts_with("/POST/")).count();
    assert_eq!(posts, CLIENTS / 2, "a request that may have had an effect is not sent again: {failed:?}");
    let others = servers[0].requests().len() + servers[2].requests().len();
    let answered = servers[1].requests().len() - unanswered.len();
    assert_eq!(others + answered, sent - failed.len(), "all others are answered, each by one server");

    gateway.wait_for_log("the server keeps failing and is avoided");
    let metrics = gateway.until("/metrics", |answer| answer.status == 200);
    assert!(metrics.body.contains("tidegate_upstream_in_flight{upstream=\"upstream\"} 0\n"), "{}", metrics.body);
}

#[test]
fn an_overloaded_upstream_gets_what_it_can_do_and_others_get_503() {
    let barrier = Barrier::default();
    let _open = OpenAtEnd(barrier.clone());
    let upstream = Upstream::start({
        let barrier = barrier.clone();
        move |_, stream| {
            barrier.pass();
            ok(stream, "", b"done")
        }
    });
    let configuration = format!(
        "[[upstreams]]\nname = 'web'\nservers = ['{}']\nmax_concurrent = 2\nmax_concurrent_per_address = 10\nqueue = 1\ntimeouts = {{ queue = '20s' }}\n",
        upstream.url()
    );
    let gateway = GatewayProcess::configured(&configuration, &[]);
    let mut working: Vec<_> = (0..2).map(|_| gateway.client()).collect();
    working.iter_mut().for_each(|client| client.send("GET", "/", &[], ""));
    eventually("both are at the upstream", || upstream.requests().len(), |count| *count == 2);
    let mut waiting = gateway.client();
    waiting.send("GET", "/waiting", &[], "");
    // The queue has room for one. It is taken once another request is refused.
    let refused = eventually("the queue is full", || gateway.get("/refused").status, |status| *status == 503);
    assert_eq!(refused, 503);
    let refused = gateway.get("/refused");
    assert_eq!((refused.status, refused.headers["retry-after"].as_str()), (503, "1"));
    assert_eq!(upstream.requests().len(), 2, "neither reaches the upstream");
    barrier.open();
    for client in working.iter_mut().chain([&mut waiting]) {
        assert_eq!(client.receive().unwrap().status, 200);
    }
}

#[test]
fn a_request_is_sent_again_if_the_server_closed_an_idle_connection() {
    // Closes every connection after its first response, without saying so.
    let upstream = Upstream::start(|_, stream| {
        ok(stream, "", b"hello");
        false
    });
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url()]);
    let mut client = gateway.client();
    for _ in 0..20 {
        assert_eq!(client.ask("GET", "/", &[], "").status, 200);
    }
    assert_eq!(upstream.requests().len(), 20);
}

#[test]
fn responses_that_contradict_themselves_are_502() {
    const RESPONSES: [&str; 10] = [
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ncontent-length: 5, 6\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\nhello",
        "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nx-folded: a\r\n b\r\ncontent-length: 5\r\n\r\nhello",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: anything\r\nconnection: upgrade\r\n\r\n",
        "this is not HTTP\r\n\r\n",
    ];
    let upstream = Upstream::start(|request, stream| {
        let index: usize = request.path()[1..].parse().unwrap();
        let _ = stream.write_all(RESPONSES[index].as_bytes());
        false
    });
    let gateway = GatewayProcess::start(&["--upstream", &upstream.url()]);
    for (index, response) in RESPONSES.iter().enumerate() {
        let answer = gateway.client().ask("POST", &format!("/{index}"), &[], "x");
        assert_eq!(answer.status, 502, "{response:?}: {answer:?}");
    }
    assert_eq!(upstream.requests().len(), RESPONSES.len(), "none is sent again");
}
