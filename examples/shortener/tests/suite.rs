//! The shortener as a user runs it: the real binary, real sockets, a real Redis.
//!
//! With `SHORTENER_COMMAND`, the same tests run on another implementation, such as `examples/shortener-hono`:
//! `SHORTENER_COMMAND="/usr/bin/node $PWD/examples/shortener-hono/src/server.js" cargo test -p shortener --test suite`.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

#[path = "suite/exchange.rs"]
mod exchange;
#[path = "suite/instance.rs"]
mod instance;

use std::thread;
use std::time::Duration;

use exchange::Answer;
use instance::{Instance, LONG_DEADLINE};
use serde_json::Value;
use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::Server;

/// Asserts that a response is a complete 429 of a limit with this quota. Returns its `retry_after_ms`.
fn assert_refused(answer: &Answer, quota: u32) -> Duration {
    assert_eq!(answer.status, 429, "{answer:?}");
    let body = answer.json();
    assert_eq!(body["error"], "rate_limited");
    assert_eq!(body["limit"], quota);
    let wait_ms = body["retry_after_ms"].as_u64().unwrap();
    assert_eq!(answer.header("retry-after"), wait_ms.div_ceil(1_000).max(1).to_string());
    assert_eq!(answer.header("x-ratelimit-remaining"), "0");
    assert_eq!(answer.header("cache-control"), "no-store");
    Duration::from_millis(wait_ms)
}

#[test]
fn two_instances_share_one_limit_and_retry_after_is_exact() {
    let redis = Server::redis();
    let window = Duration::from_secs(6);
    let window_ms = window.as_millis().to_string();
    let variables = [LONG_DEADLINE, ("REDIS_URL", &*redis.url()), ("RATE_LIMIT_WINDOW_MS", &window_ms)];
    let instances = [Instance::start(&variables), Instance::start(&variables)];

    let answers: Vec<Answer> = (0..15).map(|n| instances[n % 2].shorten("https://example.com/a")).collect();
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [[201; 5], [201; 5], [429; 5]].concat());
    for (made, answer) in answers[..10].iter().enumerate() {
        assert_eq!(answer.header("x-ratelimit-remaining"), (9 - made).to_string());
    }
    let waits: Vec<Duration> = answers[10..].iter().map(|answer| assert_refused(answer, 10)).collect();
    assert!(waits.iter().all(|wait| *wait <= window), "{waits:?}");

    for answer in &answers[..10] {
        for instance in &instances {
            let followed = instance.get(&format!("/{}", answer.slug()));
            assert_eq!((followed.status, followed.header("location")), (302, "https://example.com/a"));
        }
    }

    let slugs = redis.command(&["KEYS", "shortener:slug:*"]);
    assert_eq!(slugs.items().len(), 10);
    for key in redis.command(&["KEYS", "*"]).items() {
        assert_ne!(redis.command(&["TTL", &key.text()]).integer(), -1, "{key:?} has no TTL");
    }

    // Denied halfway through the wait, admitted after it. The clock is that of the Redis server, so the test really
    // waits. Its window is short.
    let wait = assert_refused(&instances[0].shorten("https://example.com/b"), 10);
    thread::sleep(wait / 2);
    assert_refused(&instances[1].shorten("https://example.com/b"), 10);
    thread::sleep(wait - wait / 2);
    assert_eq!(instances[0].shorten("https://example.com/b").status, 201);
}

#[test]
fn following_a_link_is_never_limited() {
    let shortener = Instance::start(&[("RATE_LIMIT_MAX", "1"), ("RATE_LIMIT_WINDOW_MS", "3600000")]);
    let slug = shortener.shorten("https://example.com/").slug();
    assert_refused(&shortener.shorten("https://example.com/"), 1);
    for _ in 0..300 {
        let followed = shortener.get(&format!("/{slug}"));
        assert_eq!((followed.status, followed.header("location")), (302, "https://example.com/"));
        assert!(!followed.has_header("ratelimit") && !followed.has_header("x-ratelimit-limit"), "{followed:?}");
    }
    assert_eq!(shortener.get("/unknown").status, 404);
    assert_refused(&shortener.shorten("https://example.com/"), 1);
}

