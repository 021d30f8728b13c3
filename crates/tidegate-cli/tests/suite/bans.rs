//! Bans at run time: set and lifted through one instance or on the store, enforced by all instances within a second.
#![allow(clippy::unwrap_used)] // a step that fails fails its test
#![allow(clippy::disallowed_methods)] // real time bounds how long a ban may be cached

use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::Server;

use tidegate_testkit::http::HttpResponse;
use tidegate_testkit::program::{Serving, command};

const RULES: &str = r#"
deadline = "20s"
[[rules]]
name = "shorten"
match = { methods = ["POST"], path = "/shorten" }
by = ["ip"]
limits = ["100000/h"]
"#;

const EXPLICIT: &str = r#"{"key":"user:42","limit":"100000/h"}"#;
const TOGETHER: &str = r#"{"checks":[{"key":"user:7","limit":"9/h"},{"key":"user:42","limit":"100000/h"}]}"#;
const DESCRIBED: &str = r#"{"request":{"method":"POST","path":"/shorten","peer":"203.0.113.9"}}"#;

fn tidegate(arguments: &[&str]) -> Output {
    command().env("TIDEGATE_ADMIN_TOKEN", "a-token-for-tests-only").args(arguments).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a command that must succeed, and returns its output.
fn run(arguments: &[&str]) -> String {
    let output = tidegate(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", err(&output));
    out(&output)
}

fn two_instances(redis: &Server) -> (tempfile::TempDir, String, [Serving; 2]) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES).unwrap();
    let file = file.to_str().unwrap().to_owned();
    let instances = [(); 2].map(|()| Serving::start(&["--store", &redis.url(), "--config", &file]));
    (dir, file, instances)
}

/// Asserts that a response is a refusal by a ban: without an end if `is_for_good`, else with at most an hour left.
fn assert_banned(answer: &HttpResponse, is_for_good: bool) {
    assert_eq!(answer.status, 403, "{answer:?}");
    let body: Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!((&body["error"], &body["message"]), (&"banned".into(), &"this caller is banned".into()));
    if is_for_good {
        assert!(!answer.headers.contains_key("retry-after") && body["retry_after_ms"].is_null(), "{answer:?}");
    } else {
        let seconds: u64 = answer.headers["retry-after"].parse().unwrap();
        assert!((3_000..=3_600).contains(&seconds), "{answer:?}");
        assert_eq!(body["retry_after"].as_u64(), Some(seconds));
        assert!((3_000_000..=3_600_000).contains(&body["retry_after_ms"].as_u64().unwrap()), "{answer:?}");
    }
}

/// A key of explicit checks, and a client of the rules.
const TARGETS: [&[&str]; 2] = [&["--key", "user:42"], &["203.0.113.9"]];

/// Maximum time for which an instance enforces a ban after another instance lifted it.
const CACHED_FOR_MAX: Duration = Duration::from_secs(1);

/// A ban on a key is in the store when the command returns, and every admission needs the store, so all instances enforce
/// it at once. A ban on a client is read within a second. An instance that has enforced a ban may cache it for a second
/// after it was lifted.
#[test]
fn ban_set_anywhere_is_enforced_and_lifted_on_every_instance() {
    let redis = Server::redis();
    let (_dir, file, instances) = two_instances(&redis);
    let (url, admin) = (redis.url(), format!("http://{}", instances[0].admin));
    let places: [&[&str]; 3] = [&["--store", &url], &["--admin", &admin], &["--store", &url, "--config", &file]];
    for place in places {
        for (duration, is_for_good) in [(&["--for", "1h"][..], false), (&[], true)] {
            for instance in &instances {
                assert_eq!(instance.check(EXPLICIT).status, 200);
                assert_eq!(instance.check(DESCRIBED).status, 200);
            }
            for target in TARGETS {
                run(&[&["ban"][..], target, duration, place].concat());
            }
            for instance in &instances {
                eventually("the ban is read", || instance.check(DESCRIBED).status, |status| *status == 403);
                for body in [EXPLICIT, TOGETHER, DESCRIBED, EXPLICIT, DESCRIBED] {
                    assert_banned(&instance.check(body), is_for_good);
                }
                let reply = instance.connect().call(&["TIDEGATE.CHECK", "user:42", "10/h"]).unwrap();
                let numbers: Vec<i64> = reply.items().iter().map(|item| item.integer()).collect();
                assert_eq!(numbers[..3], [0, 10, 0], "allowed, quota, remaining");
                let is_right =
                    |left: i64, whole: i64| if is_for_good { left == -1 } else { (whole / 2..=whole).contains(&left) };
                assert!(is_right(numbers[3], 3_600_000) && is_right(numbers[4], 3_600_000), "{numbers:?}");
                let reply = instance.connect().call(&["CL.THROTTLE", "user:42", "9", "10", "60"]).unwrap();
                let numbers: Vec<i64> = reply.items().iter().map(|item| item.integer()).collect();
                assert_eq!(numbers[..3], [1, 10, 0], "limited, capacity, remaining");
                assert!(is_right(numbers[3], 3_600), "{numbers:?}");
            }
            for target in TARGETS {
                let said = run(&[&["unban"][..], target, place].concat());
                assert_eq!(said, format!("{} is no longer banned\n", target.last().unwrap()));
            }
            let lifted = Instant::now();
            for instance in &instances {
                for body in [EXPLICIT, DESCRIBED] {
                    let is_enforced_after = || {
                        let sent = Instant::now();
                        (instance.check(body).status == 403).then(|| sent.duration_since(lifted))
                    };
                    // A request that was sent later than this must not be refused, however slow the machine is.
                    let last = eventually("the ban is lifted", is_enforced_after, |after| match after {
                        Some(after) => {
                            assert!(*after < CACHED_FOR_MAX, "still banned after {after:?}");
                            false
                        }
                        None => true,
                    });
                    assert_eq!(last, None);
                }
            }
        }
    }
}

