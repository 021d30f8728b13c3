//! SIGTERM under load: requests that clients have sent on open connections are answered, and the store has counted
//! exactly the admissions that clients received.
//!
//! Over HTTP the server announces the end of a connection by `connection: close`, over RESP by closing it after the
//! last reply. The clients here check for a closed connection before they send, as connection pools do, and then wait
//! for their responses. A request is lost if it was sent and the connection ended without its response.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::Server;

use crate::campaign::{random, record, scale};
use tidegate_testkit::program::{PATIENCE, Serving};

const LIMIT: &str = "10000000/day";
const QUOTA: u64 = 10_000_000;

/// The results that one client received.
#[derive(Clone, Copy, Default, Debug)]
struct ClientTotals {
    admitted: u64,
    lost: u64,
}

/// A connection of a client that sends requests until the server ends it.
struct LoadConnection {
    stream: BufReader<TcpStream>,
    answers: Arc<AtomicU64>,
    totals: ClientTotals,
}

impl LoadConnection {
    fn open(address: &str, answers: &Arc<AtomicU64>) -> LoadConnection {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        LoadConnection { stream: BufReader::new(stream), answers: answers.clone(), totals: ClientTotals::default() }
    }

    /// Returns whether the server has closed the connection.
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
    fn ask_http(mut self, request: String) -> ClientTotals {
        loop {
            let sent = self.stream.get_mut().write_all(request.as_bytes());
            match sent.ok().and_then(|()| self.http_answer()) {
                None => {
                    self.totals.lost += 1;
                    return self.totals;
                }
                Some(true) => {
                    assert_eq!(self.stream.read(&mut [0]).unwrap(), 0, "the connection ends after the last response");
                    return self.totals;
                }
                Some(false) => {}
            }
        }
    }

    /// Reads a response. Returns whether it is the last one, or `None` if the connection ended before it.
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
    fn ask_resp(mut self, command: String, pipeline: usize) -> ClientTotals {
        let commands = command.repeat(pipeline);
        while !self.has_ended() {
            let sent = self.stream.get_mut().write_all(commands.as_bytes()).is_ok();
            let answered = (0..pipeline).take_while(|_| sent && self.resp_answer().is_some()).count();
            if answered < pipeline {
                self.totals.lost += (pipeline - answered) as u64;
                break;
            }
        }
        self.totals
    }

    /// Reads the reply to an admitted check. Returns `None` if the connection ended before it.
    fn resp_answer(&mut self) -> Option<()> {
        let lines: Vec<String> = (0..6).map_while(|_| self.line()).collect();
        (lines.len() == 6).then_some(())?;
        assert_eq!(lines[..2], ["*5\r\n", ":1\r\n"], "{lines:?}");
        self.answered();
        Some(())
    }

    fn answered(&mut self) {
        self.totals.admitted += 1;
        self.answers.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns a request for the fast path, and two that are served by hyper.
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

/// Starts an instance that counts in Redis. Its long deadline prevents local decisions on a slow machine.
fn start(dir: &Path, redis: &Server, drain: &str) -> Serving {
    let file = dir.join("tidegate.toml");
    std::fs::write(&file, "deadline = \"30s\"\nrules = []\n").unwrap();
    Serving::start(&["--config", file.to_str().unwrap(), "--store", &redis.url(), "--drain", drain])
}

#[test]
fn restart_loses_no_request_on_open_connections() {
    let (dir, redis) = (tempfile::tempdir().unwrap(), Server::redis());
    let mut random = random("restarts");
    let (mut all, rounds) = (ClientTotals::default(), scale(3, 100));
    for round in 0..rounds {
        let drain = ["0s", "50ms", "200ms"][round % 3];
        let mut serving = start(dir.path(), &redis, drain);
        let (key, answers) = (format!("round-{round}"), Arc::new(AtomicU64::new(0)));
        let mut clients: Vec<JoinHandle<ClientTotals>> = Vec::new();
        for request in http_requests(&key) {
            for _ in 0..2 {
                let (connection, request) = (LoadConnection::open(&serving.http, &answers), request.clone());
                clients.push(std::thread::spawn(move || connection.ask_http(request)));
            }
        }
        let command =
            format!("*3\r\n$14\r\nTIDEGATE.CHECK\r\n${}\r\n{key}\r\n${}\r\n{LIMIT}\r\n", key.len(), LIMIT.len());
        for pipeline in [1, 1, 2, 16, 100, 600] {
            let (connection, command) = (LoadConnection::open(&serving.resp, &answers), command.clone());
            clients.push(std::thread::spawn(move || connection.ask_resp(command, pipeline)));
        }
        let answers_min = 500 + random.below(1_500);
        eventually("load", || answers.load(Ordering::Relaxed), |count| *count >= answers_min);
        serving.signal("TERM");
        let totals: Vec<ClientTotals> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert_eq!(serving.end().code(), Some(0));

        let admitted: u64 = totals.iter().map(|client| client.admitted).sum();
        let lost: u64 = totals.iter().map(|client| client.lost).sum();
        assert_eq!(lost, 0, "round {round}, drain {drain}: {totals:?}");
        let next = start(dir.path(), &redis, "0s");
        let mut connection = next.connect();
        let peek = connection.call(&["TIDEGATE.PEEK", &key, LIMIT]).unwrap();
        let counted = QUOTA - u64::try_from(peek.items()[2].integer()).unwrap();
        assert_eq!(counted, admitted, "round {round}, drain {drain}: units counted and admissions received");
        all = ClientTotals { admitted: all.admitted + admitted, lost: all.lost + lost };
    }
    record("restarts", "rounds, answers, lost", format!("{rounds}, {}, {}", all.admitted, all.lost));
}