#[test]
fn a_forged_address_is_ignored() {
    let shortener = Instance::start(&[("RATE_LIMIT_WINDOW_MS", "3600000")]);
    for n in 0..30 {
        let forged = format!("198.51.100.{n}");
        let headers = [("x-forwarded-for", &*forged), ("x-real-ip", &forged), ("forwarded", &format!("for={forged}"))];
        let answer = shortener.shorten_with(&headers, "https://example.com/");
        assert_eq!(answer.status, if n < 10 { 201 } else { 429 }, "{n}: {answer:?}");
    }
}

#[test]
fn behind_a_trusted_proxy_the_forwarded_address_is_counted() {
    let proxies = [("TRUSTED_PROXIES", "127.0.0.1, 10.0.0.0/8"), ("RATE_LIMIT_WINDOW_MS", "3600000")];
    let shortener = Instance::start(&[&proxies[..], &[("RATE_LIMIT_MAX", "2")]].concat());
    let from =
        |forwarded: &str| shortener.shorten_with(&[("x-forwarded-for", forwarded)], "https://example.com/").status;
    assert_eq!([from("203.0.113.1"), from("203.0.113.1"), from("203.0.113.1")], [201, 201, 429]);
    assert_eq!(from("203.0.113.2"), 201, "somebody else");
    assert_eq!(from("203.0.113.9, 203.0.113.1"), 429, "what a client writes stands to the left, and is not believed");
    assert_eq!(from("203.0.113.9, 203.0.113.1, 10.1.2.3"), 429, "by way of a second proxy of ours");
}

#[test]
fn without_redis_links_are_created_without_a_limit_and_the_outage_is_logged() {
    let redis = Server::redis();
    let variables =
        [LONG_DEADLINE, ("REDIS_URL", &*redis.url()), ("RATE_LIMIT_MAX", "3"), ("RATE_LIMIT_WINDOW_MS", "3600000")];
    let instances = [Instance::start(&variables), Instance::start(&variables)];
    let before: Vec<Answer> = (0..4).map(|_| instances[0].shorten("https://example.com/before")).collect();
    assert_refused(&before[3], 3);

    redis.kill9();
    // The denial may be cached for up to a second.
    eventually("a link is created", || instances[0].shorten("https://example.com/").status, |status| *status == 201);
    let during: Vec<Answer> = (0..30).map(|_| instances[0].shorten("https://example.com/during")).collect();
    for answer in &during {
        assert_eq!(answer.status, 201, "{answer:?}");
        assert!(!answer.has_header("x-ratelimit-limit"), "an uncounted request has no quota headers: {answer:?}");
        assert_eq!(instances[0].get(&format!("/{}", answer.slug())).status, 302, "on the instance that created it");
    }
    assert_eq!(instances[0].get(&format!("/{}", before[0].slug())).status, 302, "created before, still in memory");
    let unknown = instances[1].get(&format!("/{}", during[0].slug()));
    assert_eq!((unknown.status, unknown.header("retry-after")), (503, "1"), "it is unknown whether the link exists");
    let (limiter_failed, limiter_recovered) = Instance::limiter_log();
    let log = instances[0].log();
    assert!(log.contains("WARN") && log.contains("Redis is unavailable"), "{log}");
    assert!(log.contains(limiter_failed), "{log}");

    redis.restart();
    let is_back = |log: &String| log.contains("Redis is available again") && log.contains(limiter_recovered);
    eventually("the log says that Redis is back", || instances[0].log(), is_back);
    for answer in &during {
        let followed = instances[1].get(&format!("/{}", answer.slug()));
        assert_eq!((followed.status, followed.header("location")), (302, "https://example.com/during"));
    }
    let statuses = [(); 4].map(|()| instances[0].shorten("https://example.com/after").status);
    assert_eq!(
        statuses,
        [201, 201, 201, 429],
        "limited again, in a fresh window, because this Redis has no persistence"
    );
}