#[test]
fn ban_expires_by_itself_on_every_instance() {
    let redis = Server::redis();
    let (_dir, _file, instances) = two_instances(&redis);
    run(&["ban", "user:42", "--for", "2s", "--store", &redis.url()]);
    let key = "tidegate:tg2:{user:42}:ban";
    let is_enforced = instances.each_ref().map(|instance| instance.check(EXPLICIT).status == 403);
    // On a slow machine the ban may have expired before the checks.
    assert!(redis.command(&["EXISTS", key]).integer() == 0 || is_enforced == [true; 2], "{is_enforced:?}");
    for instance in &instances {
        eventually("the ban has ended", || instance.check(EXPLICIT).status, |status| *status == 200);
    }
    assert_eq!(redis.command(&["EXISTS", key]).integer(), 0);
}

#[test]
fn subject_that_explain_reveals_can_be_banned() {
    let redis = Server::redis();
    let (_dir, file, instances) = two_instances(&redis);
    let explain = ["explain", "POST", "/shorten", "--peer", "203.0.113.9", "--config", &file, "--store", &redis.url()];
    let revealed = run(&[&explain[..], &["--reveal"]].concat());
    let subject = revealed.split_once("counts ").unwrap().1.split_once(',').unwrap().0;
    run(&["ban", subject, "--for", "1h", "--store", &redis.url()]);
    eventually("the ban is read", || instances[0].check(DESCRIBED).status, |status| *status == 403);
    assert_banned(&instances[0].check(DESCRIBED), false);
    let explained = run(&explain);
    assert!(explained.contains("refused  ip:*** is banned in the store for "), "{explained}");
    let masked = tidegate(&["ban", "ip:***", "--store", &redis.url(), "--config", &file]);
    assert_eq!(masked.status.code(), Some(2));
    assert!(err(&masked).contains("explain --reveal"), "{}", err(&masked));
}

#[test]
fn instance_without_a_store_is_banned_through_its_admin_listener() {
    let serving = Serving::start(&[]);
    let admin = format!("http://{}", serving.admin);
    assert_eq!(
        run(&["ban", "user:42", "--for", "1h", "--admin", &admin]),
        "user:42 is banned for 1h: all requests of this user, and explicit checks on the key user:42 (403), on this instance\n"
    );
    assert_banned(&serving.check(EXPLICIT), false);
    assert_eq!(
        serving.send_inline("TIDEGATE.PEEK user:42 10/h").split(' ').nth(1),
        Some(":1"),
        "a peek reads the counter"
    );
    let said = run(&["ban", "user:42", "--admin", &admin, "--json"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    let facts = ["client", "kind", "banned", "retry_after_ms", "subjects", "rules"].map(|field| &said[field]);
    let expected = [json!("user:42"), json!("user"), json!(true), Value::Null, json!(["user:42"]), json!([])];
    assert_eq!(facts, expected.each_ref());
    assert_banned(&serving.check(EXPLICIT), true);
    assert_eq!(run(&["unban", "user:42", "--admin", &admin]), "user:42 is no longer banned\n");
    let again = tidegate(&["unban", "user:42", "--admin", &admin]);
    assert_eq!((again.status.code(), out(&again).as_str()), (Some(1), "user:42 was not banned\n"));
    assert_eq!(serving.check(EXPLICIT).status, 200);
}

#[test]
fn check_of_a_banned_key_is_denied_and_invalid_arguments_are_reported() {
    let redis = Server::redis();
    let url = redis.url();
    run(&["ban", "user:42", "--for", "1h", "--store", &url]);
    let checked = tidegate(&["check", "user:42", "10/min", "--store", &url]);
    assert_eq!((checked.status.code(), out(&checked).lines().next()), (Some(1), Some("banned")), "{}", out(&checked));
    let checked = tidegate(&["check", "user:42", "10/min", "--store", &url, "--json"]);
    assert!(out(&checked).contains(r#""banned":true"#), "{}", out(&checked));
    let checked = tidegate(&["check", "user:7", "10/min", "--store", &url, "--json"]);
    assert!(out(&checked).contains(r#""banned":false"#), "{}", out(&checked));
    let long = "a".repeat(65_537);
    for (arguments, phrase) in [
        (&["ban", "user:42", "--for", "soon", "--store", &url][..], "such as 30s, 10min or 1h"),
        (&["ban", "user:42", "--for", "0s", "--store", &url], "at least 1ms"),
        (&["ban", "user:42"], "no shared store was given"),
        (&["unban", "user:42", "--store", "memory"], "no shared store was given"),
        (&["ban", &long, "--store", &url], "at most 65536 bytes"),
        (&["ban"], "<CLIENT>"),
        (&["ban", "user:42", "--store", "redis://127.0.0.1:1"], "127.0.0.1:1"),
    ] {
        let refused = tidegate(arguments);
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}");
        assert!(err(&refused).contains(phrase), "{phrase}: {}", err(&refused));
    }
}
