//! A Redis in memory behind a network in memory, for tests in virtual time.
//!
//! Real servers and the [fault proxy](crate::fault) take real time. How a store behaves with a round trip of 14 ms can
//! be tested exactly only if the test controls the clock. This server implements as much of RESP as a `RedisStore`
//! needs, decides with a [`MemoryStore`], and is connected through the relay of the proxy, over an in-memory pipe. With
//! tokio's clock paused, a run of minutes takes no time and always has the same result.
//!
//! ```text
//!   RedisStore ──► pipe ──[ fault ]──► pipe ──► SimulatedRedis
//!              ◄──      ──[ fault ]◄──      ◄──
//! ```
//!
//! **Time.** Tokio's timer rounds up to whole milliseconds, so a delay of 8.75 ms takes 9 ms.
//!
//! **Not simulated:** bans, TTLs, the run time of the script, and other instances: an announcement gets the number 1.
//! Commands other than those of the script get `OK`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate_core::{
    Algorithm, Check, Clock, Cost, Decision, Demand, Key, Limit, LimitStatus, LimitStatuses, MemoryStore, ReceiptId,
    Redeemed, Redemption, Source, Timestamp, Wait,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::fault::Fault;
use crate::fault::relay::{FaultState, relay_streams};

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
const PIPE_BYTES: usize = 256 << 10;
const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// A clock that advances with tokio's clock, which a test can pause and advance.
#[derive(Debug)]
pub struct VirtualClock {
    start: Instant,
}

impl VirtualClock {
    /// Creates a clock that shows a fixed time in 2025 now. If tokio's clock is to be paused, call this inside that
    /// runtime.
    pub fn start() -> Arc<VirtualClock> {
        Arc::new(VirtualClock { start: Instant::now() })
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        START.plus_micros(self.start.elapsed().as_micros() as u64)
    }
}

/// A simulated Redis server and its network. Clones are handles of the same server.
#[derive(Clone)]
pub struct SimulatedRedis(Arc<Inner>);

struct Inner {
    counters: MemoryStore,
    clock: Arc<VirtualClock>,
    network: watch::Sender<FaultState>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    knows_script: bool,
    /// A call with a key that contains this text fails.
    foreign: Option<String>,
    /// The number of checks in each executed call of the script; 0 for a call that has only refunds.
    calls: Vec<usize>,
    /// The number of calls refused with NOSCRIPT.
    noscripts: u64,
    /// The number of calls by EVAL, with the source of the script.
    sources: u64,
}

impl SimulatedRedis {
    /// Creates a server without counters and without the script, whose time is that of `clock`.
    pub fn new(clock: Arc<VirtualClock>) -> SimulatedRedis {
        let counters = MemoryStore::builder().clock(clock.clone()).build();
        let (network, _) = watch::channel(FaultState { fault: Some(Fault::Pass), change: 0 });
        SimulatedRedis(Arc::new(Inner { counters, clock, network, state: Mutex::default() }))
    }

