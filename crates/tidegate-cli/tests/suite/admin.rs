//! The admin listener: authentication, counters, rules, probes and metrics.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::collections::{BTreeMap, BTreeSet};

use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::{Serving, command};
use tidegate_testkit::server::{Brand, Config};

const RULES: &str = r#"
[plans.default]
limits = ["3/h"]
[plans.pro]
limits = ["30/h"]
[[keys]]
key = "planted-key-of-acme"
plan = "pro"
[[rules]]
name = "shorten"
match = { methods = ["POST"], path = "/shorten" }
by = ["ip"]
limits = [{ name = "main", limit = "2/h" }, { name = "day", limit = "100/day" }]
[[rules]]
name = "api"
match = { path = "/api/*" }
limits = "plan"
[[rules]]
name = "trial"
match = { path = "/shorten" }
by = ["ip"]
limits = ["1/h"]
mode = "shadow"
[[rules]]
name = "flood"
by = ["ip"]
limits = ["1000/h"]
store = "memory"
"#;

const POSTED: &str = r#"{"request":{"method":"POST","path":"/shorten","peer":"203.0.113.9"}}"#;

fn with_rules() -> (Serving, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES).unwrap();
    (Serving::start(&["--config", file.to_str().unwrap()]), dir)
}

#[test]
fn admin_requests_need_the_token() {
    let serving = Serving::start(&[]);
    for path in ["/v1/rules", "/v1/keys?key=a&limit=1/s", "/nothing/here", "/"] {
        let answer = serving.visit(path);
        assert_eq!(answer.status, 401, "{path}");
        assert_eq!(answer.headers["www-authenticate"], "Bearer realm=\"tidegate admin\"");
        assert!(answer.body.contains("needs a token: send the header Authorization: Bearer TOKEN"), "{}", answer.body);
    }
    let (wrong, missing) = ("the token in the header Authorization is wrong", "this request needs a token");
    for (said, message) in [
        ("Bearer a-token-for-tests-onlx", wrong),
        ("Bearer a-token-for-tests-onl", wrong),
        ("Bearer ", missing),
        ("Bearer", missing),
        ("a-token-for-tests-only", missing),
        ("Basic a-token-for-tests-only", missing),
    ] {
        let answer = HttpClient::open(&serving.admin).ask("GET", "/v1/rules", &[("authorization", said)], "");
        assert_eq!(answer.status, 401, "{said}");
        assert!(answer.body.contains(message), "{said}: {}", answer.body);
    }
    assert_eq!(serving.operate("GET", "/v1/rules").status, 200);
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(serving.visit(path).status, 200, "{path}");
    }
}

#[test]
fn an_unknown_request_is_refused_with_what_is_accepted() {
    let (serving, _dir) = with_rules();
    for (method, path, status, phrase) in [
        ("GET", "/v1/nothing", 404, "/v1/rules"),
        ("POST", "/v1/rules", 405, "GET"),
        ("PUT", "/v1/keys", 405, "DELETE"),
        ("GET", "/v1/reload", 405, "POST"),
        ("POST", "/metrics", 405, "GET"),
        ("GET", "/v1/keys", 409, "`redis_hash` in `[key_sources]`"),
        ("GET", "/v1/keys?limit=1/s", 400, "?key="),
        ("GET", "/v1/keys?key=a", 400, "unknown client; expected an address"),
        ("GET", "/v1/keys?key=a&limit=10/fortnight", 400, "us, ms, s, min"),
        ("GET", "/v1/keys?key=a&rule=shortn", 400, "shorten"),
        ("GET", "/v1/keys?key=user:a&rule=api", 400, "--plan NAME"),
        ("GET", "/v1/keys?key=user:a&rule=api&plan=gold", 400, "unknown plan; expected one of "),
        ("GET", "/v1/keys?key=user:a&rule=shorten", 400, "the rule counts by ip"),
        ("GET", "/v1/keys?key=192.0.2.1&rule=shorten&limit=week", 400, "expected one of day, main"),
        ("DELETE", "/v1/keys?kye=a", 400, "unknown parameter"),
    ] {
        let answer = serving.operate(method, path);
        assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
        assert!(answer.body.contains(phrase), "{method} {path}: {answer:?}");
        assert_eq!(status == 405, answer.headers.contains_key("allow"), "{answer:?}");
    }
    assert_eq!(serving.operate("POST", "/v1/reload").status, 200);
    let nothing = Serving::start(&[]);
    assert_eq!(nothing.operate("POST", "/v1/reload").status, 409);
}

