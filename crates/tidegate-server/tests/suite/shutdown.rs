//! Busy clients during a shutdown: each learns in time that its connection ends, and no request is lost.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::time::Duration;

use tidegate::Limiter;
use tidegate_server::listeners::http::HTTP;
use tidegate_server::{Bounds, ServerOptions, run};
use tokio::sync::oneshot;

/// Longer than the test takes, so that the listener never closes.
const DRAIN: Duration = Duration::from_secs(600);
/// One request for the fast path, and one for the general path.
const REQUESTS: [&str; 2] = [
    "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: 31\r\n\r\n{\"key\":\"a\",\"limit\":\"1000000/s\"}",
    "GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n",
];

struct Client(BufReader<TcpStream>);

impl Client {
    fn open(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Client(BufReader::new(stream))
    }

    /// Sends a request. Returns whether the response says that it is the last one. An error means that there is no
    /// response.
    fn send(&mut self, request: &str) -> std::io::Result<bool> {
        self.0.get_mut().write_all(request.as_bytes())?;
        let (mut is_last, mut length, mut line) = (false, 0, String::new());
        while line != "\r\n" {
            line.clear();
            if self.0.read_line(&mut line)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            is_last = is_last || line == "connection: close\r\n";
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim_end().parse().unwrap();
            }
        }
        self.0.read_exact(&mut vec![0; length])?;
        Ok(is_last)
    }
}

#[test]
fn while_draining_every_client_gets_a_last_response_that_says_close() {
    const CLIENTS: usize = 8;
    /// More requests than a client can send before it gets the last response.
    const REQUESTS_MAX: usize = 200_000;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (end, ended) = oneshot::channel::<()>();
    runtime.spawn(async move {
        let http = tokio::net::TcpListener::from_std(listener).unwrap();
        let options = ServerOptions::new(Limiter::memory()).bounds(Bounds { drain: DRAIN, ..Bounds::default() });
        run([(&HTTP, http)], options, async move { drop(ended.await) }).await;
    });

    let all_connected = Barrier::new(CLIENTS + 1);
    let results: Vec<std::io::Result<bool>> = std::thread::scope(|scope| {
        let send_until_last = |number: usize| {
            let mut client = Client::open(address);
            client.send(REQUESTS[number % 2])?;
            all_connected.wait();
            for _ in 0..REQUESTS_MAX {
                if client.send(REQUESTS[number % 2])? {
                    return Ok(client.0.read_to_end(&mut Vec::new())? == 0);
                }
            }
            Ok(false)
        };
        let clients: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || send_until_last(number))).collect();
        let mut idle = Client::open(address);
        assert!(!idle.send(REQUESTS[0]).unwrap());
        all_connected.wait();
        end.send(()).unwrap();
        let results = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert!(idle.send(REQUESTS[0]).unwrap(), "a later request is answered, and the response says close");
        assert!(Client::open(address).send(REQUESTS[0]).unwrap(), "a later connection is served as well");
        results
    });
    for (number, result) in results.iter().enumerate() {
        assert!(matches!(result, Ok(true)), "client {number}: {result:?}");
    }
}
