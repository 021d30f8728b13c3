//! A Sentinel whose answers the test chooses, including outdated and malformed ones.
//!
//! Real Sentinels agree with each other sooner or later, and announce every failover. How a store behaves before that
//! can be tested only with a Sentinel that the test controls.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What a fake Sentinel answers.
#[derive(Clone, Debug)]
pub enum SentinelAnswer {
    /// The address of the master.
    Master {
        /// The port of the master on 127.0.0.1.
        port: u16,
        /// The configuration epoch.
        epoch: u64,
        /// Whether subscribers get a `+switch-master` message when this answer replaces another one.
        announces: bool,
    },
    /// These bytes, whatever the command.
    Bytes(&'static [u8]),
}

/// A Sentinel on a free port of 127.0.0.1, which watches a master named `main`.
#[derive(Debug)]
pub struct FakeSentinel {
    addr: SocketAddr,
    answer: Arc<watch::Sender<SentinelAnswer>>,
}

impl FakeSentinel {
    /// Starts a Sentinel in the current tokio runtime.
    ///
    /// # Panics
    /// If no socket can be created.
    pub async fn start(answer: SentinelAnswer) -> FakeSentinel {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port on 127.0.0.1");
        let (addr, answer) = (listener.local_addr().expect("a bound socket"), Arc::new(watch::Sender::new(answer)));
        let shared = answer.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, shared.subscribe()));
            }
        });
        FakeSentinel { addr, answer }
    }

    /// Returns the address on which it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Changes its answers.
    pub fn set_answer(&self, answer: SentinelAnswer) {
        self.answer.send_replace(answer);
    }
}

async fn serve(mut stream: TcpStream, mut answer: watch::Receiver<SentinelAnswer>) {
    // Otherwise each reply would wait until the one before it is acknowledged.
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let (mut inbox, mut is_subscribed) = (Vec::new(), false);
    loop {
        while let Some(command) = next_command(&mut inbox) {
            let current = answer.borrow_and_update().clone();
            is_subscribed = match command[0].as_str() {
                "SUBSCRIBE" => true,
                "UNSUBSCRIBE" => false,
                _ => is_subscribed,
            };
            let reply = reply(&command, &current);
            if stream.write_all(&reply).await.is_err() {
                return;
            }
        }
        tokio::select! {
            read = stream.read_buf(&mut inbox) => if read.unwrap_or(0) == 0 { return },
            changed = answer.changed() => {
                if changed.is_err() {
                    return;
                }
                let message = match &*answer.borrow() {
                    SentinelAnswer::Master { announces: true, port, .. } => list(&["message", "+switch-master", &format!("main 127.0.0.1 1 127.0.0.1 {port}")]),
                    _ => continue,
                };
                if is_subscribed && stream.write_all(&message).await.is_err() {
                    return;
                }
            }
        }
    }
}

fn reply(command: &[String], answer: &SentinelAnswer) -> Vec<u8> {
    let (port, epoch) = match answer {
        SentinelAnswer::Bytes(bytes) => return bytes.to_vec(),
        SentinelAnswer::Master { port, epoch, .. } => (port.to_string(), epoch.to_string()),
    };
    match (command[0].as_str(), command.get(1).map(String::as_str)) {
        ("SENTINEL", Some("GET-MASTER-ADDR-BY-NAME")) => list(&["127.0.0.1", &port]),
        ("SENTINEL", Some("MASTER")) => list(&["name", "main", "config-epoch", &epoch]),
        ("SENTINEL", Some("SENTINELS")) => list(&[]),
        ("SUBSCRIBE", _) => list(&["subscribe", "+switch-master", "1"]),
        ("UNSUBSCRIBE", _) => list(&["unsubscribe", "+switch-master", "0"]),
        _ => b"+OK\r\n".to_vec(),
    }
}

fn list(items: &[&str]) -> Vec<u8> {
    let items: String = items.iter().map(|item| format!("${}\r\n{item}\r\n", item.len())).collect();
    format!("*{}\r\n{items}", items.matches("\r\n").count() / 2).into_bytes()
}

/// Takes a command from the front of the buffer. Returns `None` while it is incomplete.
fn next_command(inbox: &mut Vec<u8>) -> Option<Vec<String>> {
    let text = String::from_utf8(inbox.clone()).ok()?;
    let mut lines = text.split_inclusive("\r\n");
    let count: usize = lines.next()?.trim_end().strip_prefix('*')?.parse().ok()?;
    let lines: Vec<&str> = lines.take(2 * count).collect();
    if lines.len() < 2 * count || lines.last().is_some_and(|line| !line.ends_with("\r\n")) {
        return None;
    }
    let length = text.find("\r\n")? + 2 + lines.iter().map(|line| line.len()).sum::<usize>();
    inbox.drain(..length);
    Some(lines.chunks(2).map(|pair| pair[1].trim_end().to_owned()).collect())
}