#[test]
fn the_token_is_read_from_a_file_or_the_environment_and_never_printed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "planted-token-0123456789\n").unwrap();
    let serving = Serving::start_as(command(), &["--admin-token-file", file.to_str().unwrap()]);
    let bearer = [("authorization", "bearer planted-token-0123456789")];
    assert_eq!(HttpClient::open(&serving.admin).ask("GET", "/v1/rules", &bearer, "").status, 200);
    let command_line = std::fs::read_to_string(format!("/proc/{}/cmdline", serving.child.id())).unwrap();
    for place in [&serving.announced, &command_line] {
        assert!(!place.contains("planted-token"), "{place}");
    }
    std::fs::write(&file, "short").unwrap();
    let refused = command().args(["serve", "--admin-token-file", file.to_str().unwrap()]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("at least 16 characters"));
}

#[test]
fn without_a_token_one_is_generated_and_printed_once() {
    let serving = Serving::start_as(command(), &[]);
    let made = serving.announced.split("Bearer ").nth(1).unwrap().split('\'').next().unwrap().to_owned();
    let bearer = format!("Bearer {made}");
    assert_eq!(made.len(), 48);
    assert_eq!(HttpClient::open(&serving.admin).ask("GET", "/v1/rules", &[("authorization", &bearer)], "").status, 200);
    let other = Serving::start_as(command(), &[]);
    assert!(!other.announced.contains(&made));
}

#[test]
fn an_admin_listener_that_other_machines_can_reach_requires_a_configured_token() {
    let serve = ["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--admin"];
    let output = command().args(serve).arg("0.0.0.0:0").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).replace("\n", " ");
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("TIDEGATE_ADMIN_TOKEN") && said.contains("--admin-token-file"), "{said}");
    let mut chosen = command();
    chosen.env("TIDEGATE_ADMIN_TOKEN", "a-token-for-tests-only");
    let serving = Serving::start_as(chosen, &["--admin", "0.0.0.0:0"]);
    let port = serving.admin.rsplit(':').next().unwrap();
    let mut client = HttpClient::open(format!("127.0.0.1:{port}"));
    assert_eq!(client.ask("GET", "/healthz", &[], "").status, 200);
}

