//! Upstreams and settings of the gateway in a configuration file.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tidegate_testkit::poll::eventually;

use tidegate_testkit::http::HttpClient;
use tidegate_testkit::http::upstream::Upstream;
use tidegate_testkit::http::upstream::ok;
use tidegate_testkit::program::GatewayProcess;
use tidegate_testkit::program::{Serving, command};

/// Starts a server whose responses are its name.
fn named(name: &'static str) -> Upstream {
    Upstream::start(move |_, stream| ok(stream, "", name.as_bytes()))
}

const RULE: &str = "[[rules]]\nname = 'all'\nlimits = ['100000/h']\n";

#[test]
fn requests_are_routed_by_host_and_path() {
    let [web, api, v2, eu] = ["web", "api", "v2", "eu"].map(named);
    let configuration = format!(
        "{RULE}[[upstreams]]\nname = 'web'\nservers = '{}'\n\
         [[upstreams]]\nname = 'api'\nservers = ['{}']\nmatch = {{ path = '/api' }}\n\
         [[upstreams]]\nname = 'v2'\nservers = ['{}']\nmatch = {{ path = '/api/v2' }}\n\
         [[upstreams]]\nname = 'eu'\nservers = ['{}']\nmatch = {{ host = ['*.eu.test'] }}\npreserve_host = false\n",
        web.url(),
        api.url(),
        v2.url(),
        eu.url()
    );
    let gateway = GatewayProcess::configured(&configuration, &[]);
    let ask = |host: &str, path: &str| {
        let mut client = gateway.client();
        client.raw(format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n").as_bytes());
        client.receive().unwrap().body
    };
    for (host, path, expected) in [
        ("a.test", "/", "web"),
        ("a.test", "/apiary", "web"),
        ("a.test", "/api?x=/api/v2", "api"),
        ("a.test", "/api/v2/x", "v2"),
        ("a.test:80", "/x/../api/v2/", "v2"),
        ("www.eu.test", "/api", "eu"),
    ] {
        assert_eq!(ask(host, path), expected, "{host}{path}");
    }
    assert_eq!(v2.last().path(), "/x/../api/v2/", "the path is forwarded as it was sent");
    assert_eq!(eu.last().header("host"), Some(eu.address.to_string().as_str()));
    assert_eq!(eu.last().header("x-forwarded-host"), Some("www.eu.test"));
}

#[test]
fn without_a_route_there_is_404() {
    let api = named("api");
    let upstream = format!("[[upstreams]]\nname = 'api'\nservers = ['{}']\nmatch = {{ path = '/api' }}\n", api.url());
    let gateway = GatewayProcess::configured(&upstream, &[]);
    let answer = gateway.get("/other");
    assert_eq!(answer.status, 404);
    assert!(answer.body.contains(r#""error":"no_upstream""#), "{answer:?}");
    assert_eq!(gateway.get("/api").status, 200);
}

/// Clients send requests without a pause while the configuration is replaced.
#[test]
fn a_reload_replaces_upstreams_without_a_failed_request() {
    let [first, second] = ["first", "second"].map(named);
    let of = |upstream: &Upstream| format!("{RULE}[[upstreams]]\nname = 'web'\nservers = ['{}']\n", upstream.url());
    let gateway = GatewayProcess::configured(&of(&first), &[]);
    let (is_done, sent, failed) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut client = gateway.client();
                while !is_done.load(Ordering::SeqCst) {
                    let answer = client.ask("POST", "/", &[], "body");
                    failed.fetch_add(usize::from(answer.status != 200), Ordering::SeqCst);
                    sent.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for upstream in [&second, &first, &second] {
            let before = sent.load(Ordering::SeqCst);
            eventually("requests are sent", || sent.load(Ordering::SeqCst), |count| *count > before + 50);
            std::fs::write(gateway.file(), of(upstream)).unwrap();
            assert_eq!(gateway.operate("POST", "/v1/reload").status, 200);
        }
        let before = second.requests().len();
        eventually("the new upstream is used", || second.requests().len(), |count| *count > before + 50);
        is_done.store(true, Ordering::SeqCst);
    });
    assert_eq!(failed.load(Ordering::SeqCst), 0, "of {} requests", sent.load(Ordering::SeqCst));

    std::fs::write(gateway.file(), "[[upstreams]]\nname = 'web'\nservers = ['http://user:planted@host']\n").unwrap();
    let answer = gateway.operate("POST", "/v1/reload");
    assert_eq!(answer.status, 422);
    assert!(answer.body.contains("invalid-upstream") && !answer.body.contains("planted"), "{answer:?}");
    std::fs::write(gateway.file(), RULE).unwrap();
    let answer = gateway.operate("POST", "/v1/reload");
    assert!(answer.body.contains("upstreams-gone"), "{answer:?}");
    assert_eq!(gateway.get("/").body, "second", "the old upstreams stay");
}

#[test]
fn serve_and_gateway_run_in_one_process_from_one_file() {
    let upstream = named("web");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    let limit = "[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['2/h']\n";
    let text = format!(
        "{limit}[gateway]\nlisten = '127.0.0.1:0'\n[[upstreams]]\nname = 'web'\nservers = ['{}']\n",
        upstream.url()
    );
    std::fs::write(&file, text).unwrap();
    let serving = Serving::start(&["--config", file.to_str().unwrap()]);
    let line =
        serving.announced.lines().find(|line| line.trim_start().starts_with("gateway")).expect("it is announced");
    let address = line.split_whitespace().nth(1).unwrap();
    assert_eq!(HttpClient::open(address).ask("GET", "/", &[], "").body, "web");
    // The service decides by the same counters.
    let check =
        |peer: &str| serving.check(&format!(r#"{{"request":{{"method":"GET","path":"/","peer":"{peer}"}}}}"#)).status;
    assert_eq!((check("127.0.0.1"), check("127.0.0.1"), check("203.0.113.9")), (200, 429, 200));
    assert_eq!(HttpClient::open(address).ask("GET", "/", &[], "").status, 429);
    assert!(serving.visit("/metrics").body.contains("tidegate_connections_accepted_total{listener=\"gateway\"} 2\n"));
}

#[test]
fn serve_reports_upstreams_that_no_gateway_uses() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, format!("{RULE}[[upstreams]]\nname = 'web'\nservers = ['http://127.0.0.1:1']\n")).unwrap();
    let serving = Serving::start(&["--config", file.to_str().unwrap()]);
    serving.wait_for_log("the configuration has [[upstreams]], but no gateway listens");
}

#[test]
fn invalid_settings_are_reported_with_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    let server = "servers = ['http://127.0.0.1:1']";
    for (text, code, underlined) in [
        ("[gateway]\nlisten = '127.0.0.1:8000'".to_owned(), "no-upstream", "'127.0.0.1:8000'"),
        ("[gateway]\nlisten = '8000'".to_owned(), "invalid-value", "'8000'"),
        ("[[upstreams]]\nname = 'a'\nservers = []".to_owned(), "invalid-upstream", "[]"),
        ("[[upstreams]]\nname = 'a'\nservers = ['ftp://x']".to_owned(), "invalid-upstream", "'ftp://x'"),
        (format!("[[upstreams]]\nname = 'a'\n{server}\nca_file = 'x.pem'"), "invalid-upstream", "'x.pem'"),
        (
            "[[upstreams]]\nname = 'a'\nservers = ['https://x']\nca_file = 'x.pem'".to_owned(),
            "file-unreadable",
            "'x.pem'",
        ),
        (
            format!(
                "[[upstreams]]\nname = 'a'\n{server}\n[[upstreams]]\nname = 'a'\n{server}\nmatch = {{ path = '/a' }}"
            ),
            "duplicate-upstream",
            "'a'",
        ),
        (format!("[[upstreams]]\nname = 'a'\n{server}\n[[upstreams]]\nname = 'b'\n{server}"), "duplicate-route", "'b'"),
        (format!("[[upstreams]]\nname = 'a'\n{server}\nmax_concurent = 5"), "unknown-field", "max_concurent"),
        (format!("[[upstreams]]\nname = 'a'\n{server}\nmax_concurrent = 0"), "invalid-value", "0"),
        (format!("[[upstreams]]\nname = 'a'\n{server}\ntimeouts = {{ header = 'soon' }}"), "invalid-time", "'soon'"),
        (format!("[[upstreams]]\nname = 'a'\n{server}\nmatch = {{ path = '/a/*' }}"), "invalid-path", "'/a/*'"),
        (format!("[[upstreams]]\nname = 'a'\n{server}\nmatch = {{ host = 'a:80' }}"), "invalid-host", "'a:80'"),
    ] {
        std::fs::write(&file, &text).unwrap();
        let output = command().args(["validate", "--json"]).arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}: {said}");
        let report: serde_json::Value = serde_json::from_str(&said).unwrap();
        let findings = report["findings"].as_array().unwrap();
        let finding = findings.iter().find(|finding| finding["code"] == code);
        let finding = finding.unwrap_or_else(|| panic!("{code} is not found: {said}"));
        let line = finding["line"].as_u64().unwrap_or_else(|| panic!("{said}")) as usize;
        assert!(text.lines().nth(line - 1).unwrap().contains(underlined), "{code}: line {line} of {text}");
    }
}