    /// Opens a connection through the simulated network, for the `connector` of a `RedisStore`, and returns the
    /// client's end.
    ///
    /// Spawns the tasks that serve it.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn connect(&self) -> DuplexStream {
        let (client, near) = duplex(PIPE_BYTES);
        let (far, server) = duplex(PIPE_BYTES);
        tokio::spawn(relay_streams(near, far, self.0.network.subscribe()));
        tokio::spawn(self.clone().serve(server));
        client
    }

    /// Sets the fault of the network, for open and new connections. It takes effect when their tasks run next.
    pub fn set(&self, fault: Fault) {
        self.0.network.send_modify(|state| *state = FaultState { fault: Some(fault), change: state.change + 1 });
    }

    /// Sets the round-trip time of the network, half of it for each direction. Replaces another fault.
    pub fn set_round_trip(&self, round_trip: Duration) {
        self.set(Fault::Delay(round_trip / 2));
    }

    /// Forgets the script, as after `SCRIPT FLUSH`: calls by EVALSHA get NOSCRIPT until it is loaded again.
    pub fn flush_scripts(&self) {
        self.state().knows_script = false;
    }

    /// Makes every call of the script fail that has a key containing this text, as if that key held a value of another
    /// type.
    ///
    /// Replaces an earlier text.
    pub fn plant_foreign(&self, part_of_key: &str) {
        self.state().foreign = Some(part_of_key.into());
    }

    /// Returns the number of checks in each executed call of the script, in the order of execution.
    ///
    /// Refunds do not count, so a call that has only refunds is listed as 0. Calls that are answered with an error
    /// (NOSCRIPT, or a foreign value) are not listed.
    pub fn calls(&self) -> Vec<usize> {
        self.state().calls.clone()
    }

    /// Returns how many calls were answered with NOSCRIPT, because the script was not loaded.
    pub fn noscripts(&self) -> u64 {
        self.state().noscripts
    }

    /// Returns how many calls were made by EVAL, that is, with the source of the script.
    pub fn sources(&self) -> u64 {
        self.state().sources
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn serve(self, mut stream: DuplexStream) {
        let mut inbox = Vec::new();
        loop {
            let mut replies = String::new();
            while let Some((command, length)) = parse_command(&inbox) {
                inbox.drain(..length);
                replies += &self.answer(&command);
            }
            if stream.write_all(replies.as_bytes()).await.is_err() {
                return;
            }
            match stream.read_buf(&mut inbox).await {
                Ok(1..) => {}
                _ => return,
            }
        }
    }

    fn answer(&self, command: &[String]) -> String {
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        match words[..] {
            ["SCRIPT", "LOAD", _] => {
                self.state().knows_script = true;
                format!("${}\r\n{SHA}\r\n", SHA.len())
            }
            ["EVAL", _, "1", key, ..] if key.ends_with(":instances") => "*2\r\n:1\r\n:1\r\n".into(),
            [name @ ("EVALSHA" | "EVAL"), _, key_count, ref rest @ ..] => {
                let mut state = self.state();
                if name == "EVAL" {
                    state.knows_script = true;
                    state.sources += 1;
                } else if !state.knows_script {
                    state.noscripts += 1;
                    return "-NOSCRIPT No matching script. Please use EVAL.\r\n".into();
                }
                let (keys, arguments) = rest.split_at(key_count.parse().expect("a number of keys"));
                if let Some(foreign) = &state.foreign
                    && keys.iter().any(|key| key.contains(foreign))
                {
                    return "-TIDEGATE_FOREIGN the key holds another type\r\n".into();
                }
                let (numbers, checks) = self.run(keys, &arguments[1..]);
                state.calls.push(checks);
                let numbers: String = numbers.iter().map(|number| format!(":{number}\r\n")).collect();
                format!("*{}\r\n{numbers}", numbers.matches(':').count())
            }
            // There is no ban list.
            ["HGET", key, "version"] if key.ends_with(":bans") => "$-1\r\n".into(),
            _ => "+OK\r\n".into(),
        }
    }

    /// Executes a call of the script with these keys and arguments. Returns the integers of the reply, and the number
    /// of checks in the call, repeated ones included.
    ///
    /// # Panics
    /// If the call is malformed.
    fn run(&self, keys: &[&str], arguments: &[&str]) -> (Vec<i64>, usize) {
        let mut numbers = vec![self.0.clock.now().as_micros() as i64];
        let (mut keys, mut lines, mut checks) = (keys.iter(), arguments.iter(), 0);
        while let Some(line) = lines.next() {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |index: usize| words.get(index).map(|word| word.parse().expect("a number"));
            if words[0] == "refund" {
                let until_us = words.get(2).map(|word| word.parse().expect("a time"));
                let receipt = until_us.map(|until_us| {
                    let number = number(3).expect("the number of the receipt in its block");
                    (receipt_id(keys.next(), number as u64), Timestamp::from_micros(until_us))
                });
                let limits = (0..number(1).expect("a number of limits"))
                    .map(|_| (demand(keys.next(), lines.next()), *lines.next().expect("a second line")));
                numbers.push(self.refund(receipt, limits));
                continue;
            }
            let (limits, bans, repeat) = match words[0] {
                "check" => (number(1).expect("a number of limits"), number(2).unwrap_or(0), number(3).unwrap_or(1)),
                _ => (1, 0, 1),
            };
            let mut keys = keys.by_ref().skip(bans);
            let demands: Vec<Demand<'_>> = match words[0] {
                "check" => (0..limits).map(|_| demand(keys.next(), lines.next())).collect(),
                _ => vec![demand(keys.next(), Some(line))],
            };
            let check = Check::new(&demands).expect("a check");
            numbers.push(repeat as i64);
            for _ in 0..repeat {
                let decision = self.0.counters.check(&check);
                numbers.extend(decision.limits.iter().flat_map(numbers_of));
            }
            checks += repeat;
        }
        (numbers, checks)
    }

    /// Runs a refund, or a redemption of a receipt that expires at a time. Returns the integer of the reply.
    ///
    /// `limits` has for each limit its demand, and the line after its limit line.
    fn refund<'a>(
        &self,
        receipt: Option<(ReceiptId, Timestamp)>,
        limits: impl Iterator<Item = (Demand<'a>, &'a str)>,
    ) -> i64 {
        let (charges, refunds): (Vec<_>, Vec<_>) = limits.partition(|(_, second)| *second == "charge");
        let charged: Vec<Demand<'_>> = charges.into_iter().map(|(demand, _)| demand).collect();
        let (mut refunded, mut at, mut limits) = (Vec::new(), Timestamp::ZERO, LimitStatuses::new());
        for (demand, second) in refunds {
            let numbers: Vec<u64> = second.split(' ').map(|number| number.parse().expect("a number")).collect();
            let [at_us, reset_after_us, refunded_before] = numbers[..] else { panic!("three numbers: {second}") };
            at = Timestamp::from_micros(at_us);
            limits.push(LimitStatus {
                allowed: true,
                cost: demand.cost.units(),
                quota: demand.limit.quota(),
                remaining: 0,
                retry_after: Wait::ZERO,
                next_after: Wait::ZERO,
                reset_after: Wait::from_micros(reset_after_us),
                late_us: 0,
                refunded_before,
            });
            refunded.push(demand);
        }
        let decision = Decision::new(at, Source::Store, limits);
        let Some((id, until)) = receipt else {
            self.0.counters.refund(&Check::new(&refunded).expect("a refund"), &decision);
            return 1;
        };
        let mut redemption = Redemption::new(id, b"", until);
        if let Ok(check) = Check::new(&refunded) {
            redemption = redemption.refund(check, &decision);
        }
        if let Ok(check) = Check::new(&charged) {
            redemption = redemption.charge(check);
        }
        match self.0.counters.redeem(&redemption) {
            Redeemed::Done => 1,
            Redeemed::AlreadyUsed => 0,
            _ => -1,
        }
    }
}

