//! SIGTERM under load: requests sent before the server announced its shutdown are answered, and the store has charged exactly the
//! admitted ones.
//!
//! Over HTTP the announcement is `connection: close`, over RESP the end of the connection after the last replies. The clients check
//! for that end before they send, as the pools of client libraries do, and then wait for their responses. A request is lost if
//! the connection ended without its response.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use tollgate_testkit::poll::eventually;
use tollgate_testkit::server::Server;

use crate::campaign::{random, record, scale};
use crate::serving::{PATIENCE, Serving};

const LIMIT: &str = "10000000/day";
const QUOTA: u64 = 10_000_000;

/// The results of one client.
#[derive(Clone, Copy, Default, Debug)]
struct Seen {
    admitted: u64,
    lost: u64,
}

struct Connection {
    stream: BufReader<TcpStream>,
    answers: Arc<AtomicU64>,
    seen: Seen,
}

impl Connection {
    fn open(address: &str, answers: &Arc<AtomicU64>) -> Connection {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Connection { stream: BufReader::new(stream), answers: answers.clone(), seen: Seen::default() }
    }

    /// Returns whether the server has ended the connection.
    fn has_ended(&self) -> bool {
        let stream = self.stream.get_ref();
        stream.set_nonblocking(true).unwrap();
        let peeked = stream.peek(&mut [0]);
        stream.set_nonblocking(false).unwrap();
        !matches!(peeked, Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).ok().filter(|read| *read > 0).map(|_| line)
    }

    /// Sends HTTP requests until a response has `connection: close`.
    fn ask_http(mut self, request: String) -> Seen {
        loop {
            let sent = self.stream.get_mut().write_all(request.as_bytes());
            match sent.ok().and_then(|()| self.http_answer()) {
                None => {
                    self.seen.lost += 1;
                    return self.seen;
                }
                Some(true) => {
                    assert_eq!(self.stream.read(&mut [0]).unwrap(), 0, "the server closes the connection");
                    return self.seen;
                }
                Some(false) => {}
            }
        }
    }

    /// Reads a response. Returns whether it has `connection: close`, or `None` if the connection ended.
    fn http_answer(&mut self) -> Option<bool> {
        let status = self.line()?;
        let (mut is_last, mut length) = (false, 0);
        loop {
            let line = self.line()?;
            is_last = is_last || line == "connection: close\r\n";
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim_end().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        self.stream.read_exact(&mut vec![0; length]).ok()?;
        assert!(status.starts_with("HTTP/1.1 200 "), "{status}");
        self.answered();
        Some(is_last)
    }

    /// Sends RESP commands, `pipeline` at a time, until the connection ends.
    fn ask_resp(mut self, command: String, pipeline: usize) -> Seen {
        let commands = command.repeat(pipeline);
        while !self.has_ended() {
            let sent = self.stream.get_mut().write_all(commands.as_bytes()).is_ok();
            let answered = (0..pipeline).take_while(|_| sent && self.resp_answer().is_some()).count();
            if answered < pipeline {
                self.seen.lost += (pipeline - answered) as u64;
                break;
            }
        }
        self.seen
    }

    fn resp_answer(&mut self) -> Option<()> {
        let lines: Vec<String> = (0..6).map_while(|_| self.line()).collect();
        (lines.len() == 6).then_some(())?;
        assert_eq!(lines[..2], ["*5\r\n", ":1\r\n"], "{lines:?}");
        self.answered();
        Some(())
    }

    fn answered(&mut self) {
        self.seen.admitted += 1;
        self.answers.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns a request for the fast path and two for the general HTTP server.
fn http_requests(key: &str) -> [String; 3] {
    let question = format!(r#"{{"key":"{key}","limit":"{LIMIT}"}}"#);
    let length = question.len();
    let head = "POST /v1/check HTTP/1.1\r\nhost: x\r\n";
    [
        format!("{head}content-length: {length}\r\n\r\n{question}"),
        format!("{head}connection: keep-alive, te\r\ncontent-length: {length}\r\n\r\n{question}"),
        format!("{head}transfer-encoding: chunked\r\n\r\n{length:x}\r\n{question}\r\n0\r\n\r\n"),
    ]
}

/// Starts an instance on Redis, with a deadline so long that a busy machine makes no decision local.
fn start(dir: &Path, redis: &Server, drain: &str) -> Serving {
    let file = dir.join("tollgate.toml");
    std::fs::write(&file, "deadline = \"30s\"\nrules = []\n").unwrap();
    Serving::start(&["--config", file.to_str().unwrap(), "--store", &redis.url(), "--drain", drain])
}

#[test]
fn restart_loses_no_request_of_existing_connections() {
    let (dir, redis) = (tempfile::tempdir().unwrap(), Server::redis());
    let mut random = random("restarts");
    let (mut all, rounds) = (Seen::default(), scale(3, 100));
    for round in 0..rounds {
        let drain = ["0s", "50ms", "200ms"][round % 3];
        let mut serving = start(dir.path(), &redis, drain);
        let (key, answers) = (format!("round-{round}"), Arc::new(AtomicU64::new(0)));
        let mut clients: Vec<JoinHandle<Seen>> = Vec::new();
        for request in http_requests(&key) {
            for _ in 0..2 {
                let (connection, request) = (Connection::open(&serving.http, &answers), request.clone());
                clients.push(std::thread::spawn(move || connection.ask_http(request)));
            }
        }
        let command =
            format!("*3\r\n$14\r\nTOLLGATE.CHECK\r\n${}\r\n{key}\r\n${}\r\n{LIMIT}\r\n", key.len(), LIMIT.len());
        for pipeline in [1, 1, 2, 16, 100, 600] {
            let (connection, command) = (Connection::open(&serving.resp, &answers), command.clone());
            clients.push(std::thread::spawn(move || connection.ask_resp(command, pipeline)));
        }
        let ignore_broken_pipe = 500 + random.below(1_500);
        eventually("load", || answers.load(Ordering::Relaxed), |count| *count >= ignore_broken_pipe);
        serving.signal("TERM");
        let seen: Vec<Seen> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert_eq!(serving.end().code(), Some(0));

        let admitted: u64 = seen.iter().map(|seen| seen.admitted).sum();
        let lost: u64 = seen.iter().map(|seen| seen.lost).sum();
        assert_eq!(lost, 0, "round {round}, drain {drain}: {seen:?}");
        let next = start(dir.path(), &redis, "0s");
        let mut connection = next.connect();
        let peek = connection.call(&["TOLLGATE.PEEK", &key, LIMIT]).unwrap();
        let counted = QUOTA - u64::try_from(peek.items()[2].integer()).unwrap();
        assert_eq!(counted, admitted, "round {round}, drain {drain}: charged units and admitted requests");
        all = Seen { admitted: all.admitted + admitted, lost: all.lost + lost };
    }
    record("restarts", "rounds, answers, lost", format!("{rounds}, {}, {}", all.admitted, all.lost));
}
