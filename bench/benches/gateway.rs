//! The CPU time per response of `tollgate gateway`, of a bare proxy on hyper, and of nginx, in front of the same upstream.
//!
//! ```text
//! cargo bench -p tollgate-bench --bench gateway
//! ```
//!
//! `TOLLGATE_BENCH_ROUNDS` sets the number of rounds, `TOLLGATE_BENCH_ANSWERS` the number of responses in a round.
//!
//! The bare proxy forwards every request with its headers, or refuses every request with an empty 429. It has no limiter,
//! no timeouts and no validation: it is what a proxy on hyper costs at least. It and the upstream are this program, started
//! again. Each server has one thread that serves connections.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::{Arc, Mutex};

use http::{Request, Response, StatusCode};
use http_body_util::Either;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tollgate_bench::endpoint::{Load, Process, Protocol, RequestSource, free_addr, tollgate_binary};
use tollgate_bench::measure::{median, print_table, setting};

const CONNECTIONS: usize = 8;

/// A request as a browser sends it.
const REQUEST: &[u8] =
    b"GET /api/items?page=2 HTTP/1.1\r\nhost: www.example.com\r\nuser-agent: Mozilla/5.0 (X11; Linux x86_64)\r\n\
    accept: text/html,application/json\r\naccept-language: en-US,en;q=0.5\r\naccept-encoding: gzip, deflate, br\r\n\
    cookie: session=0123456789abcdef\r\n\r\n";

type Body = Either<Incoming, Full<Bytes>>;

/// Idle connections of the bare proxy.
type Pool = Arc<Mutex<Vec<SendRequest<Incoming>>>>;

async fn forward(request: Request<Incoming>, upstream: SocketAddr, pool: Pool) -> Result<Response<Body>, hyper::Error> {
    let idle = pool.lock().expect("no panic").pop();
    let mut sender = match idle {
        Some(sender) => sender,
        None => {
            let stream = TcpStream::connect(upstream).await.expect("the upstream listens");
            let _ = stream.set_nodelay(true);
            let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            sender
        }
    };
    sender.ready().await?;
    let response = sender.send_request(request).await?;
    // The body is in the buffer of the connection already: it is short.
    pool.lock().expect("no panic").push(sender);
    Ok(response.map(Either::Left))
}

fn refuse() -> Response<Body> {
    let mut response = Response::new(Either::Right(Full::new(Bytes::from_static(b"{\"error\":\"rate_limited\"}"))));
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    response
}

/// Runs the bare proxy, or the upstream, on one thread.
fn run(role: &str, address: &str, upstream: Option<SocketAddr>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let role = role.to_owned();
    runtime.block_on(async move {
        let socket = TcpListener::bind(address).await.expect("a free port");
        let pool = Pool::default();
        while let Ok((stream, _)) = socket.accept().await {
            let _ = stream.set_nodelay(true);
            let (pool, role) = (pool.clone(), role.clone());
            tokio::spawn(async move {
                let io = TokioIo::new(stream);
                let builder = hyper::server::conn::http1::Builder::new();
                let _ = match (role.as_str(), upstream) {
                    ("proxy", Some(upstream)) => {
                        let service = service_fn(move |request| forward(request, upstream, pool.clone()));
                        builder.serve_connection(io, service).await
                    }
                    ("refuse", _) => {
                        let service = service_fn(|_| async { Ok::<_, Infallible>(refuse()) });
                        builder.serve_connection(io, service).await
                    }
                    _ => {
                        let hello = || Response::new(Full::new(Bytes::from_static(b"hello from the upstream")));
                        let service = service_fn(move |_| async move { Ok::<_, Infallible>(hello()) });
                        builder.serve_connection(io, service).await
                    }
                };
            });
        }
    });
}

/// Starts this program in a role.
fn start(role: &str, upstream: Option<SocketAddr>) -> Process {
    let address = free_addr();
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.args(["role", role, &address.to_string()]).args(upstream.map(|upstream| upstream.to_string()));
    Process::start(&mut command, address)
}

fn gateway(upstream: SocketAddr, limit: &str) -> Process {
    let address = free_addr();
    let mut command = Command::new(tollgate_binary());
    command.args(["gateway", "--admin", "off", "--threads", "1", "--upstream", &format!("http://{upstream}")]);
    command.args(["--listen", &address.to_string(), "--limit", limit]);
    Process::start(&mut command, address)
}