/// Returns the id of a receipt from the key of its block, which ends with its stream and the number of the block, and from
/// its number in the block.
///
/// # Panics
/// If there is no key, or it is not that of a block.
fn receipt_id(key: Option<&&str>, number: u64) -> ReceiptId {
    let (rest, block) = key.expect("the key of a block").rsplit_once(':').expect("a block");
    let (_, stream) = rest.rsplit_once(':').expect("a stream");
    let block: u64 = block.parse().expect("a number");
    ReceiptId::new(u64::from_str_radix(stream, 16).expect("hex digits"), block * 1_024 + number)
}

fn numbers_of(line: &LimitStatus) -> [i64; 6] {
    let wait = |wait: Wait| wait.as_micros().map_or(-1, |us| us as i64);
    let [retry, next, reset] = [line.retry_after, line.next_after, line.reset_after].map(wait);
    [line.allowed.into(), line.remaining.into(), retry, next, reset, line.refunded_before as i64]
}

/// Parses a demand from a key and its argument: `ALGORITHM QUOTA WINDOW_US COST [OPTION=VALUE …]`.
///
/// # Panics
/// If one of them is missing or invalid.
fn demand<'a>(key: Option<&&'a str>, line: Option<&&str>) -> Demand<'a> {
    let (key, line) = (key.expect("a key for each limit"), line.expect("a line for each limit"));
    let words: Vec<&str> = line.split(' ').collect();
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let algorithm: Algorithm = words[0].parse().expect("an algorithm");
    let limit = Limit::new(number(words[1]), Duration::from_micros(number(words[2])));
    let mut limit = limit.and_then(|limit| limit.with_algorithm(algorithm)).expect("a limit");
    for option in &words[4..] {
        limit = match option.split_once('=').expect("an option") {
            ("burst", burst) => limit.with_burst(number(burst)).expect("a burst"),
            ("queue", queue) => limit.with_queue(number(queue)).expect("a queue"),
            ("count_denied", _) => limit.with_count_denied(true),
            _ => limit,
        };
    }
    let cost = Cost::new(number(words[3]) as u32);
    Demand::new(limit, Key::new(*key).expect("a key")).cost(cost)
}

/// Returns the parts of the first command in `bytes` and its length in bytes, or `None` if it is incomplete.
///
/// # Panics
/// If it is not a list of bulk strings.
fn parse_command(bytes: &[u8]) -> Option<(Vec<String>, usize)> {
    let mut at = 0;
    let mut number_after = |kind: u8, skip: usize| -> Option<(usize, usize)> {
        at += skip;
        let line = bytes.get(at..)?;
        let end = line.windows(2).position(|two| two == b"\r\n")?;
        assert_eq!(line[0], kind, "a command is a list of bulk strings");
        at += end + 2;
        Some((std::str::from_utf8(&line[1..end]).ok()?.parse().ok()?, at))
    };
    let (count, mut end) = number_after(b'*', 0)?;
    let (mut parts, mut skip) = (Vec::with_capacity(count), 0);
    for _ in 0..count {
        let (length, start) = number_after(b'$', skip)?;
        skip = length + 2;
        end = start + skip;
        let part = bytes.get(start..end)?;
        parts.push(String::from_utf8_lossy(&part[..length]).into_owned());
    }
    Some((parts, end))
}