#[test]
fn counters_are_shown_and_reset_over_the_admin_api() {
    let (serving, _dir) = with_rules();
    let statuses: Vec<u16> = (0..3).map(|_| serving.check(POSTED).status).collect();
    assert_eq!(statuses, [200, 200, 429]);
    let seen = serving.operate("GET", "/v1/keys?key=ip:203.0.113.9&rule=shorten").body;
    assert!(seen.contains(r#""name":"main","limit":"2/h""#) && seen.contains(r#""remaining":0"#), "{seen}");
    assert!(seen.contains(r#""remaining":98"#), "two units of the day are charged: {seen}");
    let one = serving.operate("DELETE", "/v1/keys?key=ip%3A203.0.113.9&rule=shorten&limit=main");
    assert_eq!((one.status, one.body.as_str()), (200, r#"{"key":"ip:203.0.113.9","reset":true,"counters":1}"#));
    assert_eq!(serving.check(POSTED).status, 200);
    let plan = serving.operate("GET", "/v1/keys?key=ip:203.0.113.9&rule=api&plan=pro");
    assert!(plan.body.contains(r#""quota":30"#), "{plan:?}");

    let explicit = r#"{"key":"user:42","limit":"1/h"}"#;
    assert_eq!([serving.check(explicit).status, serving.check(explicit).status], [200, 429]);
    let seen = serving.operate("GET", "/v1/keys?key=user:42&limit=1/h");
    assert!(seen.body.contains(r#""remaining":0"#), "{seen:?}");
    let reset = || serving.operate("DELETE", "/v1/keys?key=user:42&limit=1/h").body;
    assert_eq!(reset(), r#"{"key":"user:42","reset":true,"counters":1}"#);
    assert_eq!(reset(), r#"{"key":"user:42","reset":false,"counters":0}"#);
    assert_eq!(serving.check(explicit).status, 200);
}

#[test]
fn rules_are_listed_with_their_decisions_and_without_keys() {
    let (serving, _dir) = with_rules();
    (0..3).for_each(|_| drop(serving.check(POSTED)));
    let rules = serving.operate("GET", "/v1/rules").body;
    for phrase in [
        r#""name":"shorten""#,
        r#""limits":{"default":[{"name":"api.per-hour","limit":"3/h"}],"pro":[{"name":"api.per-hour","limit":"30/h"}]}"#,
        r#"{"verdict":"deny","source":"store","mode":"enforce","times":1}"#,
        r#"{"verdict":"deny","source":"store","mode":"shadow","times":1}"#,
    ] {
        assert!(rules.contains(phrase), "{phrase}: {rules}");
    }
    assert!(!rules.contains("planted"), "{rules}");
}

/// Parses all samples of a metrics page in either format, by name and labels. Panics if the text is invalid or a family
/// is not declared.
fn samples(text: &str) -> BTreeMap<(String, BTreeMap<String, String>), f64> {
    let mut families: BTreeMap<&str, &str> = BTreeMap::new();
    let mut samples = BTreeMap::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line == "# EOF" {
            assert!(lines.peek().is_none(), "nothing follows the end marker");
            return samples;
        }
        if let Some(declared) = line.strip_prefix("# TYPE ") {
            let (name, kind) = declared.split_once(' ').unwrap();
            assert!(families.insert(name, kind).is_none(), "{name} is declared twice");
            continue;
        }
        if line.starts_with("# HELP ") || line.starts_with("# UNIT ") {
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("a sample: {line}"));
        let (name, labels) = match series.split_once('{') {
            Some((name, labels)) => (name, labels.strip_suffix('}').expect("a closing brace")),
            None => (series, ""),
        };
        let suffixes: &[&str] = match families.iter().find(|(family, _)| {
            name.strip_prefix(**family).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        }) {
            None => panic!("{name} is not declared"),
            Some(_) => &["", "_total", "_info", "_bucket", "_sum", "_count"],
        };
        let family = suffixes.iter().find_map(|suffix| families.get_key_value(name.strip_suffix(suffix)?));
        let (_, kind) = family.unwrap_or_else(|| panic!("{name} is not declared"));
        assert_eq!(*kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
        let label = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap();
            let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).expect("a quoted value");
            assert!(!value.contains(['"', '\\', '\n']), "{value}");
            (name.to_owned(), value.to_owned())
        };
        let labels = labels.split(',').filter(|pair| !pair.is_empty()).map(label).collect();
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("a number: {line}"));
        assert!(samples.insert((name.to_owned(), labels), value).is_none(), "twice: {line}");
    }
    samples
}

#[test]
fn every_metric_is_documented_and_every_documented_metric_exists() {
    let gateway = "[gateway]\nlisten = '127.0.0.1:0'\n[[upstreams]]\nname = 'web'\nservers = ['http://127.0.0.1:1']\n";
    let (serving, _dir) = with_text(&format!("{RULES}\n{gateway}"));
    let answer = serving.visit("/metrics");
    let told: BTreeSet<String> = samples(&answer.body).into_keys().map(|(name, _)| name).collect();
    let told: BTreeSet<&str> = told
        .iter()
        .map(|name| ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name))
        .collect();
    let page = include_str!("../../../../docs/metrics.md");
    let kinds = [" counter ", " gauge ", " histogram ", " info "];
    let is_metric = |line: &&str| line.split('|').nth(2).is_some_and(|kind| kinds.contains(&kind));
    // Tested with a cluster in `cluster.rs`.
    let is_present = |line: &&str| !line.contains("Only on a Redis Cluster");
    let documented = page
        .lines()
        .filter(is_metric)
        .filter(is_present)
        .filter_map(|line| line.strip_prefix("| `tidegate_")?.split('`').next());
    let documented: BTreeSet<String> = documented.map(|rest| format!("tidegate_{rest}")).collect();
    assert_eq!(documented.iter().map(String::as_str).collect::<BTreeSet<_>>(), told);
}

/// Starts an instance with these rules.
fn with_text(rules: &str) -> (Serving, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, rules).unwrap();
    (Serving::start(&["--config", file.to_str().unwrap()]), dir)
}

fn explained(serving: &Serving, method: &str, path: &str) -> String {
    let token = [("TIDEGATE_ADMIN_TOKEN", "a-token-for-tests-only")];
    let url = format!("http://{}", serving.admin);
    let output =
        command().envs(token).args(["explain", "--admin", &url, method, path, "--peer", "203.0.113.9"]).output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

/// Clients and operators see one name of a limit: in headers, bodies, explanations, and counters.
#[test]
fn a_limit_has_one_name_everywhere() {
    let (serving, _dir) = with_text(
        r#"
        [[rules]]
        name = "all"
        by = ["ip"]
        limits = ["100/h"]
        [[rules]]
        name = "search"
        match = { path = "/search" }
        by = ["ip"]
        limits = ["1/h"]
        "#,
    );
    let search = r#"{"request":{"method":"GET","path":"/search","peer":"203.0.113.9"}}"#;
    assert_eq!(serving.check(search).status, 200);
    let denied = serving.check(search);
    assert_eq!(denied.status, 429);
    assert!(denied.headers["ratelimit"].starts_with(r#""all.per-hour";r=99;"#), "{denied:?}");
    assert!(denied.headers["ratelimit-policy"].contains(r#""search.per-hour";q=1;w=3600"#), "{denied:?}");
    assert!(denied.body.contains(r#"{"name":"search.per-hour","rule":"search","quota":1,"#), "{denied:?}");
    let explained = explained(&serving, "GET", "/search");
    assert!(explained.contains("verdict  refused: search.per-hour of rule search denies it for "), "{explained}");
    assert!(explained.contains("  all.per-hour: 100/h, 99 left\n"), "{explained}");
    for name in ["search.per-hour", "per-hour"] {
        let path = format!("/v1/keys?key=ip:203.0.113.9&rule=search&limit={name}");
        let seen = serving.operate("GET", &path);
        assert!(
            seen.body.contains(r#""name":"search.per-hour""#) && seen.body.contains(r#""remaining":0"#),
            "{seen:?}"
        );
        assert_eq!(serving.operate("DELETE", &path).status, 200);
        assert_eq!(serving.check(search).status, 200, "{name} was reset");
    }
}

#[test]
fn a_shield_is_explained_inspected_and_reset_in_its_instance() {
    let (serving, _dir) = with_text("[[rules]]\nname = 'flood'\nstore = 'memory'\nlimits = ['2/h']\n");
    let request = r#"{"request":{"method":"GET","path":"/","peer":"203.0.113.9"}}"#;
    let counter = "/v1/keys?key=ip:203.0.113.9&rule=flood";
    assert!(explained(&serving, "GET", "/").contains("verdict  allowed: every limit has room\n"));
    assert!(serving.operate("GET", counter).body.contains(r#""remaining":2"#));
    for status in [200, 200, 429] {
        assert_eq!(serving.check(request).status, status);
    }
    let refused = explained(&serving, "GET", "/");
    assert!(refused.contains("verdict  refused: per-hour of rule flood denies it for "), "{refused}");
    assert!(refused.contains("per-hour: 2/h, 0 left: denied for "), "{refused}");
    let seen = serving.operate("GET", counter);
    assert!(seen.body.contains(r#""remaining":0"#) && seen.body.contains(r#""rule":"flood""#), "{seen:?}");
    assert_eq!(serving.operate("DELETE", counter).status, 200);
    assert_eq!(serving.check(request).status, 200, "the counter was reset");
}

/// Prometheus asks for OpenMetrics. A client that does not gets the older text format, which `promtool` reads.
#[test]
fn metrics_are_the_same_in_both_formats() {
    let (serving, _dir) = with_rules();
    let scrape = |accept: &str| {
        let answer = HttpClient::open(&serving.admin).ask("GET", "/metrics", &[("accept", accept)], "");
        let series: BTreeSet<_> = samples(&answer.body).into_keys().collect();
        (answer.headers["content-type"].clone(), answer.body, series)
    };
    let (content_type, open_metrics, series) = scrape("application/openmetrics-text;version=1.0.0,text/plain;q=0.5");
    assert_eq!(content_type, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert!(open_metrics.contains("# TYPE tidegate_decisions counter\n") && open_metrics.ends_with("\n# EOF\n"));
    let (content_type, text, same_series) = scrape("*/*");
    assert_eq!(content_type, "text/plain; version=0.0.4; charset=utf-8");
    assert!(text.contains("# TYPE tidegate_decisions_total counter\n") && !text.contains("# EOF"), "{text}");
    assert_eq!(same_series, series);
}

#[test]
fn memory_of_shield_rules_is_reported_separately() {
    let (serving, _dir) = with_rules();
    let memory = |what: &str, kind: &str| {
        let samples = samples(&serving.visit("/metrics").body);
        samples[&(format!("tidegate_memory_{what}"), [("kind".to_owned(), kind.to_owned())].into())]
    };
    let before = (memory("bytes", "limits"), memory("bytes", "shield"));
    assert_eq!((memory("keys", "limits"), memory("keys", "shield")), (0.0, 0.0));
    for host in 1..=200 {
        serving.check(&format!(r#"{{"request":{{"method":"GET","path":"/","peer":"203.0.113.{host}"}}}}"#));
    }
    assert_eq!((memory("keys", "limits"), memory("keys", "shield")), (0.0, 200.0));
    assert_eq!((memory("overflow_keys", "limits"), memory("overflow_keys", "shield")), (0.0, 0.0));
    assert!(memory("bytes", "limits") == before.0 && memory("bytes", "shield") > before.1, "{before:?}");
}

#[test]
fn memory_for_counters_is_set_by_an_option() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES).unwrap();
    let serving = Serving::start(&["--memory", "64MiB", "--config", file.to_str().unwrap()]);
    let samples = samples(&serving.visit("/metrics").body);
    let max =
        |kind: &str| samples[&("tidegate_memory_max_bytes".to_owned(), [("kind".to_owned(), kind.to_owned())].into())];
    assert_eq!((max("limits"), max("shield")), (f64::from(48 << 20), f64::from(16 << 20)));
    let refused = command().args(["serve", "--memory", "lots"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("such as 512MiB"));
}

/// Each request and each decision is counted once, in the series of its listener and its source.
#[test]
fn requests_and_decisions_are_timed_by_listener_and_source() {
    let (serving, _dir) = with_rules();
    (0..5).for_each(|_| drop(serving.check(POSTED)));
    (0..3).for_each(|_| drop(serving.check(r#"{"key":"user:42","limit":"2/h"}"#)));
    let mut connection = serving.connect();
    (0..7).for_each(|_| drop(connection.call(&["TIDEGATE.CHECK", "user:42", "2/h"]).unwrap()));
    serving.visit("/readyz");
    let samples = samples(&serving.visit("/metrics").body);
    let count = |metric: &str, label: &str, value: &str| {
        samples[&(format!("tidegate_{metric}_seconds_count"), [(label.to_owned(), value.to_owned())].into())]
    };
    assert_eq!([count("request", "listener", "http"), count("request", "listener", "resp")], [8.0, 7.0]);
    assert!(count("request", "listener", "admin") >= 1.0);
    assert_eq!(count("decision", "source", "store"), 15.0);
    let bound = |bound: &str| {
        let labels = [("source".to_owned(), "store".to_owned()), ("le".to_owned(), bound.to_owned())];
        samples[&("tidegate_decision_seconds_bucket".to_owned(), labels.into())]
    };
    assert!(bound("0.00001") <= bound("1.0") && bound("+Inf") == 15.0);
}

#[test]
fn decisions_are_counted_exactly_and_metrics_do_not_identify_callers() {
    let (serving, _dir) = with_rules();
    (0..5).for_each(|_| drop(serving.check(POSTED)));
    (0..3).for_each(|_| drop(serving.check(r#"{"key":"planted-caller","limit":"2/h"}"#)));
    let keyed = r#"{"request":{"method":"GET","path":"/api/x","headers":{"x-api-key":"planted-key-of-acme"},"peer":"203.0.113.9"}}"#;
    serving.check(keyed);
    let text = serving.visit("/metrics").body;
    for caller in ["planted", "203.0.113", "acme"] {
        assert!(!text.contains(caller), "{text}");
    }
    let samples = samples(&text);
    let decisions = |rule: &str, verdict: &str, mode: &str| {
        let labels = [("rule", rule), ("verdict", verdict), ("source", "store"), ("mode", mode)];
        let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned()));
        samples[&("tidegate_decisions_total".to_owned(), labels.into())]
    };
    assert_eq!([decisions("shorten", "allow", "enforce"), decisions("shorten", "deny", "enforce")], [2.0, 3.0]);
    assert_eq!([decisions("trial", "allow", "shadow"), decisions("trial", "deny", "shadow")], [1.0, 1.0]);
    assert_eq!([decisions("api", "allow", "enforce"), decisions("", "allow", "enforce")], [1.0, 2.0]);
    assert_eq!(decisions("", "deny", "enforce"), 1.0);
}

#[test]
fn a_store_that_evicts_counters_is_reported_as_degraded_until_it_stops() {
    let redis = Config::new(Brand::Redis).set("maxmemory-policy", "allkeys-lru").start();
    let serving = Serving::start(&["--store", &redis.url()]);
    // Degraded, but ready, since the store answers.
    serving.until("/readyz", |answer| answer.status == 200 && answer.body.contains("maxmemory-policy is allkeys-lru"));
    assert!(serving.visit("/metrics").body.contains("tidegate_store_evicts 1\n"));
    redis.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    serving.until("/metrics", |answer| answer.body.contains("tidegate_store_evicts 0\n"));
    assert!(serving.visit("/readyz").body.contains("\"degraded\":[]"));
    // Keys were evicted, whatever the policy is afterwards.
    redis.command(&["SET", "victim", "1"]);
    redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-random"]);
    redis.command(&["CONFIG", "SET", "maxmemory", "1"]);
    redis.command(&["CONFIG", "SET", "maxmemory", "0"]);
    redis.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    serving.until("/readyz", |answer| answer.body.contains("the store evicts keys"));
    let evicted = samples(&serving.visit("/metrics").body)[&("tidegate_store_evicted_keys".to_owned(), [].into())];
    assert!(evicted >= 1.0, "{evicted}");
}