#[test]
fn upstreams_are_given_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, "[[upstreams]]\nname = 'web'\nservers = ['http://127.0.0.1:1']\n").unwrap();
    let output = tidegate_testkit::program::ended(
        command()
            .args(["gateway", "--upstream", "http://127.0.0.1:2", "--listen", "127.0.0.1:0", "--config"])
            .arg(&file),
    );
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("upstreams are given both by --upstream"), "{said}");
}

#[test]
fn the_access_log_has_the_decision_and_the_upstream() {
    let upstream = named("web");
    let of = |settings: &str| {
        let url = upstream.url();
        format!(
            "{settings}\n[[rules]]\nname = 'two'\nby = ['ip']\nlimits = ['2/h']\n[[upstreams]]\nname = 'web'\nservers = ['{url}']\n"
        )
    };
    let lines = |settings: &str| {
        let gateway = GatewayProcess::configured(&of(settings), &[]);
        let mut client = gateway.client();
        let headers = [("user-agent", "a \"test\""), ("referer", "https://planted.example/")];
        (0..3).for_each(|number| drop(client.ask("GET", &format!("/{number}?q=planted"), &headers, "")));
        let lines = |text: &str| text.lines().filter(|line| line.contains("HTTP/1.1")).map(str::to_owned).collect();
        eventually("three lines", || lines(&gateway.output()), |lines: &Vec<String>| lines.len() == 3)
    };
    let json = lines("[gateway]\naccess_log = 'json'");
    let entry: serde_json::Value = serde_json::from_str(&json[0]).unwrap();
    let expected = serde_json::json!({
        "client": "127.0.0.1", "method": "GET", "host": "x", "path": "/0?q=planted", "status": 200, "bytes": 3,
        "decision": "allow", "rule": "two", "upstream": "web", "user_agent": "a \"test\"",
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&entry[name], value, "{name}: {entry}");
    }
    assert!(entry["upstream_ms"].as_f64().unwrap() > 0.0 && entry["duration_ms"].as_f64().unwrap() > 0.0, "{entry}");
    let refused: serde_json::Value = serde_json::from_str(&json[2]).unwrap();
    assert_eq!(
        (&refused["status"], &refused["decision"], &refused["rule"]),
        (&429.into(), &"rate_limited".into(), &"two".into())
    );
    assert!(refused["upstream"].is_null(), "{refused}");

    let combined = lines("[gateway]\naccess_log = 'combined'");
    assert!(combined[0].starts_with("127.0.0.1 - - ["), "{combined:?}");
    let expected = "\"GET /0?q=planted HTTP/1.1\" 200 3 \"https://planted.example/\" \"a \\x22test\\x22\" decision=allow rule=two upstream=web ";
    assert!(combined[0].contains(expected), "{combined:?}");

    let anonymous = lines("anonymize = true\n[gateway]\naccess_log = 'json'");
    assert!(anonymous.iter().all(|line| !line.contains("127.0.0.1") && !line.contains("planted")), "{anonymous:?}");
    assert!(anonymous[0].contains("\"client\":\"~"), "{anonymous:?}");
}

/// The response of the upstream decides, and so do responses of the gateway itself, which are failures.
#[test]
fn charges_by_outcome_follow_the_upstream() {
    let mut upstream = Upstream::start(|request, stream| {
        let status = request.path()[1..].to_owned();
        stream.write_all(format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n").as_bytes()).is_ok()
    });
    let configuration = format!(
        "[[rules]]\nname = 'failures'\nby = ['ip']\nlimits = ['3/h']\ncharge = 'on_failure'\n[[upstreams]]\nname = 'web'\nservers = ['{}']\n",
        upstream.url()
    );
    let gateway = GatewayProcess::configured(&configuration, &[]);
    for (path, remaining) in [("/200", "3"), ("/401", "2"), ("/204", "2"), ("/500", "1"), ("/304", "1")] {
        let answer = gateway.get(path);
        assert_eq!(answer.headers["x-ratelimit-remaining"], remaining, "{path}: {answer:?}");
    }
    upstream.stop();
    let answer = gateway.get("/200");
    assert_eq!((answer.status, answer.headers["x-ratelimit-remaining"].as_str()), (502, "0"), "{answer:?}");
    assert_eq!(gateway.get("/200").status, 429);
}
