//! Transcripts of connections: bytes in, bytes out, on a clock that stands still.

mod checks;
mod requests;
mod waits;

use serde_json::Value;
use tidegate::{Demand, Limiter, LimiterBuilder, ManualClock, MemoryStore, Store, Timestamp};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;

use super::command::COMMANDS;
use super::*;
use crate::listeners::http::test_support::{UnreachableStore, clock, engine_with_config};
use crate::shutdown::ShutdownStage;

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

impl Default for RespOptions {
    fn default() -> Self {
        RespOptions { password: None, idle: crate::run::Bounds::default().resp_idle }
    }
}

struct Transcript {
    client: tokio::io::DuplexStream,
    clock: Arc<ManualClock>,
    stage: watch::Sender<ShutdownStage>,
    listener: Arc<RespListener>,
}

fn open(options: RespOptions) -> Transcript {
    open_with(options, |builder| builder)
}

fn open_with(options: RespOptions, configure: impl FnOnce(LimiterBuilder) -> LimiterBuilder) -> Transcript {
    let clock = Arc::new(ManualClock::new(START));
    let memory = MemoryStore::builder().clock(clock.clone()).build();
    let limiter = configure(Limiter::builder().memory(memory).clock(clock.clone())).build();
    let listener = Arc::new(RespListener::new(Decider::new(limiter, Arc::default()), options));
    let (client, stage) = connect(&listener, "203.0.113.9");
    Transcript { client, clock, stage, listener }
}

/// Opens a connection to a listener with the rules of a configuration. Counters are in memory if there is no store.
fn open_with_config(text: &str, store: Option<Arc<dyn Store>>) -> Transcript {
    let decider = Decider::new(engine_with_config(text, store), Arc::default());
    let listener = Arc::new(RespListener::new(decider, RespOptions::default()));
    let (client, stage) = connect(&listener, "203.0.113.9");
    Transcript { client, clock: clock(), stage, listener }
}

/// Returns a command as an array of bulk strings.
fn array(words: &[impl AsRef<[u8]>]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words.iter().map(AsRef::as_ref) {
        bytes.extend(format!("${}\r\n", word.len()).bytes());
        bytes.extend(word);
        bytes.extend(b"\r\n");
    }
    bytes
}

/// Reads one reply in RESP2. An error or a simple string becomes a string with its first byte.
async fn receive(client: &mut tokio::io::DuplexStream) -> Value {
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        line.push(client.read_u8().await.expect("a reply"));
    }
    let text = std::str::from_utf8(&line[..line.len() - 2]).unwrap();
    let number = || text[1..].parse::<i64>().unwrap();
    match line[0] {
        b':' => number().into(),
        b'$' if number() < 0 => Value::Null,
        b'$' => {
            let mut bytes = vec![0; number() as usize + 2];
            client.read_exact(&mut bytes).await.unwrap();
            String::from_utf8(bytes[..bytes.len() - 2].to_vec()).unwrap().into()
        }
        b'*' => {
            let mut items = Vec::new();
            for _ in 0..number() {
                items.push(Box::pin(receive(client)).await);
            }
            items.into()
        }
        _ => text.into(),
    }
}

/// Connects from `address`. Returns the client's end, and the sender of the shutdown signal, which closes the listener
/// when it is dropped.
fn connect(listener: &Arc<RespListener>, address: &str) -> (tokio::io::DuplexStream, watch::Sender<ShutdownStage>) {
    let (client, server) = tokio::io::duplex(1 << 20);
    let (stage, context) = ConnectionContext::unshared();
    tokio::spawn(listener.clone().serve_stream(server, address.parse().unwrap(), context));
    (client, stage)
}

impl Transcript {
    /// Sends bytes, and asserts that the next replies are `expected`.
    async fn exchange(&mut self, bytes: &[u8], expected: &str) {
        self.client.write_all(bytes).await.unwrap();
        let mut got = vec![0; expected.len()];
        let mut read = 0;
        while read < got.len() {
            match self.client.read(&mut got[read..]).await.unwrap() {
                0 => break,
                count => read += count,
            }
        }
        let shown = |text: &str| text.replace("\r\n", " ");
        assert_eq!(
            shown(&String::from_utf8_lossy(&got[..read])),
            shown(expected),
            "after {:?}",
            String::from_utf8_lossy(bytes)
        );
    }

