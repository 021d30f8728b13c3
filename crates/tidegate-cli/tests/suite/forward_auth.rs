//! nginx, Caddy and Traefik ask the real binary about each request.
//!
//! The proxies run with the files in `ops/`, in which only addresses are replaced. Visitors connect from addresses of
//! 127.0.0.0/8, so that a proxy sees several. The application behind the proxies is a thread of the test.

mod application;
mod proxy;

use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;
use tidegate_testkit::server::free_port;

use self::application::Application;
use self::proxy::{Kind, Proxy};
use crate::ops::{read, succeed};
use tidegate_testkit::http::HttpResponse;
use tidegate_testkit::program::Serving;

const RULES: &str = r#"
trusted_proxies = ["127.0.0.1"]
path_bytes_max = 100
[[bans]]
by = "ip"
value = "127.0.66.0/24"
until = "2099-01-01T00:00:00Z"
[[rules]]
name = "json"
match = { methods = ["POST"], path = "/json" }
by = ["ip"]
limits = ["2/h"]
[[rules]]
name = "text"
match = { path = "/text" }
by = ["ip"]
limits = ["1/h"]
body = "text"
[[rules]]
name = "page"
match = { path = "/page" }
by = ["ip"]
limits = ["1/h"]
body = { template = "<h1>Très vite</h1>\n<p>at most {limit}</p>", content_type = "text/html; charset=utf-8" }
[[rules]]
name = "closed"
match = { path = "/closed" }
by = ["ip"]
limits = ["1000/h"]
on_failure = "deny"
"#;

/// An application, Tidegate, and one proxy of each kind in front of them.
struct Site {
    tidegate: Serving,
    application: Application,
    proxies: Vec<Proxy>,
    _dir: TempDir,
}

impl Site {
    /// Starts everything, with these rules and further arguments of `tidegate serve`.
    fn start(rules: &str, arguments: &[&str]) -> Site {
        let (tidegate, dir) = serve(rules, arguments);
        let application = Application::start();
        let start = |kind: &Kind| Proxy::start(*kind, &kind.config(), &tidegate.http, &application.address);
        let proxies = Kind::ALL.iter().map(start).collect();
        let site = Site { tidegate, application, proxies, _dir: dir };
        site.proxies.iter().for_each(|proxy| site.wait_until_ready(proxy));
        site
    }

    /// Waits until a proxy listens. Traefik listens before it has read its routes.
    fn wait_until_ready(&self, proxy: &Proxy) {
        proxy.wait_until(|| {
            visit(&proxy.address, "127.0.0.9", "/ready", &[]).is_some_and(|answer| answer.status != 404)
        });
        self.application.take();
    }
}

/// Starts `tidegate serve` with these rules and further arguments, and the token that `/v1/check` requires.
fn serve(rules: &str, arguments: &[&str]) -> (Serving, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, rules).unwrap();
    let mut command = Serving::command();
    command.env("TIDEGATE_HTTP_TOKEN", "a-token-that-no-visitor-knows");
    let serving = Serving::start_as(command, &[&["--config", file.to_str().unwrap()], arguments].concat());
    (serving, dir)
}

/// Sends a request from the address `from` and returns the response, or `None` if nothing listens.
///
/// `options` are those of curl. The names of the response's headers are in lower case.
fn visit(address: &str, from: &str, target: &str, options: &[&str]) -> Option<HttpResponse> {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--include", "--max-time", "30", "--path-as-is", "--interface", from]).args(options);
    let output = curl.arg(format!("http://{address}{target}")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    // An interim response has only a head.
    let text = text.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(&text);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let (status, headers) = head.split_once("\r\n")?;
    let mut answer = HttpResponse {
        status: status.split(' ').nth(1)?.parse().ok()?,
        headers: Default::default(),
        body: body.to_owned(),
    };
    for (name, value) in headers.lines().filter_map(|line| line.split_once(": ")) {
        let known = answer.headers.insert(name.to_ascii_lowercase(), value.to_owned());
        assert_eq!(known, None, "{name} twice in {text}");
    }
    Some(answer)
}

/// A visitor of one proxy, with an address of its own.
struct Visitor<'s> {
    proxy: &'s Proxy,
    from: String,
}

impl Visitor<'_> {
    fn get(&self, target: &str, options: &[&str]) -> HttpResponse {
        visit(&self.proxy.address, &self.from, target, options).unwrap_or_else(|| panic!("{}: no answer", self.proxy))
    }

    fn post(&self, target: &str, options: &[&str]) -> HttpResponse {
        self.get(target, &[&["--data", "url=https://example.com"], options].concat())
    }
}

