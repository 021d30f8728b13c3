//! The commands about a client do what they print, in every spelling of the client, with and without `anonymize`, on a
//! store and through a running instance.
//!
//! What a command prints is compared with what the next request of that client meets.

use std::process::Output;

use serde_json::Value;
use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::Server;

use tidegate_testkit::http::HttpResponse;
use tidegate_testkit::program::{Serving, command};

/// A token of the user `alice`, signed with the key of [`config`], that expires in 2100.
const TOKEN: &str = "Bearer eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiJhbGljZSIsImV4cCI6NDEwMjQ0NDgwMH0.DvdDttFvdgTOXtC2L5P1zfs2bIMtiEwN3al4EAHYyf8";
const KEY: &str = "planted-key-of-acme";

/// The rules that count by one kind, each on its own path. No rule counts requests to `/free`.
const KINDS: [&str; 4] = ["ip", "caller", "api_key", "user"];

/// Returns a configuration. Every rule has a limit of 5, so that a counter of one request has 4 left.
fn config(anonymize: bool) -> String {
    let rule = |kind: &str| {
        let matched = format!("match = {{ path = \"/{kind}\" }}\nby = [\"{kind}\"]\nlimits = [\"5/h\"]");
        format!("[[rules]]\nname = \"by-{kind}\"\n{matched}\n")
    };
    let tenants = "[[rules]]\nname = \"tenants\"\nmatch = { path = \"/tenant\" }\nby = [\"header:x-tenant\"]\nlimits = [\"100000/h\"]\n";
    let rules: String = KINDS.map(rule).concat() + tenants;
    let jwt = "[jwt]\nalgorithm = \"HS256\"\nkey = \"0123456789abcdef0123456789abcdef\"\n";
    let anonymize = if anonymize { "anonymize = { secret = \"0123456789abcdef0123456789abcdef\" }\n" } else { "" };
    format!("instances = 1\ndeadline = \"20s\"\n{anonymize}{jwt}[[keys]]\nkey = \"{KEY}\"\nname = \"acme\"\n{rules}")
}

/// A client, in all its spellings.
struct Case {
    spellings: &'static [&'static str],
    /// The address and the header of its requests.
    peer: &'static str,
    header: Option<(&'static str, &'static str)>,
    /// What `ban` prints after the client, up to the status.
    effect: &'static str,
    /// The rules that count its requests by its identity, by kind.
    counted: &'static [&'static str],
}

const CASES: [Case; 5] = [
    Case {
        spellings: &["203.0.113.9", "ip:203.0.113.9", "::ffff:203.0.113.9", "203.0.113.9/32"],
        peer: "203.0.113.9",
        header: None,
        effect: "all requests from this address (403)",
        counted: &["ip", "caller", "api_key", "user"],
    },
    Case {
        spellings: &["2001:db8:1:2::5", "ip:2001:db8:1:2::5", "2001:db8:1:2::/64", "ip:2001:db8:1:2::/64"],
        peer: "2001:db8:1:2:ffff::1",
        header: None,
        effect: "all requests from this network, by which the address 2001:db8:1:2::",
        counted: &["ip", "caller", "api_key", "user"],
    },
    Case {
        spellings: &["198.51.100.0/24", "ip:198.51.100.0/24"],
        peer: "198.51.100.77",
        header: None,
        effect: "all requests from this network (403)",
        counted: &[],
    },
    Case {
        spellings: &["acme", KEY, "api_key:#57ce8399c61a3dee7ba0700fcededd2a"],
        peer: "192.0.2.1",
        header: Some(("x-api-key", KEY)),
        effect: "all requests with this API key (403)",
        counted: &["caller", "api_key"],
    },
    Case {
        spellings: &["user:alice"],
        peer: "192.0.2.2",
        header: Some(("authorization", TOKEN)),
        effect: "all requests of this user (403)",
        counted: &["caller", "user"],
    },
];

