//! Attacks on the gateway, beside a healthy client: slow connections, slots that are held, rapid resets, CONTINUATION frames, a surge over
//! the quota, requests that are refunded, and a Redis that does not answer.
//!
//! The quota of the attackers is large, so that their requests are not merely refused. A round of an attack consists of
//! a quiet part and an attacked part, in each of which the healthy client sends one request after the other. The ratio
//! is that of the medians of the two parts, and the median of all rounds is reported. `make gateway` runs the long
//! form, which also asserts the ratio, for resets and CONTINUATION frames at a fixed rate.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tidegate_testkit::server::Server;

use crate::campaign::{is_long, record, scale};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::http::frames::{self, PREFACE, frame, header_block};
use tidegate_testkit::http::upstream::{Upstream, ok};
use tidegate_testkit::program::GatewayProcess;

mod refunds;

/// The maximum ratio of the healthy client's median latency during an attack to that before it.
const RATIO_MAX: f64 = 2.0;
/// The maximum growth of the gateway's memory from the first round to the last.
const GROWTH_BYTES_MAX: u64 = 16 << 20;
/// The maximum growth of the gateway's memory during an attack.
const ATTACK_BYTES_MAX: u64 = 64 << 20;

/// An upstream that answers, except to requests for `/held`, which wait until the gateway closes the connection.
fn upstream() -> Upstream {
    Upstream::start(|request, stream| {
        if request.path() == "/held" {
            let _ = stream.read(&mut [0]);
            return false;
        }
        ok(stream, "", b"hello")
    })
}

fn gateway(upstream: &Upstream) -> GatewayProcess {
    let configuration = format!(
        "[gateway]\nconnections_per_address = 10000\n[[upstreams]]\nname = 'web'\nservers = ['{}']\n\
         [[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['10000000/h']\n",
        upstream.url()
    );
    GatewayProcess::configured(&configuration, &[])
}

/// Returns the value that `percent` of the values do not exceed.
fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) * percent / 100]
}

/// Sends a request that must be admitted, and returns its latency in microseconds.
fn latency(client: &mut HttpClient, path: &str) -> f64 {
    let began = Instant::now();
    let answer = client.ask("GET", path, &[], "");
    let us = began.elapsed().as_secs_f64() * 1e6;
    assert_eq!(answer.status, 200, "a healthy request: {answer:?}");
    us
}

/// Sends requests while `is_wanted` returns true for their number, and returns their latencies in microseconds.
///
/// Every tenth request is sent on a new connection. Connecting is not part of the latency.
fn latencies(gateway: &GatewayProcess, path: &str, mut is_wanted: impl FnMut(usize) -> bool) -> Vec<f64> {
    let (mut client, mut latencies) = (gateway.client(), Vec::new());
    while is_wanted(latencies.len()) {
        if latencies.len() % 10 == 9 {
            client = gateway.client();
        }
        latencies.push(latency(&mut client, path));
    }
    latencies
}

/// Bounds the rate of an attack.
struct Pace {
    began: Instant,
    /// `None` sends as fast as possible.
    per_second: Option<f64>,
}

impl Pace {
    /// Waits until it is time for the next request or frame after `sent` ones.
    fn wait(&self, sent: u64) {
        if let Some(per_second) = self.per_second {
            let due = Duration::from_secs_f64(sent as f64 / per_second);
            // An attack at a rate has nothing to wait for but the time.
            std::thread::sleep(due.saturating_sub(self.began.elapsed()));
        }
    }
}

/// The latencies of a healthy client in one round, in microseconds.
struct Round {
    quiet: Vec<f64>,
    attacked: Vec<f64>,
    /// The memory of the gateway after the attack, in bytes.
    end: u64,
}

impl Round {
    /// Runs a round: the healthy client alone, then beside the attack until the attack ends.
    fn run(
        gateway: &GatewayProcess,
        count: usize,
        per_second: Option<f64>,
        attack: &mut (impl FnMut(&Pace) + Send),
    ) -> Round {
        let quiet = latencies(gateway, "/healthy", |sent| sent < count);
        let is_over = AtomicBool::new(false);
        let attacked = std::thread::scope(|scope| {
            scope.spawn(|| {
                let _over = SetAtEnd(&is_over);
                attack(&Pace { began: Instant::now(), per_second });
            });
            latencies(gateway, "/healthy", |sent| sent == 0 || !is_over.load(Ordering::SeqCst))
        });
        Round { quiet, attacked, end: gateway.resident_bytes() }
    }