#[test]
fn links_created_while_redis_is_down_are_saved_later_and_their_number_is_bounded() {
    const UNSAVED_MAX: usize = 10_000;
    let redis = Server::redis();
    let shortener = Instance::start(&[("REDIS_URL", &redis.url()), ("NO_COLOR", "1")]);
    redis.kill9();
    eventually("a link is created", || shortener.shorten("https://example.com/first").status, |status| *status == 201);
    let made = shortener.shorten_many(UNSAVED_MAX + 500, "https://example.com/");
    let refused: Vec<&Answer> = made.iter().filter(|answer| answer.status != 201).collect();
    assert_eq!(refused.len(), 501, "the first link counts, too");
    for answer in refused {
        assert_eq!((answer.status, answer.header("retry-after")), (503, "1"));
        assert!(answer.text().contains("no link was created"), "{}", answer.text());
    }
    assert!(shortener.log().contains("10000 links are waiting for Redis; no more are created"), "{}", shortener.log());
    let slug = made[0].slug();
    assert_eq!(shortener.get(&format!("/{slug}")).status, 302);

    redis.restart();
    let is_back = |log: &String| log.contains("Redis is available again");
    let log = eventually("the log says that Redis is back", || shortener.log(), is_back);
    assert!(log.contains("saved=10000 refused=501"), "{log}");
    assert_eq!(redis.command(&["KEYS", "shortener:slug:*"]).items().len(), UNSAVED_MAX, "all created links are saved");
    assert_eq!(redis.command(&["GET", &format!("shortener:slug:{slug}")]).text(), "https://example.com/");
}

#[test]
fn an_instance_that_exits_before_redis_is_back_logs_the_number_of_lost_links() {
    let redis = Server::redis();
    let mut shortener = Instance::start(&[("REDIS_URL", &redis.url()), ("NO_COLOR", "1")]);
    redis.kill9();
    for _ in 0..3 {
        assert_eq!(shortener.shorten("https://example.com/").status, 201);
    }
    assert!(shortener.terminate().success());
    assert!(shortener.log().contains("while Redis was unavailable are lost lost=3"), "{}", shortener.log());
}

#[test]
fn requests_are_answered_while_redis_hangs() {
    let redis = Server::redis();
    let shortener = Instance::start(&[("REDIS_URL", &redis.url()), ("RATE_LIMIT_WINDOW_MS", "3600000")]);
    assert_eq!(shortener.shorten("https://example.com/").status, 201);
    redis.stop();
    for _ in 0..15 {
        let slug = shortener.shorten("https://example.com/").slug();
        assert_eq!(shortener.get(&format!("/{slug}")).status, 302);
    }
    assert_eq!(shortener.get("/unknown").status, 503, "it is unknown whether the link exists");
    redis.cont();
    eventually("the log says that Redis is back", || shortener.log(), |log| log.contains("Redis is available again"));
    assert_eq!(shortener.get("/unknown").status, 404);
}

#[test]
fn it_starts_while_redis_is_down() {
    let redis = Server::redis();
    redis.kill9();
    let shortener = Instance::start(&[("REDIS_URL", &redis.url()), ("RATE_LIMIT_MAX", "1")]);
    let slug = shortener.shorten("https://example.com/").slug();
    assert_eq!(shortener.get(&format!("/{slug}")).status, 302);
}