    /// Sends a command as an array, and returns the reply.
    async fn call(&mut self, words: &[impl AsRef<[u8]>]) -> Value {
        self.client.write_all(&array(words)).await.unwrap();
        receive(&mut self.client).await
    }

    /// Returns the units that a key has left of a limit in memory.
    async fn remaining(&self, key: &str, limit: &str) -> u32 {
        let demand = Demand::new(limit.parse().unwrap(), tidegate::Key::new(key).unwrap());
        self.listener.decider.limiter().inspect(&demand).await.unwrap().remaining
    }

    async fn ends(mut self) -> bool {
        self.client.read(&mut [0]).await.unwrap() == 0
    }
}

fn numbers(numbers: [i64; 5]) -> String {
    let lines: String = numbers.iter().map(|number| format!(":{number}\r\n")).collect();
    format!("*5\r\n{lines}")
}

#[tokio::test]
async fn error_replies_are_counted_by_their_code() {
    let mut connection = open(with_password());
    connection.exchange(b"PING\r\n", "-NOAUTH Authentication required\r\n").await;
    connection.exchange(b"*2\r\n$4\r\nAUTH\r\n$11\r\nopen sesame\r\n", "+OK\r\n").await;
    connection.exchange(b"TIDEGATE.CHECK k 1/min\r\n", &numbers([1, 1, 0, 0, 60_000])).await;
    // A denial is a reply and no error.
    connection.exchange(b"TIDEGATE.CHECK k 1/min\r\n", &numbers([0, 1, 0, 60_000, 60_000])).await;
    connection.exchange(b"TIDEGATE.CHECK k 1/fortnight\r\nHELLO 4\r\n*1\r\n$1\r\nX\r\n", "-ERR ").await;
    while connection.listener.stats.errors.read().map(|(_, count)| count).sum::<u64>() < 4 {
        tokio::task::yield_now().await;
    }
    let counted: Vec<(&str, u64)> = connection.listener.stats.errors.read().collect();
    assert_eq!(counted, [("ERR", 2), ("NOAUTH", 1), ("NOPROTO", 1)]);
}

#[tokio::test]
async fn check_peek_and_reset() {
    let mut connection = open(RespOptions::default());
    connection.exchange(b"TIDEGATE.CHECK user:42 2/min\r\n", &numbers([1, 2, 1, 0, 60_000])).await;
    connection.exchange(b"tidegate.check user:42 2/min cost 1\r\n", &numbers([1, 2, 0, 0, 60_000])).await;
    connection.clock.advance(Duration::from_micros(1_500));
    connection.exchange(b"TIDEGATE.CHECK user:42 2/min\r\n", &numbers([0, 2, 0, 59_999, 59_999])).await;
    connection.exchange(b"TIDEGATE.PEEK user:42 2/min\r\n", &numbers([1, 2, 0, 59_999, 59_999])).await;
    connection.exchange(b"TIDEGATE.CHECK user:42 2/min COST 3\r\n", &numbers([0, 2, 0, -1, 59_999])).await;
    connection.exchange(b"TIDEGATE.RESET user:42 2/min\r\n", "+OK\r\n").await;
    connection.exchange(b"TIDEGATE.PEEK user:42 2/min\r\n", &numbers([1, 2, 2, 0, 0])).await;
}

