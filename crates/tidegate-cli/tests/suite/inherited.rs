//! Sockets that another process holds and `tidegate serve` inherits: restarts without a failed request.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use command_fds::{CommandFdExt, FdMapping};
use tidegate_testkit::poll::eventually;

use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::{PATIENCE, Serving, ended};

const CHECK: &str = r#"{"key":"user:42","limit":"1000000/h"}"#;
const RESTARTS: usize = 5;

/// Makes `command` inherit these sockets, as systemd would pass them.
pub(crate) fn inherit(mut command: Command, sockets: &[&TcpListener]) -> Command {
    let mappings = sockets.iter().zip(3..).map(|(socket, child_fd)| {
        let parent_fd = OwnedFd::from(socket.try_clone().unwrap());
        FdMapping { parent_fd, child_fd }
    });
    command.fd_mappings(mappings.collect()).unwrap();
    command.env("LISTEN_FDS", sockets.len().to_string());
    command
}

/// Starts a service whose HTTP listener is this socket.
fn start_on(socket: &TcpListener) -> Serving {
    let address = socket.local_addr().unwrap().to_string();
    Serving::start_as(inherit(Serving::command(), &[socket]), &["--http", &address])
}

/// Sends checks until `ends`: some on each connection, and always until the response says `connection: close`. Returns
/// the number of responses.
///
/// # Panics
/// Panics if a connection is refused or reset, or a request is not answered with 200.
fn send_checks(address: &str, ends: &AtomicBool, answered: &AtomicU64) {
    while !ends.load(Ordering::Relaxed) {
        let mut client = HttpClient::open(address);
        for _ in 0..20 {
            let answer = client.ask("POST", "/v1/check", &[], CHECK);
            assert_eq!(answer.status, 200, "{answer:?}");
            answered.fetch_add(1, Ordering::Relaxed);
            if answer.headers.get("connection").is_some_and(|value| value == "close") {
                break;
            }
        }
    }
}

#[test]
fn no_request_fails_while_the_service_is_restarted_on_an_inherited_socket() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let (ends, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut serving = start_on(&socket);
    assert_eq!(serving.http, address);
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (address, ends, answered) = (address.clone(), ends.clone(), answered.clone());
            std::thread::spawn(move || send_checks(&address, &ends, &answered))
        })
        .collect();
    for _ in 0..RESTARTS {
        let before = answered.load(Ordering::Relaxed);
        eventually("some checks", || answered.load(Ordering::Relaxed), |now| *now > before + 200);
        let next = start_on(&socket);
        serving.signal("TERM");
        assert_eq!(serving.end().code(), Some(0));
        serving = next;
    }
    ends.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| client.join().expect("no request failed"));
}

#[test]
fn connections_wait_in_an_inherited_socket_while_no_process_serves_it() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut serving = start_on(&socket);
    serving.signal("TERM");
    assert_eq!(serving.end().code(), Some(0));

    let mut waiting = TcpStream::connect(socket.local_addr().unwrap()).unwrap();
    waiting.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n", CHECK.len());
    waiting.write_all(format!("{head}connection: close\r\n\r\n{CHECK}").as_bytes()).unwrap();
    let _serving = start_on(&socket);
    let mut answer = String::new();
    waiting.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

#[test]
fn inherited_socket_that_no_listener_uses_is_an_error() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let off = ["serve", "--http", "127.0.0.1:0", "--resp", "off", "--admin", "off"];
    let output = ended(inherit(Serving::command(), &[&socket]).args(off));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    let expected = format!("no listener uses the inherited socket {}", socket.local_addr().unwrap());
    assert!(message.contains(&expected), "{message}");
}

#[test]
fn inherited_descriptor_that_is_not_a_socket_is_an_error() {
    let mut command = Serving::command();
    let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    command.fd_mappings(vec![FdMapping { parent_fd: file, child_fd: 3 }]).unwrap();
    let output = ended(command.env("LISTEN_FDS", "1").args(["serve", "--http", "127.0.0.1:0"]));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("cannot use a socket passed with LISTEN_FDS"), "{message}");
}