#[test]
fn an_invalid_url_or_body_is_rejected_with_what_is_accepted() {
    let shortener = Instance::start(&[("RATE_LIMIT_MAX", "1000")]);
    let long = format!("{{\"url\":\"https://example.com/{}\"}}", "a".repeat(2_048));
    let huge = " ".repeat(100_000);
    let url = "expected an absolute http or https URL of at most 2048 bytes";
    let json = "expected JSON like {\"url\":\"https://example.com/\"}";
    let cases = [
        ("", json),
        ("url=https://example.com", json),
        ("[]", json),
        (r#"{"uri":"https://example.com"}"#, "missing field `url`"),
        (r#"{"url":17}"#, json),
        (r#"{"url":""}"#, url),
        (r#"{"url":"example.com"}"#, url),
        (r#"{"url":"/shorten"}"#, url),
        (r#"{"url":"https://"}"#, url),
        (r#"{"url":"ftp://example.com/"}"#, url),
        (r#"{"url":"javascript:alert(1)"}"#, url),
        (r#"{"url":"data:text/html,x"}"#, url),
        (&long, url),
        (&huge, "expected a body of at most 16384 bytes"),
    ];
    for (body, expected) in cases {
        let answer = shortener.post("/shorten", &[("content-type", "application/json")], body);
        assert_eq!(answer.status, 400, "{body:.60}: {answer:?}");
        let message = answer.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains(expected), "{body:.60}: {message}");
    }
    // A line break in a URL must not become one in a header.
    let answer = shortener.post("/shorten", &[], r#"{"url":"https://example.com/#\r\nset-cookie: a=b é"}"#);
    let followed = shortener.get(&format!("/{}", answer.slug()));
    assert_eq!(followed.header("location"), "https://example.com/#set-cookie:%20a=b%20%C3%A9");
    assert!(!followed.has_header("set-cookie"));
}

#[test]
fn a_short_url_starts_with_the_public_url() {
    let shortener = Instance::start(&[]);
    let link = shortener.shorten("https://example.com/").json();
    assert_eq!(link["short_url"], format!("http://{}/{}", shortener.address(), link["slug"].as_str().unwrap()));
    let public = Instance::start(&[("PUBLIC_URL", "https://sho.rt")]);
    let link = public.shorten("https://example.com/").json();
    assert_eq!(link["short_url"], format!("https://sho.rt/{}", link["slug"].as_str().unwrap()));
}

#[test]
fn the_openapi_document_lists_the_headers_of_a_429() {
    let shortener = Instance::start(&[("RATE_LIMIT_MAX", "1"), ("RATE_LIMIT_WINDOW_MS", "3600000")]);
    let document: Value = shortener.get("/openapi.json").json();
    let responses = &document["paths"]["/shorten"]["post"]["responses"];
    for status in [201, 429] {
        let answer = shortener.shorten("https://example.com/");
        assert_eq!(answer.status, status);
        let documented = responses[status.to_string()]["headers"].as_object().unwrap();
        let told: Vec<&str> =
            answer.header_names().filter(|name| name.contains("ratelimit") || *name == "retry-after").collect();
        assert_eq!(documented.len(), told.len(), "{told:?} {documented:?}");
        assert!(documented.keys().all(|name| answer.has_header(&name.to_lowercase())), "{told:?} {documented:?}");
    }
    let limited = &document["components"]["schemas"]["RateLimited"]["properties"];
    let body = shortener.shorten("https://example.com/").json();
    assert!(body.as_object().unwrap().keys().eq(limited.as_object().unwrap().keys()), "{body} {limited}");
}

#[test]
fn the_documentation_page_loads_nothing_from_other_hosts() {
    let shortener = Instance::start(&[]);
    let page = shortener.get("/docs/");
    assert_eq!(page.status, 200);
    let assets: Vec<String> = page.quoted_after(["src=", "href="]);
    assert!(assets.iter().any(|asset| asset.ends_with(".js")), "{assets:?}");
    for asset in &assets {
        assert!(!asset.contains("//"), "{asset}");
        let answer = shortener.get(&format!("/docs/{}", asset.trim_start_matches("./")));
        assert!(answer.status == 200 && !answer.body.is_empty(), "{asset}: {}", answer.status);
    }
    let start = shortener.get("/docs/swagger-initializer.js").text();
    assert!(start.contains("\"/openapi.json\"") && !start.contains("http"), "{start}");
}

#[test]
fn it_shuts_down_on_sigterm() {
    let mut shortener = Instance::start(&[]);
    assert_eq!(shortener.shorten("https://example.com/").status, 201);
    assert!(shortener.terminate().success());
}

#[test]
fn an_invalid_environment_variable_is_rejected_at_the_start() {
    let cases = [
        ("PORT", "99999", "PORT: expected a port from 0 to 65535, got \"99999\""),
        ("REDIS_DEADLINE_MS", "0", "REDIS_DEADLINE_MS: expected 1 to 10000 milliseconds, got 0"),
        ("RATE_LIMIT_MAX", "0", "RATE_LIMIT_MAX: a quota must be from 1 to 10000000, found 0"),
        ("RATE_LIMIT_WINDOW_MS", "1m", "RATE_LIMIT_WINDOW_MS: expected a whole number of milliseconds"),
        ("TRUSTED_PROXIES", "my-proxy", "TRUSTED_PROXIES: "),
        ("PUBLIC_URL", "sho.rt", "PUBLIC_URL: expected an http or https URL"),
        ("REDIS_URL", "http://:hunter2@127.0.0.1", "REDIS_URL: "),
    ];
    for (variable, value, expected) in cases {
        let said = Instance::refused(variable, value);
        assert!(said.starts_with("shortener: ") && said.contains(expected), "{variable}={value}: {said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
}