#[tokio::test]
async fn extreme_and_malformed_arguments_are_answered_with_what_is_expected() {
    let mut connection = open(RespOptions::default());
    for (command, phrase) in [
        ("CL.THROTTLE k 9223372036854775807 1 1", "max_burst must be a whole number"),
        ("CL.THROTTLE k 4294967295 1 1", "max_burst must be from 0 to 9999999"),
        ("CL.THROTTLE k 10000000 1 1", "max_burst must be from 0 to 9999999"),
        ("CL.THROTTLE k 1 0 1", "count must be from 1 to 10000000"),
        ("CL.THROTTLE k 1 1 0", "period must be from 1 to 34560000 seconds"),
        ("CL.THROTTLE k 1 1 34560001", "period must be from 1 to 34560000 seconds"),
        ("CL.THROTTLE k -1 1 1", "max_burst must be a whole number"),
        ("CL.THROTTLE k 1 1 1 99999999999", "quantity must be a whole number"),
        ("CL.THROTTLE k 1 1", "expected CL.THROTTLE key max_burst count period"),
        ("CL.THROTTLE k 1 1 1 1 1", "expected CL.THROTTLE key max_burst count period"),
        ("TIDEGATE.CHECK k", "expected TIDEGATE.CHECK key limit"),
        ("TIDEGATE.CHECK k 10/fortnight", "us, ms, s, min, h, day, week"),
        ("TIDEGATE.CHECK k 10/min COST", "expected TIDEGATE.CHECK key limit"),
        ("TIDEGATE.CHECK k 10/min PRICE 1", "(pair 2)"),
        ("TIDEGATE.CHECK k 10/min COST -1", "cost must be a whole number"),
        ("SELECT 1", "only database 0"),
        ("CLIENT REPLY OFF", "only CLIENT REPLY ON"),
        ("CLIENT REPLY skip", "only CLIENT REPLY ON"),
        ("CLIENT REPLY", "only CLIENT REPLY ON"),
    ] {
        connection.client.write_all(format!("{command}\r\n").as_bytes()).await.unwrap();
        let mut reply = vec![0; 1024];
        let read = connection.client.read(&mut reply).await.unwrap();
        let reply = String::from_utf8_lossy(&reply[..read]);
        assert!(reply.starts_with("-ERR ") && reply.contains(phrase), "{command}: {reply}");
    }
    connection.exchange(b"PING\r\n", "+PONG\r\n").await;
}

#[test]
fn the_error_and_the_documentation_name_every_command() {
    let commands = [
        ("TIDEGATE.CHECK", "TIDEGATE.CHECK k 10/min COST 2 RECEIPT"),
        ("TIDEGATE.REFUND", "TIDEGATE.REFUND AQx USED 3"),
        ("TIDEGATE.WAIT", "TIDEGATE.WAIT k 10/min TIMEOUT 100"),
        ("TIDEGATE.REQUEST", "TIDEGATE.REQUEST GET / 203.0.113.9"),
        ("TIDEGATE.PEEK", "TIDEGATE.PEEK k 10/min"),
        ("TIDEGATE.RESET", "TIDEGATE.RESET k 10/min"),
        ("CL.THROTTLE", "CL.THROTTLE k 1 1 1"),
        ("PING", "PING"),
        ("ECHO", "ECHO a"),
        ("HELLO", "HELLO 3"),
        ("AUTH", "AUTH a"),
        ("SELECT", "SELECT 0"),
        ("CLIENT", "CLIENT ID"),
        ("COMMAND", "COMMAND"),
        ("INFO", "INFO"),
        ("QUIT", "QUIT"),
    ];
    let documented = include_str!("../../../../../docs/resp.md").replace("\\|", "|");
    for (name, example) in commands {
        let line = format!("{example}\r\n");
        let mut args = Args::default();
        parse(line.as_bytes(), &mut args).unwrap();
        let command = parse_command(line.as_bytes(), &args, &mut LimitCache::default(), &mut Vec::new()).unwrap();
        assert!(!matches!(command, RespCommand::Unknown), "{name}");
        assert!(documented.contains(&format!("`{name}")), "{name} is not in docs/resp.md");
    }
    assert_eq!(COMMANDS, commands.map(|(name, _)| name));
    assert!(UNKNOWN.ends_with(&format!("expected one of {}", COMMANDS.join(", "))));
    for usage in [
        "TIDEGATE.CHECK key limit [key limit ...] [COST n] [RECEIPT]",
        "TIDEGATE.REFUND receipt [USED n | STATUS n]",
        "TIDEGATE.WAIT key limit [key limit ...] TIMEOUT ms [COST n] [RECEIPT]",
        "TIDEGATE.REQUEST method path peer [name value ...]",
    ] {
        assert!(documented.contains(&format!("`{usage}`")), "{usage} is not in docs/resp.md");
    }
}