/// Starts nginx with `proxy_pass` and keep-alive to the upstream, and with this rate of `limit_req`.
fn nginx(upstream: SocketAddr, rate: &str, dir: &std::path::Path) -> Option<Process> {
    let address = free_addr();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary = temporary.map(|what| format!("{what}_temp_path {what};\n")).concat();
    let config = format!(
        "daemon off; master_process off; pid pid; error_log /dev/null crit;\nevents {{ }}\nhttp {{ access_log off;\n{temporary}\
         keepalive_requests 100000000;\nlimit_req_zone $binary_remote_addr zone=z:1m rate={rate};\nlimit_req_status 429;\n\
         upstream u {{ server {upstream}; keepalive 64; keepalive_requests 100000000; }}\n\
         server {{ listen {address}; location / {{ limit_req zone=z burst=10000000 nodelay; proxy_pass http://u;\n\
         proxy_http_version 1.1; proxy_set_header Connection ''; proxy_set_header Host $host; }} }} }}\n"
    );
    let config = if rate == "1r/m" { config.replace(" burst=10000000 nodelay", "") } else { config };
    std::fs::create_dir_all(dir).expect("a directory");
    std::fs::write(dir.join("nginx.conf"), config).expect("a file");
    let binary = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools/bin/nginx");
    let mut command = Command::new(if binary.exists() { binary } else { "nginx".into() });
    command.arg("-p").arg(dir).args(["-c", "nginx.conf", "-e", "/dev/null"]);
    command.current_dir(dir);
    command.arg("-t").output().ok().filter(|output| output.status.success())?;
    let mut command = Command::new(command.get_program());
    command.arg("-p").arg(dir).args(["-c", "nginx.conf", "-e", "/dev/null"]).current_dir(dir);
    Some(Process::start(&mut command, address))
}

/// Measures the processes, one after the other in each round, and prints a table.
fn measure(title: &str, processes: &[(&str, Process)]) {
    let (rounds, count) = (setting("TOLLGATE_BENCH_ROUNDS", 9), setting("TOLLGATE_BENCH_ANSWERS", 40_000));
    let write = |_: u64, buffer: &mut Vec<u8>| buffer.extend_from_slice(REQUEST);
    let mut source = RequestSource { protocol: Protocol::Http, write: Box::new(write) };
    let mut samples = vec![(Vec::new(), Vec::new()); processes.len()];
    for round in 0..=rounds {
        let mut first = 0.0;
        for ((_, process), (times, ratios)) in processes.iter().zip(&mut samples) {
            let mut load = Load::new(process.addr, CONNECTIONS, 0);
            load.run(&mut source, 1, 100);
            let before = process.cpu_seconds();
            let responses = load.run(&mut source, 1, count);
            let us = (process.cpu_seconds() - before) * 1e6 / responses as f64;
            first = if first == 0.0 { us } else { first };
            // Round 0 is for warming up.
            if round > 0 {
                times.push(us);
                ratios.push(first / us);
            }
        }
    }
    println!("\n{title}, median of {rounds} rounds");
    let rows: Vec<Vec<String>> = processes
        .iter()
        .zip(samples)
        .map(|((name, _), (times, ratios))| {
            vec![(*name).to_owned(), format!("{:.1} µs", median(times)), format!("{:.2}×", median(ratios))]
        })
        .collect();
    print_table(&["", "CPU per response", "speed"], &rows);
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, word, role, address, upstream @ ..] = &arguments[..]
        && word == "role"
    {
        return run(role, address, upstream.first().map(|upstream| upstream.parse().expect("an address")));
    }
    let upstream = start("upstream", None);
    let dir = std::env::temp_dir().join(format!("tollgate-bench-gateway-{}", std::process::id()));
    let mut admitting = vec![
        ("bare proxy on hyper", start("proxy", Some(upstream.addr))),
        ("tollgate gateway", gateway(upstream.addr, "10000000/s token-bucket")),
    ];
    let mut refusing = vec![
        ("bare refusal on hyper", start("refuse", None)),
        ("tollgate gateway", gateway(upstream.addr, "1/day token-bucket")),
    ];
    admitting
        .extend(nginx(upstream.addr, "1000000r/s", &dir.join("admit")).map(|process| ("nginx, limit_req", process)));
    refusing.extend(nginx(upstream.addr, "1r/m", &dir.join("refuse")).map(|process| ("nginx, limit_req", process)));
    measure("Forwarding", &admitting);
    measure("Refusing", &refusing);
    drop((admitting, refusing));
    let _ = std::fs::remove_dir_all(dir);
}