    fn ratio(&mut self) -> f64 {
        percentile(&mut self.attacked, 50) / percentile(&mut self.quiet, 50)
    }
}

/// Runs rounds of an attack beside a healthy client, reports the latencies and the memory, and asserts them.
///
/// The rounds of the long form send `per_second` requests or frames. If it is set, another round sends them as fast as
/// possible. That round is only reported, because attacker, client and upstream compete with the gateway for the same
/// cores.
fn withstand(scenario: &str, gateway: &GatewayProcess, per_second: Option<f64>, mut attack: impl FnMut(&Pace) + Send) {
    let (rounds, count) = (scale(1, 10), scale(20, 300));
    let _ = latencies(gateway, "/healthy", |sent| sent < count);
    let before = gateway.resident_bytes_with_files();
    let pace = per_second.filter(|_| is_long());
    let mut paced: Vec<Round> = (0..rounds).map(|_| Round::run(gateway, count, pace, &mut attack)).collect();
    let mut ratios: Vec<f64> = paced.iter_mut().map(Round::ratio).collect();
    let ratio = percentile(&mut ratios, 50);
    let all = |of: fn(&Round) -> &Vec<f64>| paced.iter().flat_map(of).copied().collect::<Vec<f64>>();
    for (what, mut latencies) in [("quiet", all(|round| &round.quiet)), ("attacked", all(|round| &round.attacked))] {
        record(scenario, what, summary(&mut latencies));
    }
    record(scenario, "ratio of medians", format!("{ratio:.2} (rounds: {ratios:.2?})"));
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let most = gateway.peak_bytes();
    let (first, last) = (paced[0].end, paced[rounds - 1].end);
    let memory = [before, most, first, last].map(mib);
    let [at_start, at_most, at_first, at_last] = memory;
    record(
        scenario,
        "memory",
        format!(
            "{at_start:.1} MiB before, {at_most:.1} at most, {at_first:.1} after round 1, {at_last:.1} after round {rounds}"
        ),
    );
    assert!(most.saturating_sub(before) < ATTACK_BYTES_MAX, "the memory grew to {most} bytes");
    assert!(last.saturating_sub(first) < GROWTH_BYTES_MAX, "the memory grew from {first} to {last} bytes");
    if let Some(per_second) = pace {
        record(scenario, "rate", format!("{per_second:.0} per second"));
        let mut fast = Round::run(gateway, count, None, &mut attack);
        let figures = format!("ratio of medians {:.2}; {}", fast.ratio(), summary(&mut fast.attacked));
        record(scenario, "as fast as possible", figures);
    }
    assert!(!is_long() || ratio < RATIO_MAX, "the median latency of the healthy client is {ratio} times that before");
}

fn summary(latencies: &mut [f64]) -> String {
    let [p50, p99, max] = [50, 99, 100].map(|percent| percentile(latencies, percent));
    format!("p50 {p50:.0} us, p99 {p99:.0} us, max {max:.0} us, {} requests", latencies.len())
}