#[tokio::test]
async fn a_pipeline_of_checks_and_other_commands_is_answered_in_order() {
    let mut connection = open(RespOptions::default());
    let pipeline = b"TIDEGATE.CHECK a 1/min\r\nPING\r\nTIDEGATE.CHECK a 1/min\r\nTIDEGATE.RESET a 1/min\r\nTIDEGATE.CHECK a 1/min\r\n*1\r\n$8\r\nNONSENSE\r\nECHO hi\r\n";
    let error = format!("-{}\r\n", *UNKNOWN);
    let expected = [
        numbers([1, 1, 0, 0, 60_000]),
        "+PONG\r\n".to_owned(),
        numbers([0, 1, 0, 60_000, 60_000]),
        "+OK\r\n".to_owned(),
        numbers([1, 1, 0, 0, 60_000]),
        error,
        "$2\r\nhi\r\n".to_owned(),
    ]
    .concat();
    connection.exchange(pipeline, &expected).await;
}

#[tokio::test]
async fn a_command_that_arrives_in_single_bytes_is_answered() {
    let mut connection = open(RespOptions::default());
    let frame = b"*3\r\n$14\r\nTIDEGATE.CHECK\r\n$4\r\n\x00\r\n\xff\r\n$6\r\n10/min\r\n";
    for byte in frame {
        connection.client.write_all(&[*byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    connection.exchange(b"", &numbers([1, 10, 9, 0, 60_000])).await;
}

/// The pipeline has bytes that look like frames inside an argument, an inline command, and a command without arguments.
#[tokio::test]
async fn a_pipeline_gets_the_same_replies_wherever_it_is_split() {
    let pipeline = b"*3\r\n$14\r\nTIDEGATE.CHECK\r\n$6\r\n*1\r\n$4\r\n$6\r\n10/min\r\nPING\r\n*0\r\n\r\n*5\r\n$14\r\nTIDEGATE.CHECK\r\n$1\r\nk\r\n$5\r\n2/min\r\n$4\r\nCOST\r\n$1\r\n2\r\nCL.THROTTLE t 0 1 60\n*2\r\n$4\r\nECHO\r\n$0\r\n\r\n";
    let expected = [
        numbers([1, 10, 9, 0, 60_000]),
        "+PONG\r\n".to_owned(),
        numbers([1, 2, 0, 0, 60_000]),
        numbers([0, 1, 0, -1, 60]),
        "$0\r\n\r\n".to_owned(),
    ]
    .concat();
    for first in 0..pipeline.len() {
        let second = first + (pipeline.len() - first) / 2;
        let mut connection = open(RespOptions::default());
        for piece in [&pipeline[..first], &pipeline[first..second]] {
            connection.client.write_all(piece).await.unwrap();
            // The listener's task runs before this one continues, so that the piece is read by itself.
            tokio::task::yield_now().await;
        }
        connection.exchange(&pipeline[second..], &expected).await;
    }
}

/// A single check is decided without the lists of a batch.
#[tokio::test(start_paused = true)]
async fn checks_get_the_same_replies_one_by_one_and_pipelined() {
    let keys = ["a", "b", "banned"];
    let commands: Vec<String> = (0..60)
        .map(|n| match (keys[n % 3], n % 5) {
            (key, 0) => format!("TIDEGATE.PEEK {key} 3/min\r\n"),
            (key, 1) => format!("CL.THROTTLE {key} 2 3 60 {}\r\n", n % 4),
            (key, 2) => format!("TIDEGATE.CHECK {key} 9/h COST {}\r\n", n % 4),
            (key, 3) => format!("TIDEGATE.CHECK {key} 3/min c 8/h {key} 9/day COST {}\r\n", n % 3),
            (key, _) => format!("TIDEGATE.CHECK {key} 3/min\r\n"),
        })
        .collect();
    for is_reachable in [true, false] {
        let mut received = Vec::new();
        for pieces in [commands.clone(), vec![commands.concat()]] {
            let mut connection = open_with(RespOptions::default(), |builder| {
                if is_reachable { builder } else { builder.store(Arc::new(UnreachableStore)) }
            });
            // Not possible without a store.
            let _ = connection.listener.decider.limiter().ban(b"banned", Some(Duration::from_secs(60))).await;
            let mut replies = Vec::new();
            for piece in &pieces {
                connection.client.write_all(piece.as_bytes()).await.unwrap();
                for _ in 0..piece.matches("\r\n").count() {
                    let reply = tokio::time::timeout(Duration::from_secs(9), receive(&mut connection.client)).await;
                    replies.push(reply.unwrap_or_else(|_| panic!("no further reply after {replies:?}")));
                }
            }
            received.push(replies);
        }
        assert_eq!(received[0], received[1]);
        let admitted = received[0].iter().filter(|reply| reply[0] == 1).count();
        assert!((5..55).contains(&admitted), "{admitted} of 60 begin with 1");
    }
}

#[tokio::test]
async fn a_hundred_thousand_pipelined_checks_admit_exactly_the_quota() {
    let connection = open(RespOptions::default());
    let commands = b"*3\r\n$14\r\nTIDEGATE.CHECK\r\n$1\r\nk\r\n$8\r\n30000/h\x20\r\n".repeat(100_000);
    let (mut reader, mut writer) = tokio::io::split(connection.client);
    let sender = tokio::spawn(async move { writer.write_all(&commands).await.map(|()| writer) });
    let mut admitted = 0;
    let mut replies = 0;
    let mut lines = Vec::new();
    let mut chunk = vec![0; 1 << 16];
    while replies < 100_000 {
        let read = reader.read(&mut chunk).await.unwrap();
        assert!(read > 0, "the connection ended after {replies} replies");
        lines.extend_from_slice(&chunk[..read]);
        while let Some(end) = memchr::memmem::find(&lines[1..], b"*5")
            .map(|at| at + 1)
            .or((lines.ends_with(b"\n") && lines.iter().filter(|byte| **byte == b'\n').count() == 6)
                .then_some(lines.len()))
        {
            admitted += usize::from(lines[..end].starts_with(b"*5\r\n:1\r\n"));
            replies += 1;
            lines.drain(..end);
            if lines.is_empty() {
                break;
            }
        }
    }
    assert_eq!((replies, admitted), (100_000, 30_000));
    sender.await.unwrap().unwrap();
    connection.clock.advance(Duration::from_secs(1));
}

#[tokio::test]
async fn hostile_frames_end_the_connection_with_an_error() {
    for frame in [&b"*99999999\r\n"[..], b"*1\r\n$99999999999\r\n", b"*-5\r\n", b"*1\r\n*1\r\n", b"*1\r\n$1\r\nab\r\n"]
    {
        let mut connection = open(RespOptions::default());
        connection.exchange(frame, "-ERR Protocol error").await;
        let mut rest = Vec::new();
        connection.client.read_to_end(&mut rest).await.unwrap();
        assert!(connection.ends().await, "{:?}", String::from_utf8_lossy(frame));
    }
}

#[tokio::test]
async fn connection_setup_works_in_both_versions_of_the_protocol() {
    let mut connection = open(RespOptions::default());
    let id = |protocol: &str| {
        format!(
            "$7\r\nversion\r\n$5\r\n{}\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$5\r\nproto\r\n:{protocol}\r\n$2\r\nid\r\n:",
            env!("CARGO_PKG_VERSION")
        )
    };
    connection.client.write_all(b"HELLO 3\r\n").await.unwrap();
    let mut reply = vec![0; 1024];
    let read = connection.client.read(&mut reply).await.unwrap();
    let reply = String::from_utf8_lossy(&reply[..read]).into_owned();
    assert!(reply.starts_with(&format!("%7\r\n$6\r\nserver\r\n$8\r\ntidegate\r\n{}", id("3"))), "{reply}");
    connection.exchange(b"CLIENT GETNAME\r\n", "_\r\n").await;
    connection.exchange(b"HELLO 4\r\n", "-NOPROTO unsupported protocol version, expected 2 or 3\r\n").await;
    connection.exchange(b"CLIENT SETINFO LIB-NAME x\r\n", "+OK\r\n").await;
    connection.exchange(b"CLIENT SETNAME x\r\n", "+OK\r\n").await;
    connection.exchange(b"CLIENT REPLY ON\r\n", "+OK\r\n").await;
    connection.exchange(b"COMMAND DOCS\r\n", "%0\r\n").await;
    connection.exchange(b"COMMAND COUNT\r\n", ":16\r\n").await;
    connection.exchange(b"SELECT 0\r\n", "+OK\r\n").await;
    connection.exchange(b"QUIT\r\n", "+OK\r\n").await;
    assert!(connection.ends().await);
}

#[tokio::test]
async fn without_the_password_only_authentication_is_answered() {
    let options = with_password();
    assert!(!format!("{options:?}").contains("sesame"));
    let mut connection = open(options);
    connection.exchange(b"TIDEGATE.CHECK k 1/min\r\n", "-NOAUTH Authentication required\r\n").await;
    connection.exchange(b"PING\r\n", "-NOAUTH Authentication required\r\n").await;
    connection.exchange(b"HELLO 3\r\n", "-NOAUTH HELLO must be called with AUTH here\r\n").await;
    connection.exchange(b"AUTH wrong\r\n", "-WRONGPASS invalid password\r\n").await;
    connection.exchange(b"*2\r\n$4\r\nAUTH\r\n$11\r\nopen sesame\r\n", "+OK\r\n").await;
    connection.exchange(b"TIDEGATE.CHECK k 1/min\r\n", &numbers([1, 1, 0, 0, 60_000])).await;
}

#[tokio::test(start_paused = true)]
async fn a_silent_client_is_disconnected() {
    let connection = open(RespOptions { idle: Duration::from_secs(5), ..RespOptions::default() });
    let start = Instant::now();
    assert!(connection.ends().await);
    assert_eq!(start.elapsed().as_secs(), 5);
}

/// Sends a byte every 700 ms. Returns the time until the connection ended.
async fn trickle(mut connection: Transcript, bytes: impl IntoIterator<Item = u8>) -> Duration {
    let start = Instant::now();
    for byte in bytes.into_iter().take(1_000) {
        let _ = connection.client.write_all(&[byte]).await;
        // Replies may come before the end.
        let end = async { while connection.client.read(&mut [0; 1024]).await.unwrap() > 0 {} };
        if tokio::time::timeout(Duration::from_millis(700), end).await.is_ok() {
            return start.elapsed();
        }
    }
    panic!("the connection never ends")
}

#[tokio::test(start_paused = true)]
async fn a_command_that_arrives_too_slowly_ends_the_connection() {
    let options = RespOptions { idle: Duration::from_secs(1), ..RespOptions::default() };
    let mut slow = open(options.clone());
    slow.exchange(b"PING\r\n*2\r\n$60000\r\n", "+PONG\r\n").await;
    let took = trickle(slow, std::iter::repeat(b'x')).await;
    assert!((COMMAND_TIMEOUT..COMMAND_TIMEOUT + Duration::from_secs(1)).contains(&took), "{took:?}");

    // Each command has its own deadline, even if the next one begins in the same packet.
    let mut steady = open(options);
    for byte in b"PING\r\n".repeat(20) {
        steady.client.write_all(&[byte]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    steady.exchange(b"PI", &"+PONG\r\n".repeat(20)).await;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(700)).await;
        steady.exchange(b"NG\r\nPI", "+PONG\r\n").await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_gives_no_password_is_disconnected_whatever_it_sends() {
    let options = RespOptions { idle: Duration::from_secs(1), ..with_password() };
    let took = trickle(open(options.clone()), b"PING\r\n".iter().copied().cycle()).await;
    assert!((PASSWORD_TIMEOUT..PASSWORD_TIMEOUT + Duration::from_secs(1)).contains(&took), "{took:?}");

    let mut known = open(options);
    known.exchange(b"*2\r\n$4\r\nAUTH\r\n$11\r\nopen sesame\r\n", "+OK\r\n").await;
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(700)).await;
        known.exchange(b"PING\r\n", "+PONG\r\n").await;
    }
}

#[tokio::test]
async fn a_cached_limit_is_used_only_for_the_same_arguments() {
    let mut connection = open(RespOptions::default());
    for (command, reply) in [
        ("CL.THROTTLE a 4 10 60", ":0 :5 :4 :-1 :6"),
        ("CL.THROTTLE b 4 10 60", ":0 :5 :4 :-1 :6"),
        ("CL.THROTTLE c 2 10 60", ":0 :3 :2 :-1 :6"),
        ("CL.THROTTLE d 2 20 60", ":0 :3 :2 :-1 :3"),
        ("CL.THROTTLE e 2 20 120", ":0 :3 :2 :-1 :6"),
        ("TIDEGATE.CHECK a 10/min", ":1 :10 :9 :0 :60000"),
        ("TIDEGATE.CHECK a 9/min", ":1 :9 :7 :0 :60000"),
        ("TIDEGATE.CHECK a 8/min", ":1 :8 :5 :0 :60000"),
    ] {
        let expected = format!("*5\r\n{}\r\n", reply.replace(' ', "\r\n"));
        connection.exchange(format!("{command}\r\n").as_bytes(), &expected).await;
    }
}

/// The first line of an HTTP request is an unknown inline command, or is followed by one.
#[tokio::test]
async fn an_http_request_is_not_answered_and_commands_in_its_body_are_not_executed() {
    let reset = "TIDEGATE.RESET user:42 2/min\r\nTIDEGATE.CHECK planted 1/min\r\n";
    let as_array = "*3\r\n$14\r\nTIDEGATE.RESET\r\n$7\r\nuser:42\r\n$5\r\n2/min\r\n";
    let header = "Host: 127.0.0.1:6380\r\nConnection: keep-alive\r\nOrigin: https://attacker.example\r\n\r\n";
    let methods = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "get", "Post"];
    let requests = methods.map(|method| format!("{method} / HTTP/1.1\r\n{header}")).into_iter().chain([
        // A page can send a method that is a command only to its own origin, after DNS rebinding. A header still
        // follows.
        format!("TIDEGATE.RESET /user:42 HTTP/1.1\r\n{header}"),
        format!("PING / HTTP/1.1\r\n{header}"),
        "host: attacker.example\r\n\r\n".to_owned(),
        "QUERY / HTTP/2.0\r\n\r\n".to_owned(),
    ]);
    let mut rejected = 0;
    for (request, body) in requests.flat_map(|request| [(request.clone(), reset), (request, as_array)]) {
        let mut connection = open(RespOptions::default());
        connection.exchange(b"TIDEGATE.CHECK user:42 2/min COST 2\r\n", &numbers([1, 2, 0, 0, 60_000])).await;
        connection.client.write_all(format!("{request}{body}").as_bytes()).await.unwrap();
        let mut received = String::new();
        connection.client.read_to_string(&mut received).await.unwrap();
        assert!(!received.contains("+OK") && !received.contains('*'), "{request}{body}: {received}");
        for key in ["user:42", "planted"] {
            let demand = Demand::new("2/min".parse().unwrap(), tidegate::Key::new(key).unwrap());
            let left = connection.listener.decider.limiter().inspect(&demand).await.unwrap().remaining;
            assert_eq!(left, if key == "planted" { 2 } else { 0 }, "{request}{body}");
        }
        rejected += connection.listener.stats.rejected_for(Rejection::Http);
    }
    assert_eq!(rejected, 2 * 15);
}

#[tokio::test]
async fn an_unknown_inline_command_ends_the_connection_and_an_unknown_array_does_not() {
    let mut typed = open(RespOptions::default());
    typed.exchange(b"A.VERY.LONG.COMMAND.NAME.INDEED k\r\nPING\r\n", &format!("-{}\r\n", *UNKNOWN)).await;
    assert!(typed.ends().await);
    // A Redis client on the wrong port.
    let mut client = open(RespOptions::default());
    for name in ["GET", "POST", "Host:"] {
        let command = format!("*2\r\n${}\r\n{name}\r\n$1\r\nk\r\nPING\r\n", name.len());
        client.exchange(command.as_bytes(), &format!("-{}\r\n+PONG\r\n", *UNKNOWN)).await;
    }
    assert_eq!(client.listener.stats.rejected_for(Rejection::Http), 0);
}

fn with_password() -> RespOptions {
    RespOptions { password: SecretForm::Password.parse("open sesame").ok(), ..RespOptions::default() }
}

/// Opens one connection after the other, each with a pipeline of guesses.
#[tokio::test(start_paused = true)]
async fn guesses_are_delayed_by_address_and_the_right_password_still_works() {
    let Transcript { listener, .. } = open(with_password());
    let began = Instant::now();
    for _ in 0..100 {
        if began.elapsed() >= Duration::from_secs(60) {
            break;
        }
        let (mut client, _stage) = connect(&listener, "203.0.113.9");
        client.write_all(&b"AUTH wrong\r\nHELLO 3 AUTH default wrong\r\n".repeat(500)).await.unwrap();
        client.read_to_string(&mut String::new()).await.unwrap();
    }
    let [wrong, refused] = listener.stats.auth_failures.read();
    assert!((50..=90).contains(&wrong), "{wrong} guesses in a minute");
    assert_eq!(refused, 0);
    // tokio's timer counts in milliseconds, and rounds up.
    for (address, delays_ms) in [("203.0.113.9", 1_000..=1_001), ("203.0.113.10", 0..=0)] {
        let ((mut client, _stage), asked) = (connect(&listener, address), Instant::now());
        client.write_all(b"*2\r\n$4\r\nAUTH\r\n$11\r\nopen sesame\r\n").await.unwrap();
        let mut received = [0; 5];
        client.read_exact(&mut received).await.unwrap();
        assert_eq!(&received, b"+OK\r\n");
        assert!(delays_ms.contains(&asked.elapsed().as_millis()), "{address}: {:?}", asked.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn more_connections_do_not_allow_more_guesses() {
    let Transcript { listener, .. } = open(with_password());
    let began = Instant::now();
    let clients = (0..200).map(|_| {
        let listener = listener.clone();
        tokio::spawn(async move {
            for _ in 0..1_000 {
                if began.elapsed() >= Duration::from_secs(20) {
                    break;
                }
                let (mut client, _stage) = connect(&listener, "2001:db8::1");
                client.write_all(b"AUTH wrong\r\n").await.unwrap();
                client.read_exact(&mut [0; 10]).await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    let [wrong, refused] = listener.stats.auth_failures.read();
    assert!((100..=16 * 22).contains(&wrong) && refused > 1_000, "{wrong} guesses in 20 s, {refused} refused");
}

#[tokio::test]
async fn a_wrong_password_does_not_undo_an_earlier_authentication() {
    let mut connection = open(with_password());
    connection.exchange(b"*2\r\n$4\r\nAUTH\r\n$11\r\nopen sesame\r\n", "+OK\r\n").await;
    connection.exchange(b"AUTH wrong\r\nPING\r\n", "-WRONGPASS invalid password\r\n+PONG\r\n").await;
    assert_eq!(connection.listener.stats.auth_failures.read(), [1, 0]);
}

#[tokio::test(start_paused = true)]
async fn on_shutdown_the_next_replies_are_the_last() {
    let mut connection = open(RespOptions::default());
    connection.exchange(b"PING\r\n", "+PONG\r\n").await;
    connection.stage.send(ShutdownStage::Draining).unwrap();
    connection.exchange(b"PING\r\n", "+PONG\r\n").await;
    connection.exchange(b"PING\r\n", "+PONG\r\n").await;
    connection.stage.send(ShutdownStage::Closing).unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let start = Instant::now();
    connection
        .exchange(b"PING\r\nTIDEGATE.CHECK a 9/min\r\nPI", &("+PONG\r\n".to_owned() + &numbers([1, 9, 8, 0, 60_000])))
        .await;
    connection.exchange(b"NG\r\n", "+PONG\r\n").await;
    assert_eq!(connection.client.read(&mut [0]).await.unwrap(), 0, "the end arrives with the reply");
    assert_eq!(start.elapsed(), Duration::ZERO);

    // A command after the end is not executed.
    connection.client.write_all(b"TIDEGATE.CHECK a 9/min\r\n").await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let peek = Demand::new("9/min".parse().unwrap(), tidegate::Key::new("a").unwrap()).cost(0);
    let decision = connection.listener.decider.limiter().check(&Check::one(&peek)).await.unwrap();
    assert_eq!(decision.limits[0].remaining, 8);
}

#[tokio::test(start_paused = true)]
async fn on_shutdown_a_silent_connection_ends_after_half_a_second() {
    for half in [&b""[..], b"*1\r\n$4\r\nPI"] {
        let mut connection = open(RespOptions::default());
        connection.exchange(b"PING\r\n", "+PONG\r\n").await;
        connection.client.write_all(half).await.unwrap();
        connection.stage.send(ShutdownStage::Closing).unwrap();
        let start = Instant::now();
        assert!(connection.ends().await);
        assert_eq!(start.elapsed().as_millis(), 500);
    }
}
