//! What busy clients see of a shutdown: whoever keeps a connection is told in time, and loses nothing.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::time::Duration;

use tokio::sync::oneshot;
use tollgate::Limiter;
use tollgate_server::{BoundListeners, Bounds, Listeners, run};

/// Longer than any of this takes: the doors never close here.
const DRAIN: Duration = Duration::from_secs(600);
/// One that the short way answers, and one for the long way.
const QUESTIONS: [&str; 2] = [
    "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: 31\r\n\r\n{\"key\":\"a\",\"limit\":\"1000000/s\"}",
    "GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n",
];

struct Client(BufReader<TcpStream>);

impl Client {
    fn open(door: SocketAddr) -> Client {
        let stream = TcpStream::connect(door).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Client(BufReader::new(stream))
    }

    /// Asks, and says whether the answer was announced as the last. An error is a question without an answer.
    fn ask(&mut self, question: &str) -> std::io::Result<bool> {
        self.0.get_mut().write_all(question.as_bytes())?;
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
fn a_busy_client_is_told_with_an_answer_that_it_was_the_last_and_nobody_is_cut_off() {
    const CLIENTS: usize = 8;
    /// Seconds of asking: by then everybody was told, or nobody ever is.
    const ASKED_MAX: usize = 200_000;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let door = listener.local_addr().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (end, told_to_end) = oneshot::channel::<()>();
    runtime.spawn(async move {
        let http = Some(tokio::net::TcpListener::from_std(listener).unwrap());
        let doors = BoundListeners::new(Limiter::memory()).bounds(Bounds { drain: DRAIN, ..Bounds::default() });
        run(Listeners { http, ..Listeners::default() }, doors, async move { drop(told_to_end.await) }).await;
    });

    let all_inside = Barrier::new(CLIENTS + 1);
    let told: Vec<std::io::Result<bool>> = std::thread::scope(|scope| {
        let asking = |number: usize| {
            let mut client = Client::open(door);
            client.ask(QUESTIONS[number % 2])?;
            all_inside.wait();
            for _ in 0..ASKED_MAX {
                if client.ask(QUESTIONS[number % 2])? {
                    return Ok(client.0.read_to_end(&mut Vec::new())? == 0);
                }
            }
            Ok(false)
        };
        let clients: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || asking(number))).collect();
        let mut idle = Client::open(door);
        assert!(!idle.ask(QUESTIONS[0]).unwrap());
        all_inside.wait();
        end.send(()).unwrap();
        let told = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert!(idle.ask(QUESTIONS[0]).unwrap(), "who asks later is served as well, and told");
        assert!(Client::open(door).ask(QUESTIONS[0]).unwrap(), "and so is who comes later");
        told
    });
    for (number, told) in told.iter().enumerate() {
        assert!(matches!(told, Ok(true)), "client {number}: {told:?}");
    }
}
