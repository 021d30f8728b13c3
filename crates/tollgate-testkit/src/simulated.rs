//! A Redis in memory behind a network in memory, for tests in virtual time.
//!
//! A real server answers in real time, and so does the [fault proxy](crate::fault). What a store does with a round trip of
//! 14 ms can be shown exactly only where a millisecond passes when the test says so. This server speaks as
//! much of RESP as a `RedisStore` needs, decides by a [`MemoryStore`], and is reached through the same relay as the proxy, over an
//! in-memory pipe. Under tokio's paused clock a run of minutes takes no time and is the same every time.
//!
//! ```text
//!   RedisStore ──► pipe ──[ fault ]──► pipe ──► SimulatedRedis
//!              ◄──      ──[ fault ]◄──      ◄──
//! ```
//!
//! **Time.** Tokio's timer counts whole milliseconds and rounds up, so a delay of 8.75 ms takes 9 here.
//!
//! **Not simulated:** bans, TTLs, the time that a script takes, other commands than the script's (each is answered `OK`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::sync::watch;
use tokio::time::Instant;
use tollgate_core::{
    Algorithm, Check, Clock, Cost, Decision, Demand, Key, Limit, LimitStatus, MemoryStore, Source, Timestamp, Wait,
};

use crate::fault::Fault;
use crate::fault::relay::{Wish, relay_streams};

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
const PIPE_BYTES: usize = 256 << 10;
const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// A clock that goes with tokio's, paused or not.
#[derive(Debug)]
pub struct VirtualClock {
    start: Instant,
}

impl VirtualClock {
    /// Creates a clock that starts now. Needs a tokio runtime if that is paused.
    pub fn start() -> Arc<VirtualClock> {
        Arc::new(VirtualClock { start: Instant::now() })
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        START.plus_micros(self.start.elapsed().as_micros() as u64)
    }
}

/// A server that any number of connections share.
#[derive(Clone)]
pub struct SimulatedRedis(Arc<Inner>);

struct Inner {
    counters: MemoryStore,
    clock: Arc<VirtualClock>,
    network: watch::Sender<Wish>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    knows_script: bool,
    /// A call that names such a key is refused as a whole.
    foreign: Option<String>,
    /// Checks in each call of the script that was run.
    calls: Vec<usize>,
    /// Calls that were refused because the script was not known.
    noscripts: u64,
    /// Calls that came with the script's source.
    sources: u64,
}

impl SimulatedRedis {
    /// Creates a server without counters, whose time is `clock`.
    pub fn new(clock: Arc<VirtualClock>) -> SimulatedRedis {
        let counters = MemoryStore::builder().clock(clock.clone()).build();
        let (network, _) = watch::channel(Wish { fault: Some(Fault::Pass), turn: 0 });
        SimulatedRedis(Arc::new(Inner { counters, clock, network, state: Mutex::default() }))
    }

    /// Opens a connection. For the `connector` of a `RedisStore`.
    pub fn connect(&self) -> DuplexStream {
        let (client, near) = duplex(PIPE_BYTES);
        let (far, server) = duplex(PIPE_BYTES);
        tokio::spawn(relay_streams(near, far, self.0.network.subscribe()));
        tokio::spawn(self.clone().serve(server));
        client
    }

    /// Switches the fault of the network, for open connections and new ones.
    pub fn set(&self, fault: Fault) {
        self.0.network.send_modify(|wish| *wish = Wish { fault: Some(fault), turn: wish.turn + 1 });
    }

    /// Sets the round-trip time of the network. Half of it is spent in each direction.
    pub fn set_round_trip(&self, round_trip: Duration) {
        self.set(Fault::Delay(round_trip / 2));
    }

    /// Forgets the script, as `SCRIPT FLUSH` does.
    pub fn flush_scripts(&self) {
        self.state().knows_script = false;
    }

    /// Refuses calls that name a key with this in it, as if the key held something else.
    pub fn plant_foreign(&self, part_of_key: &str) {
        self.state().foreign = Some(part_of_key.into());
    }

    /// Returns how many checks each call of the script held, in the order in which the server ran them.
    pub fn calls(&self) -> Vec<usize> {
        self.state().calls.clone()
    }

    /// Returns how many calls were refused because the script was not known.
    pub fn noscripts(&self) -> u64 {
        self.state().noscripts
    }

    /// Returns how many calls came with the script's source.
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
                    return "-TOLLGATE_FOREIGN the key holds another type\r\n".into();
                }
                let (numbers, checks) = self.run(keys, &arguments[1..]);
                state.calls.push(checks);
                let numbers: String = numbers.iter().map(|number| format!(":{number}\r\n")).collect();
                format!("*{}\r\n{numbers}", numbers.matches(':').count())
            }
            _ => "+OK\r\n".into(),
        }
    }

    /// Runs the steps of a call. Returns the numbers of the reply and how many checks there were.
    fn run(&self, keys: &[&str], arguments: &[&str]) -> (Vec<i64>, usize) {
        let mut numbers = vec![self.0.clock.now().as_micros() as i64];
        let (mut keys, mut lines, mut checks) = (keys.iter(), arguments.iter(), 0);
        while let Some(line) = lines.next() {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |index: usize| words.get(index).map(|word| word.parse().expect("a number"));
            if words[0] == "refund" {
                for _ in 0..number(1).expect("a number of limits") {
                    let (demand, receipt) = (demand(keys.next(), lines.next()), lines.next().expect("a receipt"));
                    self.refund(&demand, receipt);
                }
                numbers.push(1);
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

    fn refund(&self, demand: &Demand<'_>, receipt: &str) {
        let (at_us, reset_after_us) = receipt.split_once(' ').expect("two numbers");
        let line = LimitStatus {
            allowed: true,
            cost: demand.cost.units(),
            quota: demand.limit.quota(),
            remaining: 0,
            retry_after: Wait::ZERO,
            next_after: Wait::ZERO,
            reset_after: Wait::from_micros(reset_after_us.parse().expect("a number")),
        };
        let at = Timestamp::from_micros(at_us.parse().expect("a number"));
        let decision = Decision { at, source: Source::Store, ban: None, limits: [line].into_iter().collect() };
        self.0.counters.refund(&Check::one(demand), &decision);
    }
}

fn numbers_of(line: &LimitStatus) -> [i64; 5] {
    let wait = |wait: Wait| wait.as_micros().map_or(-1, |us| us as i64);
    let [retry, next, reset] = [line.retry_after, line.next_after, line.reset_after].map(wait);
    [line.allowed.into(), line.remaining.into(), retry, next, reset]
}

/// The demand of a key and its limit line.
fn demand<'a>(key: Option<&&'a str>, line: Option<&&str>) -> Demand<'a> {
    let (key, line) = (key.expect("a key for each limit"), line.expect("a line for each limit"));
    let words: Vec<&str> = line.split(' ').collect();
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let algorithm = Algorithm::from_name(words[0]).expect("an algorithm");
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

/// The first command in `bytes` and its length, if it is complete.
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
