//! CPU time of refused requests with large or hostile paths, headers and bodies, compared with a plain request.
//!
//! `crates/tidegate/src/engine/tests.rs` shows by counting that a refusal by address or shield normalizes no path. Here
//! the verdicts are asserted and the times recorded. The times include reading the request, and 64 KiB are not free. So
//! each is compared with a plain request, and with one that is padded to the same size with spaces.

use serde_json::json;

use crate::campaign::{record, scale};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::Serving;

const SCENARIO: &str = "refusals";
const RULES: &str = r#"
exempt = { paths = ["/health"] }

[[bans]]
by = "ip"
value = "198.51.100.0/24"

[[rules]]
name = "shield"
store = "memory"
limits = ["1/day"]

[[rules]]
name = "login"
match = { path = "/login" }
by = ["ip", "path"]
limits = ["1000/day"]
"#;

/// Returns the CPU time of all threads of the process, in nanoseconds.
fn cpu_ns(serving: &Serving) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", serving.child.id())).unwrap();
    let task_ns = |task: std::io::Result<std::fs::DirEntry>| -> Option<u64> {
        let stat = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse().ok()
    };
    tasks.filter_map(task_ns).sum()
}

/// Returns the body of a check by rules for a described request.
fn described(path: &str, headers: serde_json::Value, peer: &str) -> String {
    json!({ "request": { "method": "POST", "path": path, "headers": headers, "peer": peer } }).to_string()
}

#[test]
fn hostile_requests_are_refused_and_their_cpu_time_is_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    let bans: String =
        (0..10_000_u32).map(|n| format!("[[bans]]\nby = 'ip'\nvalue = '10.{}.{}.0/24'\n", n / 256, n % 256)).collect();
    std::fs::write(&file, format!("{RULES}{bans}")).unwrap();
    let serving = Serving::start(&["--config", file.to_str().unwrap(), "--threads", "1"]);

    let slashes = |bytes: usize| format!("/{}", ";/".repeat(bytes / 2 - 1));
    let hostile = format!("/{}", "..;%2F/".repeat(1_100));
    let many: serde_json::Map<_, _> = (0..40_000).map(|n| (format!("{n:x}"), "".into())).collect();
    let most: Vec<_> = (0..256).map(|n| [format!("x-header-{n}"), "a value".repeat(8)]).collect();
    let (banned, shielded) = ("198.51.100.7", "203.0.113.9");
    let cases = [
        ("banned, plain", 403, described("/login", json!({}), banned)),
        ("banned, 64 KB of ;/", 403, described(&slashes(64_000), json!({}), banned)),
        ("banned, 8 KB to normalise", 403, described(&hostile, json!({}), banned)),
        ("banned, 256 headers", 403, described("/login", json!(most), banned)),
        ("shield, plain", 429, described("/login", json!({}), shielded)),
        ("shield, 8 KB of ;/", 429, described(&slashes(8_192), json!({}), shielded)),
        ("shield, 8 KB to normalise", 429, described(&hostile, json!({}), shielded)),
        ("too long, 64 KB of ;/", 414, described(&slashes(64_000), json!({}), shielded)),
        ("40,000 headers", 400, described("/login", json!(many), shielded)),
        ("19,000 checks", 400, format!("{{\"checks\":[{}]}}", vec![r#"{"key":"a","limit":"1/s"}"#; 19_000].join(","))),
        ("500 KB of [", 400, "[".repeat(500_000)),
    ];
    assert_eq!(serving.check(&described("/login", json!({}), shielded)).status, 200, "the shield admits one request");
    let cpu_ns_of = |what: &str, status: u16, body: &str| {
        let mut client = HttpClient::open(&serving.http);
        let mut refuse = |count: u64| {
            for _ in 0..count {
                let answer = client.ask("POST", "/v1/check", &[], body);
                assert_eq!(answer.status, status, "{what}: {answer:?}");
            }
        };
        refuse(scale(2, 50));
        let (count, before) = (scale(20, 2_000), cpu_ns(&serving));
        refuse(count);
        ((cpu_ns(&serving) - before) / count).max(1)
    };
    let plain_body = &cases[0].2;
    let plain = cpu_ns_of("plain", 403, plain_body);
    for (what, status, body) in &cases {
        let padded = " ".repeat(body.len().saturating_sub(plain_body.len())) + plain_body;
        let (ns, padded) = (cpu_ns_of(what, *status, body), cpu_ns_of("padded", 403, &padded));
        let (times_plain, times_padded) = (ns as f64 / plain as f64, ns as f64 / padded as f64);
        let figure = format!(
            "{} us of CPU, {times_plain:.1} times plain, {times_padded:.1} times plain of that size",
            ns / 1_000
        );
        record(SCENARIO, what, figure);
    }
}