/// Returns a visitor with the address 127.0.NETWORK.N, where N differs from proxy to proxy.
fn visitor(proxy: &Proxy, network: u8) -> Visitor<'_> {
    Visitor { proxy, from: format!("127.0.{network}.{}", 10 + proxy.kind as u8) }
}

const LIMIT_HEADERS: [&str; 5] =
    ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "ratelimit", "ratelimit-policy"];

#[test]
fn an_admitted_request_reaches_the_application_with_its_body_and_its_headers() {
    let site = Site::start(RULES, &[]);
    for proxy in &site.proxies {
        let visitor = visitor(proxy, 1);
        let body = "x".repeat(200_000);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("body");
        std::fs::write(&file, &body).unwrap();
        let data = format!("@{}", file.display());
        let answer = visitor.get(
            "/json?deny=200&a=%20b",
            &[
                "--data-binary",
                &data,
                "--header",
                "Authorization: Bearer of-the-visitor",
                "--header",
                "Expect: 100-continue",
            ],
        );
        assert_eq!((answer.status, &*answer.body), (200, "from the application"), "{proxy}");
        let [request] = &site.application.take()[..] else { panic!("{proxy}: not one request") };
        assert!(request.head.starts_with("POST /json?deny=200&a=%20b HTTP/1."), "{proxy}: {}", request.head);
        assert!(request.head.contains("Bearer of-the-visitor"), "{proxy}: {}", request.head);
        assert_eq!(request.body.len(), body.len(), "{proxy}");
        for name in LIMIT_HEADERS {
            assert_eq!(answer.headers.contains_key(name), proxy.kind.adds_headers(), "{proxy}: {name}");
        }
        if proxy.kind.adds_headers() {
            assert_eq!(answer.headers["ratelimit-policy"], "\"per-hour\";q=2;w=3600", "{proxy}");
            assert_eq!(answer.headers["x-ratelimit-remaining"], "1", "{proxy}");
        }
        let unlimited = visitor.get("/free", &[]);
        assert_eq!(unlimited.status, 200);
        assert!(LIMIT_HEADERS.iter().all(|name| !unlimited.headers.contains_key(*name)), "{proxy}: {unlimited:?}");
        site.application.take();
    }
}

#[test]
fn a_refusal_reaches_the_visitor_with_status_headers_and_body() {
    let site = Site::start(RULES, &[]);
    for proxy in &site.proxies {
        let visitor = visitor(proxy, 1);
        let denied = |target: &str, options: &[&str]| {
            while visitor.post(target, options).status == 200 {}
            site.application.take();
            let denied = visitor.post(target, options);
            assert_eq!(denied.status, 429, "{proxy}: {denied:?}");
            assert_eq!(site.application.take().len(), 0, "{proxy}: a refused request reached the application");
            for name in LIMIT_HEADERS {
                assert!(denied.headers.contains_key(name), "{proxy}: no {name} in {denied:?}");
            }
            assert_eq!(denied.headers["cache-control"], "no-store", "{proxy}");
            let seconds: u32 = denied.headers["retry-after"].parse().unwrap();
            assert!((1..=3600).contains(&seconds), "{proxy}: {seconds}");
            (denied.headers["content-type"].clone(), denied.body, seconds)
        };
        let (kind, body, seconds) = denied("/json", &[]);
        assert_eq!(kind, "application/json", "{proxy}");
        let body: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{proxy}: {error}: {body}"));
        assert_eq!((&body["error"], &body["limit"]), (&"rate_limited".into(), &2.into()), "{proxy}");
        assert_eq!(body["retry_after"], seconds, "{proxy}");

        let (kind, body, _) = denied("/json", &["--header", "Accept: application/problem+json"]);
        assert_eq!(kind, "application/problem+json", "{proxy}");
        let body: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{proxy}: {error}: {body}"));
        assert_eq!(body["status"], 429, "{proxy}");

        let (kind, body, seconds) = denied("/text", &[]);
        assert_eq!(kind, "text/plain; charset=utf-8", "{proxy}");
        let expected = format!("the limit of 1 per hour has been reached; try again in {seconds} seconds");
        assert_eq!(body.trim_end(), expected, "{proxy}");

        // nginx gets the body as a header, which has one line.
        let (kind, body, _) = denied("/page", &[]);
        assert_eq!(kind, "text/html; charset=utf-8", "{proxy}");
        let line_end = if proxy.kind == Kind::Nginx { " " } else { "\n" };
        assert_eq!(body, format!("<h1>Très vite</h1>{line_end}<p>at most 1</p>"), "{proxy}");
    }
}