impl Case {
    /// Returns the spelling for a round; spellings are repeated.
    fn spelling(&self, round: usize) -> &'static str {
        self.spellings[round % self.spellings.len()]
    }

    fn request(&self, serving: &Serving, path: &str) -> HttpResponse {
        let headers = self.header.map(|(name, value)| format!("\"{name}\":\"{value}\"")).unwrap_or_default();
        let request = format!(r#"{{"method":"GET","path":"{path}","peer":"{}","headers":{{{headers}}}}}"#, self.peer);
        serving.check(&format!(r#"{{"request":{request}}}"#))
    }

    fn remaining(&self, serving: &Serving, kind: &str) -> u64 {
        let answer = self.request(serving, &format!("/{kind}"));
        let body: Value = serde_json::from_str(&answer.body).unwrap();
        body["limits"][0]["remaining"].as_u64().unwrap_or_else(|| panic!("{answer:?}"))
    }
}

fn tidegate(arguments: &[&str]) -> Output {
    command().env("TIDEGATE_ADMIN_TOKEN", "a-token-for-tests-only").args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Runs a command, asserts its exit code, and returns what it printed: to standard error if it failed.
fn run(arguments: &[&str], code: i32) -> String {
    let output = tidegate(arguments);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", text(&output));
    let printed = if code == 2 { output.stderr } else { output.stdout };
    String::from_utf8_lossy(&printed).into_owned()
}

/// A configuration file, and instances with it.
struct Site {
    _dir: tempfile::TempDir,
    file: String,
    servings: Vec<Serving>,
}

impl Site {
    fn start(config: &str, redis: Option<&Server>, count: usize) -> Site {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tidegate.toml");
        std::fs::write(&file, config).unwrap();
        let file = file.to_str().unwrap().to_owned();
        let url = redis.map_or("memory".to_owned(), Server::url);
        let servings = (0..count).map(|_| Serving::start(&["--store", &url, "--config", &file])).collect();
        Site { _dir: dir, file, servings }
    }

    fn admin(&self) -> String {
        format!("http://{}", self.servings[0].admin)
    }
}

/// Bans and unbans every client in every spelling, and asserts that its next requests are refused, on every instance and
/// whichever rules apply, and then admitted again.
fn assert_bans(site: &Site, place: &[&str], where_it_holds: &str) {
    for round in 0..4 {
        let status = |case: &Case, serving: &Serving, path: &str| case.request(serving, path).status;
        for case in &CASES {
            let printed = run(&[&["ban", case.spelling(round), "--for", "1h"], place].concat(), 0);
            let client = printed.split(' ').next().unwrap();
            let expected = format!("{client} is banned for 1h: {}", case.effect);
            assert!(printed.starts_with(&expected) && printed.ends_with(&format!(", {where_it_holds}\n")), "{printed}");
            assert!(!printed.contains(KEY), "{printed}");
        }
        for (case, serving) in CASES.iter().flat_map(|case| site.servings.iter().map(move |serving| (case, serving))) {
            let what = format!("{} is banned, {place:?}", case.spelling(round));
            eventually(&what, || status(case, serving, "/free"), |status| *status == 403);
            for kind in KINDS {
                assert_eq!(status(case, serving, &format!("/{kind}")), 403, "{what}");
            }
        }
        for case in CASES.iter().filter(|case| !case.counted.is_empty()) {
            let shown = run(&[&["inspect", case.spelling(round)], place].concat(), 1);
            assert!(shown.contains("is banned in the store for "), "{shown}");
            let explained = run(&[&["explain", "GET", "/free", "--client", case.spelling(round)], place].concat(), 0);
            assert!(explained.contains(":*** is banned in the store for "), "{explained}");
        }
        let listed: Value = serde_json::from_str(&run(&[&["ban", "--list", "--json"], place].concat(), 0)).unwrap();
        let bans = listed["bans"].as_array().unwrap();
        assert_eq!(bans.len(), CASES.len(), "{listed}");
        for ban in bans {
            assert!((3_000_000..=3_600_000).contains(&ban["retry_after_ms"].as_u64().unwrap()), "{listed}");
        }
        for case in &CASES {
            let printed = run(&[&["unban", case.spelling(round + 1)], place].concat(), 0);
            assert!(printed.ends_with(" is no longer banned\n"), "{printed}");
            let printed = run(&[&["unban", case.spelling(round)], place].concat(), 1);
            assert!(printed.ends_with(" was not banned\n"), "{printed}");
        }
        for (case, serving) in CASES.iter().flat_map(|case| site.servings.iter().map(move |serving| (case, serving))) {
            let what = format!("{} is admitted, {place:?}", case.spelling(round));
            eventually(&what, || status(case, serving, "/free"), |status| *status == 200);
        }
        assert_eq!(run(&[&["ban", "--list"], place].concat(), 0), "no bans\n");
    }
}

/// Asserts that `inspect` shows the counter that the next request meets, and that `reset` frees it, in every spelling.
fn assert_counters(site: &Site, place: &[&str]) {
    let serving = &site.servings[0];
    for case in CASES.iter().filter(|case| !case.counted.is_empty()) {
        for (round, spelling) in case.spellings.iter().enumerate() {
            let kinds = case.counted;
            for kind in kinds {
                assert_eq!(case.remaining(serving, kind), 4, "{spelling} {kind}");
            }
            let all: Value =
                serde_json::from_str(&run(&[&["inspect", spelling, "--json"], place].concat(), 0)).unwrap();
            let counters = all["counters"].as_array().unwrap();
            let left = |kind: &str| {
                let rule = format!("by-{kind}");
                counters.iter().find(|counter| counter["rule"] == rule).map(|counter| counter["remaining"].clone())
            };
            for kind in kinds {
                assert_eq!(left(kind), Some(4.into()), "{spelling} {kind}: {all}");
                let rule = format!("by-{kind}");
                let one = run(&[&["inspect", spelling, "--rule", &rule], place].concat(), 0);
                assert!(one.contains("remaining    4 of 5\n") && one.contains("retry after  0s\n"), "{one}");
                let explain = ["explain", "GET", &format!("/{kind}"), "--client", spelling];
                let explained = run(&[&explain[..], place].concat(), 0);
                assert!(explained.contains("5/h, 4 left\n"), "{explained}");
            }
            assert_eq!(all["skipped"].as_array().map_or(0, Vec::len), 5 - counters.len(), "{all}");
            let freed = match round % 2 {
                0 => run(&[&["reset", spelling], place].concat(), 0),
                _ => kinds
                    .iter()
                    .map(|kind| run(&[&["reset", spelling, "--rule", &format!("by-{kind}")], place].concat(), 0))
                    .collect(),
            };
            assert!(freed.contains("reset"), "{freed}");
            run(&[&["reset", spelling], place].concat(), 1);
            assert!(run(&[&["inspect", spelling], place].concat(), 1).contains("no such counter"));
        }
    }
}

/// Texts that name no client, or one that no rule counts: nothing changes, and the exit code is 2.
fn assert_wrong_clients(site: &Site, place: &[&str], anonymize: bool) {
    for wrong in ["no-such-name", "ip:***", "header:x-device:1", "cookie:a:b", "203.0.113.9/8", "global", "path:/x"] {
        for command in [&["ban"][..], &["unban"], &["inspect"], &["reset"]] {
            let printed = run(&[command, &[wrong], place].concat(), 2);
            assert!(!printed.is_empty() && !printed.contains("is banned"), "{printed}");
        }
        run(&[&["explain", "GET", "/free", "--client", wrong], place].concat(), 2);
    }
    for command in ["inspect", "reset"] {
        let printed = run(&[&[command, "198.51.100.0/24"], place].concat(), 2);
        assert!(printed.contains("specify an address in it"), "{printed}");
    }
    assert_eq!(run(&[&["ban", "--list"], place].concat(), 0), "no bans\n");

    // A subject that is not one client, and that a rule counts.
    let tenant = |serving: &Serving| {
        let request = r#"{"method":"GET","path":"/tenant","peer":"192.0.2.9","headers":{"x-tenant":"t1"}}"#;
        serving.check(&format!(r#"{{"request":{request}}}"#)).status
    };
    if anonymize {
        let printed = run(&[&["ban", "header:x-tenant:t1"], place].concat(), 2);
        assert!(printed.contains("midnight UTC"), "{printed}");
    }
    // Ends before midnight, except in the last second of a day.
    let printed = run(&[&["ban", "header:x-tenant:t1", "--for", "1s"], place].concat(), 0);
    assert!(printed.contains("all requests that rule tenants counts by this subject (403)"), "{printed}");
    for serving in &site.servings {
        eventually("the ban has ended", || tenant(serving), |status| *status == 200);
    }
    if !anonymize {
        run(&[&["ban", "header:x-tenant:t1"], place].concat(), 0);
        for serving in &site.servings {
            assert_eq!(tenant(serving), 403);
        }
        run(&[&["unban", "header:x-tenant:t1"], place].concat(), 0);
        for serving in &site.servings {
            eventually("the subject is admitted", || tenant(serving), |status| *status == 200);
        }
    }
}

const EVERYWHERE: &str = "on all instances within a second";

fn assert_commands(anonymize: bool) {
    let redis = Server::redis();
    let site = Site::start(&config(anonymize), Some(&redis), 2);
    let (admin, url) = (site.admin(), redis.url());
    for place in [&["--admin", &admin][..], &["--store", &url, "--config", &site.file]] {
        assert_wrong_clients(&site, place, anonymize);
        assert_counters(&site, place);
        assert_bans(&site, place, EVERYWHERE);
    }
    if anonymize {
        for case in &CASES {
            run(&["ban", case.spellings[0], "--admin", &admin], 0);
        }
        let stored = redis.command(&["HKEYS", "tidegate:tg2:bans"]);
        let stored = stored.items().iter().map(|field| field.text()).collect::<Vec<_>>().join(" ");
        assert!(stored.contains("ip:~") && stored.contains("api_key:~") && stored.contains("user:~"), "{stored}");
        for plain in ["203.0.113.9", "2001:db8", "alice", "#57ce"] {
            assert!(!stored.contains(plain), "{plain}: {stored}");
        }
        assert!(stored.contains("198.51.100.0/24"), "a network is no client: {stored}");
        // A pseudonym of the list lifts its ban.
        let listed = run(&["ban", "--list", "--admin", &admin], 0);
        let pseudonym = listed.lines().find(|line| line.starts_with("ip:~")).unwrap().split(' ').next().unwrap();
        run(&["unban", pseudonym, "--admin", &admin], 0);
        assert!(!run(&["ban", "--list", "--admin", &admin], 0).contains(pseudonym));
    }
}

#[test]
fn commands_do_what_they_print_on_redis() {
    assert_commands(false);
}

#[test]
fn commands_do_what_they_print_on_redis_with_pseudonyms() {
    assert_commands(true);
}

#[test]
fn commands_do_what_they_print_in_memory() {
    for anonymize in [false, true] {
        let site = Site::start(&config(anonymize), None, 1);
        let admin = site.admin();
        assert_wrong_clients(&site, &["--admin", &admin], anonymize);
        assert_counters(&site, &["--admin", &admin]);
        assert_bans(&site, &["--admin", &admin], "on this instance");
    }
}

/// Without rules, a text is the key of explicit checks, and the address, network or user that it names.
#[test]
fn ban_without_rules_refuses_the_key_and_the_client() {
    let redis = Server::redis();
    let site = Site::start(&config(false), Some(&redis), 1);
    let (url, serving) = (redis.url(), &site.servings[0]);
    let explicit = |key: &str| serving.check(&format!(r#"{{"key":"{key}","limit":"100/h"}}"#)).status;
    for (case, key) in [
        (&CASES[0], "203.0.113.9"),
        (&CASES[1], "2001:db8:1:2::5"),
        (&CASES[2], "198.51.100.0/24"),
        (&CASES[4], "user:alice"),
    ] {
        let printed = run(&["ban", key, "--store", &url], 0);
        assert!(
            printed.contains(&format!(", and explicit checks on the key {key} (403), {EVERYWHERE}\n")),
            "{printed}"
        );
        assert_eq!(explicit(key), 403, "{key}");
        eventually("the client is banned", || case.request(serving, "/free").status, |status| *status == 403);
        run(&["unban", key, "--store", &url], 0);
        run(&["unban", key, "--store", &url], 1);
        eventually("the client is admitted", || case.request(serving, "/free").status, |status| *status == 200);
        eventually("the key is admitted", || explicit(key), |status| *status == 200);
    }
    let printed = run(&["ban", "acme", "--store", &url], 0);
    assert_eq!(printed, format!("acme is banned permanently: explicit checks on the key acme (403), {EVERYWHERE}\n"));
    assert_eq!((explicit("acme"), CASES[3].request(serving, "/free").status), (403, 200));
    run(&["unban", "acme", "--store", &url], 0);
}

/// The list that was read last stays in force while Redis is down, and is read again afterwards.
#[test]
fn bans_hold_during_an_outage() {
    let redis = Server::redis();
    let site = Site::start(&config(false), Some(&redis), 1);
    let (case, serving) = (&CASES[0], &site.servings[0]);
    let status = || case.request(serving, "/free").status;
    run(&["ban", case.spellings[0], "--store", &redis.url(), "--config", &site.file], 0);
    eventually("the client is banned", status, |status| *status == 403);
    redis.kill9();
    eventually("the outage is noticed", || serving.visit("/readyz").status, |status| *status == 503);
    assert_eq!(status(), 403);
    redis.restart();
    // The restarted server has lost its data.
    eventually("the list is read again", status, |status| *status == 200);
}

#[test]
fn ban_with_an_end_expires_and_two_operators_lose_no_ban() {
    let redis = Server::redis();
    let site = Site::start(&config(false), Some(&redis), 1);
    let (case, serving, url) = (&CASES[0], &site.servings[0], redis.url());
    run(&["ban", case.spellings[0], "--for", "2s", "--store", &url, "--config", &site.file], 0);
    eventually("the ban has ended", || case.request(serving, "/free").status, |status| *status == 200);
    eventually(
        "the list has expired",
        || redis.command(&["EXISTS", "tidegate:tg2:bans"]).integer(),
        |count| *count == 0,
    );
    let operators: Vec<_> = (0..4)
        .map(|operator| {
            let place = match operator % 2 {
                0 => ["--admin".to_owned(), site.admin(), "--json".to_owned(), "--for=1h".to_owned()],
                _ => ["--store".to_owned(), url.clone(), "--json".to_owned(), "--for=1h".to_owned()],
            };
            std::thread::spawn(move || {
                for host in 0..5 {
                    let address = format!("10.0.{operator}.{host}");
                    let place: Vec<&str> = place.iter().map(String::as_str).collect();
                    run(&[&["ban", &address], &place[..]].concat(), 0);
                }
            })
        })
        .collect();
    operators.into_iter().for_each(|operator| operator.join().unwrap());
    let listed = run(&["ban", "--list", "--store", &url], 0);
    assert_eq!(listed.lines().count(), 20, "{listed}");
}