/// Sets a flag when it is dropped, even if its thread panics.
struct SetAtEnd<'f>(&'f AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Each connection sends a byte from time to time, so that its request is never complete.
#[test]
fn slow_connections_do_not_slow_down_a_healthy_client() {
    crate::bursts::allow_descriptors();
    let (count, passes) = (scale(100, 1_000), scale(2, 20));
    let upstream = upstream();
    let gateway = gateway(&upstream);
    let opened = AtomicUsize::new(0);
    withstand("gateway, slow connections", &gateway, None, |_| {
        let begin = |number: usize| {
            let mut stream = gateway.connect();
            let bytes: &[u8] = match number % 3 {
                0 => b"GET /slow HTTP/1.1\r\nhost: x\r\nx: ",
                1 => b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n",
                _ => PREFACE,
            };
            stream.write_all(bytes).unwrap();
            opened.fetch_add(1, Ordering::SeqCst);
            stream
        };
        let mut slow: Vec<TcpStream> = (0..count).map(begin).collect();
        for _ in 0..passes {
            for (number, stream) in slow.iter_mut().enumerate().filter(|(number, _)| number % 3 != 2) {
                stream.write_all(b"x").unwrap_or_else(|error| panic!("connection {number}: {error}"));
            }
            // The attack is to be slow.
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    record("gateway, slow connections", "connections", format!("{} in all, {count} at a time", opened.into_inner()));
}

/// A client that tries to hold all slots of an upstream.
#[derive(Clone, Copy)]
enum SlotAttack {
    /// HTTP/2 streams whose window is zero.
    Window,
    /// HTTP/1.1 requests for a large response that is never read.
    NeverReads,
    /// HTTP/2 requests for a large response on connections that are never read.
    NeverReadsHttp2,
    /// HTTP/1.1 bodies that arrive byte by byte.
    Drips,
    /// HTTP/2 bodies that arrive byte by byte.
    DripsHttp2,
}

impl SlotAttack {
    const ALL: [(SlotAttack, &'static str); 5] = [
        (SlotAttack::Window, "window zero, HTTP/2"),
        (SlotAttack::NeverReads, "never reads, HTTP/1.1"),
        (SlotAttack::NeverReadsHttp2, "never reads, HTTP/2"),
        (SlotAttack::Drips, "dripping bodies, HTTP/1.1"),
        (SlotAttack::DripsHttp2, "dripping bodies, HTTP/2"),
    ];

    /// Opens a connection that holds as many slots as it can.
    fn begin(self, gateway: &GatewayProcess) -> TcpStream {
        let stream = gateway.connect();
        let (window, method, path, has_body) = match self {
            SlotAttack::Window => (Some(0), "GET", "/large", false),
            SlotAttack::NeverReadsHttp2 => (Some(i32::MAX as u32), "GET", "/large", false),
            SlotAttack::DripsHttp2 => (None, "POST", "/drip", true),
            SlotAttack::NeverReads | SlotAttack::Drips => {
                let mut stream = stream;
                let request: &[u8] = match self {
                    SlotAttack::Drips => b"POST /drip HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n",
                    _ => b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n",
                };
                stream.write_all(request).unwrap();
                return stream;
            }
        };
        let mut stream = frames::begin(stream, window);
        for number in (1..).step_by(2).take(STREAMS) {
            frames::request(&mut stream, number, method, path, has_body);
        }
        stream
    }

    /// Returns how many connections take about this number of slots.
    fn connections(self, slots: usize) -> usize {
        match self {
            SlotAttack::NeverReads | SlotAttack::Drips => slots,
            SlotAttack::Window | SlotAttack::NeverReadsHttp2 | SlotAttack::DripsHttp2 => slots.div_ceil(STREAMS),
        }
    }

    /// Sends the next byte of each body. Returns false if the gateway has closed the connection.
    fn drip(self, stream: &mut TcpStream) -> bool {
        match self {
            SlotAttack::Drips => stream.write_all(b"x").is_ok(),
            SlotAttack::DripsHttp2 => {
                let bytes = (1..).step_by(2).take(STREAMS).map(|number| frame(0, 0, number, b"x"));
                stream.write_all(&bytes.collect::<Vec<_>>().concat()).is_ok()
            }
            SlotAttack::Window | SlotAttack::NeverReads | SlotAttack::NeverReadsHttp2 => true,
        }
    }
}

/// The requests on an HTTP/2 connection of an attack: the default of `streams_max`.
const STREAMS: usize = 100;

/// The attacker is at 127.0.0.1 and has the default settings. The healthy client is at 127.0.0.2.
#[test]
fn slots_held_by_one_address_do_not_refuse_another() {
    crate::bursts::allow_descriptors();
    let large = vec![b'x'; 8 << 20];
    let upstream = Upstream::start(move |request, stream| {
        let body: &[u8] = if request.path() == "/large" { &large } else { b"hello" };
        ok(stream, "", body)
    });
    for (attack, name) in SlotAttack::ALL {
        let scenario = format!("gateway, slots: {name}");
        let gateway = GatewayProcess::configured(
            &format!("[[upstreams]]\nname = 'web'\nservers = ['{}']\n", upstream.url()),
            &[],
        );
        let mut neighbour = gateway.client_from("127.0.0.2");
        let mut paused_latency = || {
            // Spreads the requests over the attack. The short form sends them without a pause. In both parts, because a
            // request takes longer after a pause.
            std::thread::sleep(Duration::from_millis(if is_long() { 5 } else { 0 }));
            latency(&mut neighbour, "/healthy")
        };
        let mut quiet: Vec<f64> = (0..scale(20, 300)).map(|_| paused_latency()).collect();
        let mut held: Vec<TcpStream> =
            (0..attack.connections(scale(300, 1_200))).map(|_| attack.begin(&gateway)).collect();
        gateway.until("/metrics", |answer| {
            let count = answer
                .body
                .lines()
                .find_map(|line| line.strip_prefix("tidegate_upstream_in_flight{upstream=\"web\"} "));
            count.is_some_and(|count| count.parse::<u64>().unwrap() >= 200)
        });
        let (began, mut attacked) = (Instant::now(), Vec::new());
        // Long enough for the idle time of a response and the timeout of a body to pass.
        let wanted = Duration::from_secs(scale(0, 70));
        let mut next_drip = Duration::ZERO;
        while attacked.len() < scale(20, 300) || began.elapsed() < wanted {
            if began.elapsed() >= next_drip {
                next_drip += Duration::from_secs(scale(1, 10));
                held.retain_mut(|stream| attack.drip(stream));
            }
            attacked.push(paused_latency());
        }
        let slots = gateway.until("/metrics", |answer| answer.status == 200).body;
        let line = |start: &str| slots.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
        record(&scenario, "after the attack", line("tidegate_upstream_in_flight"));
        let ratio = percentile(&mut attacked, 50) / percentile(&mut quiet, 50);
        record(&scenario, "quiet", summary(&mut quiet));
        record(&scenario, "attacked", summary(&mut attacked));
        record(&scenario, "ratio of medians", format!("{ratio:.2}, 0 of {} requests refused", attacked.len()));
        if is_long() {
            gateway
                .until("/metrics", |answer| answer.body.contains("tidegate_upstream_in_flight{upstream=\"web\"} 0\n"));
            assert!(ratio < RATIO_MAX, "the median latency of the healthy client is {ratio} times that before");
        }
    }
}

/// Sends a ping and reads until it is answered. Returns `false` if the connection ends before that.
fn ping(stream: &mut TcpStream) -> bool {
    if stream.write_all(&frame(6, 0, 0, b"sequence")).is_err() {
        return false;
    }
    loop {
        match frames::read(stream) {
            None => return false,
            Some((6, 1, _)) => return true,
            Some(_) => {}
        }
    }
}

/// Connections alternate: one sends resets until the gateway closes it, the next one resets only requests that the
/// gateway has begun to forward, so that it is not closed.
#[test]
fn rapid_resets_do_not_slow_down_a_healthy_client() {
    let per_round = scale(1_000, 10_000);
    let upstream = upstream();
    let gateway = gateway(&upstream);
    let (resets, connections) = (AtomicU64::new(0), AtomicU64::new(0));
    let block = header_block("GET", "/held");
    withstand("gateway, rapid resets", &gateway, Some(2_000.0), |pace| {
        let mut remaining: u64 = per_round;
        let mut is_paced = false;
        while remaining > 0 {
            let mut stream = frames::begin(gateway.connect(), None);
            connections.fetch_add(1, Ordering::SeqCst);
            let (mut number, batch) = (1, if is_paced { 10 } else { 100 });
            for _ in 0..if is_paced { 100 } else { 10 } {
                let streams = (number..).step_by(2).take(batch);
                let opens = streams.clone().map(|stream| frame(1, 5, stream, &block));
                let ends = streams.map(|stream| frame(3, 0, stream, &8_u32.to_be_bytes()));
                let (opens, ends): (Vec<_>, Vec<_>) = (opens.collect(), ends.collect());
                let sent = if is_paced {
                    stream.write_all(&opens.concat()).is_ok()
                        && ping(&mut stream)
                        && stream.write_all(&ends.concat()).is_ok()
                } else {
                    let frames: Vec<Vec<u8>> = opens.into_iter().zip(ends).flat_map(<[_; 2]>::from).collect();
                    stream.write_all(&frames.concat()).is_ok()
                };
                number += 2 * u32::try_from(batch).unwrap();
                if !sent {
                    break;
                }
                resets.fetch_add(batch as u64, Ordering::SeqCst);
                remaining = remaining.saturating_sub(batch as u64);
                pace.wait(per_round - remaining);
                if remaining == 0 || !is_paced && !ping(&mut stream) {
                    break;
                }
            }
            is_paced = !is_paced;
        }
    });
    let (resets, connections) = (resets.into_inner(), connections.into_inner());
    let forwarded = upstream.requests().iter().filter(|request| request.path() == "/held").count();
    let scenario = "gateway, rapid resets";
    record(scenario, "resets", format!("{resets} on {connections} connections, {forwarded} requests at the upstream"));
    assert!(resets >= scale(1_000, 100_000));
    gateway.until("/metrics", |answer| answer.body.contains("tidegate_upstream_in_flight{upstream=\"web\"} 0\n"));
}

/// Each connection sends 1,000 CONTINUATION frames, or fewer if it is closed. Connections alternate between frames with
/// a header and empty ones.
#[test]
fn continuation_frames_do_not_slow_down_a_healthy_client() {
    const FRAMES: u64 = 1_000;
    let connections = scale(10, 100);
    let upstream = upstream();
    let gateway = gateway(&upstream);
    let frames = AtomicU64::new(0);
    withstand("gateway, continuation flood", &gateway, Some(50_000.0), |pace| {
        for number in 0..connections {
            let mut stream = frames::begin(gateway.connect(), None);
            let payload: &[u8] = if number % 2 == 0 { &[0, 1, b'a', 1, b'b'] } else { &[] };
            let _ = stream.write_all(&frame(1, 0, 1, &[]));
            let burst = frame(9, 0, 1, payload).repeat(100);
            for sent in (100..=FRAMES).step_by(100) {
                frames.fetch_add(100, Ordering::SeqCst);
                if stream.write_all(&burst).is_err() {
                    break;
                }
                pace.wait(number * FRAMES + sent);
            }
            // The gateway closes the connection, or waits for the rest of the header.
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    let frames = frames.into_inner();
    record("gateway, continuation flood", "frames", frames);
    assert!(upstream.requests().iter().all(|request| request.path() == "/healthy"));
}

/// How long the upstream works on a request during the surge.
const WORK: Duration = Duration::from_millis(2);

/// A steady client has a limit of its own, and sends requests before, during and after the surge. Their times are those
/// that the upstream measures, and those that the gateway writes to its access log.
#[test]
fn surge_of_ten_times_the_quota_leaves_the_upstream_with_exactly_the_quota() {
    const CLIENTS: usize = 6;
    let (quota, count) = (scale(60, 3_000), scale(20, 500));
    let measured: Arc<Mutex<Vec<(String, f64)>>> = Arc::default();
    let upstream = Upstream::start({
        let measured = measured.clone();
        move |request, stream| {
            let began = Instant::now();
            // Stands for the work of a service.
            std::thread::sleep(WORK);
            let is_sent = ok(stream, "", b"hello");
            measured.lock().unwrap().push((request.path().to_owned(), began.elapsed().as_secs_f64() * 1e6));
            is_sent
        }
    });
    let configuration = format!(
        "[gateway]\naccess_log = 'json'\n[[upstreams]]\nname = 'web'\nservers = ['{}']\n\
         [[rules]]\nname = 'surge'\nmatch = {{ path = '/surge' }}\nby = ['ip']\nlimits = ['{quota}/day']\n\
         [[rules]]\nname = 'steady'\nmatch = {{ path = ['/before', '/during', '/after'] }}\nby = ['ip']\nlimits = ['10000000/h']\n",
        upstream.url()
    );
    let gateway = GatewayProcess::configured(&configuration, &[]);
    let _ = latencies(&gateway, "/before", |sent| sent < count);
    let (admitted, running) = (AtomicUsize::new(0), AtomicUsize::new(CLIENTS));
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                let mut client = gateway.client();
                for _ in 0..quota * 10 / CLIENTS {
                    match client.ask("GET", "/surge", &[], "").status {
                        200 => drop(admitted.fetch_add(1, Ordering::SeqCst)),
                        status => assert_eq!(status, 429),
                    }
                }
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }
        let _ = latencies(&gateway, "/during", |_| running.load(Ordering::SeqCst) > 0);
    });
    let _ = latencies(&gateway, "/after", |sent| sent < count);
    let received = upstream.requests().iter().filter(|request| request.path() == "/surge").count();
    assert_eq!((admitted.load(Ordering::SeqCst), received), (quota, quota));

    let log = tidegate_testkit::poll::eventually(
        "all lines of the access log",
        || gateway.output(),
        |output| output.matches(r#""path":"/after""#).count() == count,
    );
    let entries = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let entry =
        |entry: serde_json::Value| Some((entry["path"].as_str()?.to_owned(), entry["upstream_ms"].as_f64()? * 1e3));
    let logged: Vec<(String, f64)> = entries.filter_map(entry).collect();
    for (by, times) in [("the upstream", &*measured.lock().unwrap()), ("the gateway", &logged)] {
        let [before, during, after] = ["/before", "/during", "/after"].map(|path| {
            let mut times: Vec<f64> = times.iter().filter(|(other, _)| other == path).map(|(_, us)| *us).collect();
            record("gateway, surge", &format!("upstream {}, measured by {by}", &path[1..]), summary(&mut times));
            percentile(&mut times, 50)
        });
        let ratio = 2.0 * during / (before + after);
        record("gateway, surge", &format!("ratio of medians, measured by {by}"), format!("{ratio:.2}"));
    }
    record("gateway, surge", "requests", format!("{} sent, {received} at the upstream", quota * 10));
}

/// Redis stops (SIGSTOP): it accepts connections and answers nothing.
#[test]
fn stopped_redis_does_not_stop_requests() {
    let (redis, upstream, count) = (Server::redis(), upstream(), scale(20, 1_000));
    let configuration = format!(
        "instances = 1\n[[upstreams]]\nname = 'web'\nservers = ['{}']\n\
         [[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['10000000/h']\n",
        upstream.url()
    );
    let gateway = GatewayProcess::configured(&configuration, &["--store", &redis.url()]);
    gateway.until("/readyz", |answer| answer.status == 200);
    let mut ways = Vec::new();
    ways.push(("running", latencies(&gateway, "/", |sent| sent < count)));
    redis.stop();
    ways.push(("stopped", latencies(&gateway, "/", |sent| sent < count)));
    redis.cont();
    for (what, mut latencies) in ways {
        let first = latencies[..4].iter().map(|us| format!("{:.1}", us / 1e3)).collect::<Vec<_>>().join(", ");
        let [p50, p99, max] = [50, 99, 100].map(|percent| percentile(&mut latencies, percent) / 1e3);
        let figure = format!("p50 {p50:.2} ms, p99 {p99:.2} ms, max {max:.2} ms, the first four {first} ms");
        record("gateway, Redis", what, figure);
    }
    let metrics = HttpClient::open(&gateway.admin).ask("GET", "/metrics", &[], "").body;
    let degraded = metrics.lines().find_map(|line| line.strip_prefix("tidegate_degraded_total{policy=\"local\"} "));
    let degraded: usize = degraded.expect("a count").parse().unwrap();
    assert!(degraded >= count, "{degraded} were decided without the store");
}

/// Alternates between a gateway on Redis and one in memory, each with one connection.
#[test]
fn latency_on_redis_is_recorded_beside_that_in_memory() {
    let (rounds, count) = (scale(1, 40), scale(20, 250));
    let (redis, upstream) = (Server::redis(), upstream());
    let limit = ["--limit", "10000000/h"];
    let url = upstream.url();
    let in_memory = GatewayProcess::start(&[&["--upstream", &url], &limit[..]].concat());
    let on_redis = GatewayProcess::start(&[&["--upstream", &url, "--store", &redis.url()], &limit[..]].concat());
    on_redis.until("/readyz", |answer| answer.status == 200);
    let mut clients = [in_memory.client(), on_redis.client()];
    // The median of all rounds is not affected by a round in which the machine was busy.
    let mut figures: [[Vec<f64>; 2]; 2] = Default::default();
    for _ in 0..rounds {
        for (client, [p50, p99]) in clients.iter_mut().zip(&mut figures) {
            let mut latencies: Vec<f64> = (0..count).map(|_| latency(client, "/")).collect();
            p50.push(percentile(&mut latencies, 50));
            p99.push(percentile(&mut latencies, 99));
        }
    }
    let [memory, redis] = figures.each_mut().map(|figures| figures.each_mut().map(|values| percentile(values, 50)));
    for (what, [p50, p99]) in [("in memory", memory), ("on Redis", redis)] {
        let figure = format!("p50 {p50:.0} us, p99 {p99:.0} us, medians of {rounds} rounds of {count} requests");
        record("gateway, Redis", what, figure);
    }
    record(
        "gateway, Redis",
        "added",
        format!("p50 {:.0} us, p99 {:.0} us", redis[0] - memory[0], redis[1] - memory[1]),
    );
}