#[test]
fn bans_long_paths_and_an_unreachable_store_have_their_own_status() {
    let store = format!("redis://127.0.0.1:{}", free_port());
    let site = Site::start(RULES, &["--store", &store]);
    for proxy in &site.proxies {
        let long = format!("/{}", "x".repeat(100));
        for (network, target, status, error) in
            [(66, "/free", 403, "banned"), (1, &*long, 414, "path_too_long"), (1, "/closed", 503, "unavailable")]
        {
            let answer = visitor(proxy, network).get(target, &[]);
            assert_eq!(answer.status, status, "{proxy}: {answer:?}");
            assert_eq!(answer.headers["content-type"], "application/json", "{proxy}");
            assert_eq!(answer.headers["cache-control"], "no-store", "{proxy}");
            assert_eq!(answer.headers.contains_key("retry-after"), status != 414, "{proxy}: {answer:?}");
            let body: Value = serde_json::from_str(&answer.body).unwrap();
            assert_eq!(body["error"], error, "{proxy}");
        }
        assert_eq!(site.application.take().len(), 0, "{proxy}");
        assert_eq!(visitor(proxy, 1).post("/json", &[]).status, 200, "{proxy}: the local share decides");
        site.application.take();
    }
}

#[test]
fn nothing_that_a_visitor_sends_changes_how_it_is_counted() {
    const FORGED: [&str; 11] = [
        "X-Forwarded-For: 203.0.113.1",
        "X-Forwarded-Uri: /free",
        "X-Forwarded-Method: GET",
        "X-Forwarded-Host: elsewhere.example",
        "X-Original-URI: /free",
        "Forwarded: for=203.0.113.1",
        "X-Real-IP: 203.0.113.1",
        "X-Tidegate-Status: 200",
        "Authorization: Bearer forged",
        "Connection: close, X-Forwarded-Uri, X-Forwarded-For",
        "Origin: https://elsewhere.example",
    ];
    let site = Site::start(RULES, &[]);
    for proxy in &site.proxies {
        let (spender, innocent) = (visitor(proxy, 1), visitor(proxy, 2));
        // Both units of the spender, and none of the address that it names.
        for target in ["/json?deny=200", "/json?x=/free"] {
            let name = format!("X-Forwarded-For: {}", innocent.from);
            assert_eq!(spender.post(target, &["--header", &name]).status, 200, "{proxy}");
        }
        for header in FORGED {
            assert_eq!(spender.post("/json", &["--header", header]).status, 429, "{proxy}: {header}");
        }
        let all: Vec<&str> = FORGED.iter().flat_map(|header| ["--header", header]).collect();
        assert_eq!(spender.post("/json", &all).status, 429, "{proxy}");
        for target in
            ["/json?deny=200", "/json?status=204", "/json?X-Forwarded-Uri=/free", "/json?", "/./json", "/%6ason"]
        {
            assert_eq!(spender.post(target, &[]).status, 429, "{proxy}: {target}");
        }
        for _ in 0..2 {
            assert_eq!(innocent.post("/json", &[]).status, 200, "{proxy}: each visitor has its own units");
        }
        assert_eq!(innocent.post("/json", &[]).status, 429, "{proxy}");
        let internal = spender.get("/tidegate", &[]);
        assert_eq!(internal.status, if proxy.kind == Kind::Nginx { 404 } else { 200 }, "{proxy}: {internal:?}");
        site.application.take();
    }
}

#[test]
fn a_proxy_reuses_its_connections_to_tidegate() {
    let site = Site::start(RULES, &[]);
    let accepted = || {
        let metrics = site.tidegate.visit("/metrics").body;
        let line =
            metrics.lines().find(|line| line.starts_with("tidegate_connections_accepted_total{listener=\"http\"}"));
        line.and_then(|line| line.rsplit(' ').next()).and_then(|count| count.parse::<u64>().ok()).unwrap()
    };
    for proxy in &site.proxies {
        let before = accepted();
        (0..20).for_each(|_| assert_eq!(visitor(proxy, 1).get("/free", &[]).status, 200));
        // nginx has one pool per worker process.
        assert!(accepted() - before <= 5, "{proxy}: {} connections for 20 requests", accepted() - before);
    }
}

#[test]
fn without_tidegate_each_proxy_refuses_as_its_documentation_says() {
    let mut site = Site::start(RULES, &[]);
    let config = Kind::Nginx.config().replace("#error_page 502 504", "error_page 502 504");
    let open = Proxy::start(Kind::Nginx, &config, &site.tidegate.http, &site.application.address);
    site.wait_until_ready(&open);
    let spender = Visitor { proxy: &open, from: "127.0.3.1".to_owned() };
    (0..2).for_each(|_| assert_eq!(spender.post("/json", &[]).status, 200));
    assert_eq!(spender.post("/json", &[]).status, 429, "refusals are not changed");

    site.tidegate.signal("KILL");
    site.tidegate.end();
    site.application.take();
    for proxy in &site.proxies {
        let answer = visitor(proxy, 1).get("/free", &[]);
        assert_eq!(answer.status, proxy.kind.status_without_tidegate(), "{proxy}: {answer:?}");
        assert_eq!(site.application.take().len(), 0, "{proxy}");
    }
    assert_eq!(spender.post("/json", &[]).status, 200, "nginx lets requests pass if it is configured to");
    assert_eq!(site.application.take().len(), 1);
}

#[test]
fn a_proxy_that_is_not_trusted_gets_400_and_a_warning_is_logged() {
    let site = Site::start(&RULES.replace("[\"127.0.0.1\"]", "[\"192.0.2.1\"]"), &[]);
    for proxy in &site.proxies {
        let answer = visitor(proxy, 1).get("/free", &[]);
        let expected = if proxy.kind == Kind::Nginx { 500 } else { 400 };
        assert_eq!(answer.status, expected, "{proxy}: {answer:?}");
        assert_eq!(answer.body.contains("trusted_proxies"), proxy.kind != Kind::Nginx, "{proxy}: {answer:?}");
    }
    assert_eq!(site.application.take().len(), 0);
    let line = site.tidegate.wait_for_log("rejected a forward-auth request");
    assert!(line.contains("trusted_proxies") && !line.contains("127.0.0.1"), "{line}");
}

#[test]
fn a_direct_caller_needs_a_trusted_address_and_all_headers() {
    let (tidegate, _dir) = serve(RULES, &[]);
    let headers =
        ["X-Forwarded-Method: GET", "X-Forwarded-Uri: /text", "X-Forwarded-Host: a", "X-Forwarded-For: 192.0.2.1"];
    let options: Vec<&str> = headers.iter().flat_map(|header| ["--header", header]).collect();
    for path in ["/v1/forward-auth", "/v1/forward-auth/nginx"] {
        let ask = |from: &str, options: &[&str]| visit(&tidegate.http, from, path, options).unwrap();
        let stranger = ask("127.0.0.2", &options);
        assert_eq!(stranger.status, 400);
        assert!(stranger.body.contains("trusted_proxies"), "{stranger:?}");
        for missing in headers {
            let others: Vec<&str> = headers.into_iter().filter(|header| *header != missing).collect();
            let options: Vec<&str> = others.into_iter().flat_map(|header| ["--header", header]).collect();
            let answer = ask("127.0.0.1", &options);
            assert_eq!(answer.status, 400, "{missing}");
            let name = missing.split(':').next().unwrap().to_ascii_lowercase();
            assert!(answer.body.to_ascii_lowercase().contains(&name), "{answer:?}");
        }
    }
    let admitted = visit(&tidegate.http, "127.0.0.1", "/v1/forward-auth", &options).unwrap();
    assert_eq!(admitted.status, 200);
    let denied = visit(&tidegate.http, "127.0.0.1", "/v1/forward-auth/nginx", &options).unwrap();
    assert_eq!((denied.status, &*denied.headers["x-tidegate-status"]), (403, "429"));
}

#[test]
fn an_instance_without_rules_says_so_to_a_proxy() {
    let tidegate = Serving::start(&[]);
    let answer = visit(&tidegate.http, "127.0.0.1", "/v1/forward-auth", &[]).unwrap();
    assert_eq!(answer.status, 400);
    assert!(answer.body.contains("--config"), "{answer:?}");
}

/// The blocks of the page are the files that the other tests run, without the comment at their beginning.
#[test]
fn the_page_of_the_guide_shows_the_files_in_ops() {
    let page = read("docs/guide/08-with-nginx-caddy-traefik.md");
    for (file, language) in [
        ("ops/nginx/tidegate.conf", "nginx"),
        ("ops/caddy/tidegate.caddyfile", "caddyfile"),
        ("ops/caddy/tidegate-headers.caddyfile", "caddyfile"),
        ("ops/traefik/dynamic.yaml", "yaml"),
    ] {
        assert!(page.contains(&format!("(../../{file})")), "no link to {file}");
        let text = read(file);
        let (_, code) = text.split_once("\n\n").unwrap();
        let name = file.rsplit('/').next().unwrap();
        assert!(page.contains(&format!("```{language}\n# {name}\n{code}```\n")), "the block of {file} differs from it");
    }
}

#[test]
fn caddy_formats_its_files_as_they_are() {
    for file in ["ops/caddy/tidegate.caddyfile", "ops/caddy/tidegate-headers.caddyfile"] {
        let mut caddy = crate::ops::tool("caddy");
        assert_eq!(succeed(caddy.arg("fmt").arg(crate::ops::path(file))), read(file), "{file}");
    }
}
