//! Commands of the real binary: arguments, exit codes and output.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::process::{Command, Output};

use tidegate_testkit::program::Serving;
use tidegate_testkit::server::Server;

fn tidegate(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(arguments).env_remove("TIDEGATE_STORE").env_remove("REDIS_URL").output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn check_exits_with_its_verdict() {
    let redis = Server::redis();
    let check = |extra: &[&str]| tidegate(&[&["check", "user:42", "2/h", "--store", &redis.url()], extra].concat());
    assert_eq!(check(&[]).status.code(), Some(0));
    assert_eq!(check(&["--cost", "0"]).status.code(), Some(0));
    assert_eq!(check(&[]).status.code(), Some(0));
    let denied = check(&["--json"]);
    assert_eq!(denied.status.code(), Some(1));
    assert!(text(&denied.stdout).contains("\"remaining\":0"), "{}", text(&denied.stdout));
    let seen = text(&tidegate(&["inspect", "user:42", "2/h", "--store", &redis.url()]).stdout);
    assert!(seen.starts_with("per-hour\n") && seen.contains("0 of 2"), "inspect prints no verdict: {seen}");
    assert_eq!(tidegate(&["reset", "user:42", "2/h", "--store", &redis.url()]).status.code(), Some(0));
    assert_eq!(check(&["--cost", "2"]).status.code(), Some(0));
    assert_eq!(check(&["--cost", "3"]).status.code(), Some(1));
}

#[test]
fn an_error_exits_with_two_and_a_message_that_names_what_is_accepted() {
    for (arguments, phrase) in [
        (&["check", "k", "10/fortnight"][..], "us, ms, s, min, h, day, week"),
        (&["check", "k", "10/min", "--store", "postgres://x"], "redis://"),
        (
            &["check", "k", "10/min", "--store", "redis://:hunter2@127.0.0.1:1/0"],
            "cannot reach the store redis://127.0.0.1:1: connection refused",
        ),
        (&["check", "k", "10/min", "--cost=-1"], "--cost"),
        (&["check", "k", "10/min", "--cost", "-1"], "-1 is not in 0..=4294967295"),
        (&["check", "k", "10/min", "sliding"], "quote it: '10/min sliding'"),
        (&["inspect", "k", "9/s", "token-bucket", "burst=20"], "quote it: '9/s token-bucket burst=20'"),
        (&["gateway", "--limit", "10/min", "sliding-log"], "quote it: '10/min sliding-log'"),
        (&["check", "k", "10", "per", "minute"], "did you mean '10/min'?"),
        (&["check", "k", "10 / min"], "did you mean 10/min?"),
        (&["check", "k", "10 per minute"], "did you mean 10/min?"),
        (&["check", "k", "10/1.5h"], "in whole numbers, such as 90min (at byte 3: \"1.5h\"); did you mean 10/90min?"),
        (&["check", "k", "10/500d"], "from 1ms to 400day, the longest whose arithmetic is exact in Redis"),
        (&["check", "k", "10/min", "--store", "localhost:6379"], "no scheme; did you mean redis://localhost:6379?\n"),
        (
            &["check", "k", "10/min", "--store", "redis+sentinel://u:hunter2@a:1,b"],
            "the name of the master is missing after the Sentinels; did you mean redis+sentinel://a:1,b/NAME?\n",
        ),
        (&["serve", "--port", "8081"], "set by --http ADDRESS, such as --http 127.0.0.1:8081"),
        (&["gateway", "--port=8081"], "set by --listen ADDRESS, such as --listen 127.0.0.1:8081"),
        (&["serve", "--redis", "redis://:hunter2@h"], "set by --store URL"),
        (&["serve", "--instances", "-1"], "--instances"),
        (&["chekc"], "unrecognized subcommand"),
        (&["serve", "--http", "999.0.0.1:80"], "--http ADDRESS"),
        (&["serve", "--http", ":8080"], "expected HOST:PORT, such as 127.0.0.1:8080 for this machine only"),
        (&["serve", "--resp", "6380"], "expected HOST:PORT, such as 127.0.0.1:6380 for this machine only"),
        (&["serve", "--admin", "localhost"], "expected HOST:PORT, such as 127.0.0.1:PORT"),
        (&["serve", "--http", "off", "--resp", "off", "--admin", "off"], "every listener is off"),
        (&["inspect", "k", "1/h", "--admin", "127.0.0.1:9180"], "did you mean http://127.0.0.1:9180?"),
        (&["inspect", "k", "1/h", "--admin", "localhost:9180"], "did you mean http://localhost:9180?"),
        (&["inspect", "k", "1/h", "--admin", "ann:hunter2@localhost:9180"], "without a user or password"),
        (
            &["serve", "--http", "off", "--resp", "off", "--otlp", "127.0.0.1:4318"],
            "did you mean http://127.0.0.1:4318?",
        ),
        (&["serve", "--admin-token-file", "absent"], "cannot read absent: no such file or directory"),
        (&["validate", "absent.toml"], "cannot read absent.toml: no such file or directory"),
    ] {
        let output = tidegate(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(phrase), "{arguments:?}: {said}");
        assert!(!said.contains("hunter2") && said.matches("127.0.0.1:1").count() <= 1, "{said}");
        assert!(!said.contains("os error"), "{said}");
    }
}

/// A file that cannot be read is not called invalid, and the reason is printed once.
#[test]
fn a_file_that_cannot_be_read_is_reported_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("directory.toml");
    std::fs::create_dir(&directory).unwrap();
    for (file, reason) in [
        ("absent.toml".to_owned(), "cannot read absent.toml: no such file or directory".to_owned()),
        (directory.display().to_string(), format!("cannot read {}: is a directory", directory.display())),
        ("tidegate.ini".to_owned(), "tidegate.ini: expected a file whose name ends in .toml, .yaml or .yml".to_owned()),
    ] {
        for arguments in
            [&["validate", &file][..], &["serve", "--config", &file], &["inspect", "k", "1/h", "--config", &file]]
        {
            let output = tidegate(arguments);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
            assert_eq!(said.matches(&reason).count(), 1, "{arguments:?}: {said}");
            assert!(!said.contains("is invalid"), "{arguments:?}: {said}");
        }
    }
}

/// A failure of the store is printed once, with the address and the reason, by every command that uses the store.
#[test]
fn a_failure_of_the_store_is_printed_once_with_the_address_and_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, format!("instances = 1\n{RULES}")).unwrap();
    let config = ["--config", file.to_str().unwrap()];
    let redis = Server::redis();
    let absent = format!("{}/99", redis.url().trim_end_matches('/'));
    for (store, expected) in
        [("redis://127.0.0.1:1", "connection refused"), (&absent, "the server does not have this database")]
    {
        let by_rule = ["inspect", "203.0.113.9", "--rule", "shorten"];
        for arguments in [
            &["check", "k", "1/h"][..],
            &["inspect", "k", "1/h"],
            &["reset", "k", "1/h"],
            &["ban", "k"],
            &["unban", "k"],
            &[&by_rule[..], &config[..]].concat(),
        ] {
            let output = tidegate(&[arguments, &["--store", store]].concat());
            let said = text(&output.stderr);
            assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), String::new()), "{said}");
            for phrase in [store, expected] {
                assert_eq!(said.matches(phrase).count(), 1, "{arguments:?}: {phrase}: {said}");
            }
            assert!(!said.contains("os error") && !said.contains("forbidden"), "{said}");
        }
    }
}

#[test]
fn the_script_and_every_help_text_are_printed() {
    let script = tidegate(&["script"]);
    assert!(text(&script.stdout).contains("TWIN OF"));
    for command in
        ["serve", "validate", "explain", "check", "inspect", "reset", "script", "boundary", "completions", "man"]
    {
        let help = tidegate(&[command, "--help"]);
        assert!(["Example:\n", "Examples:\n"].iter().any(|title| text(&help.stdout).contains(title)), "{command}");
    }
    let without_command = tidegate(&[]);
    assert_eq!(without_command.status.code(), Some(0));
    assert_eq!(text(&without_command.stdout), text(&tidegate(&["--help"]).stdout), "without a command: the help");
}

#[test]
fn serve_starts_without_options_and_serves_http_and_resp() {
    let serving = Serving::start(&[]);
    let allowed = serving.post(r#"{"key":"user:42","limit":"1/h"}"#);
    assert!(allowed.starts_with("HTTP/1.1 200 OK\r\n"), "{allowed}");
    assert!(allowed.contains("ratelimit-policy: \"per-hour\";q=1;w=3600\r\n"), "{allowed}");
    assert!(allowed.contains(r#"{"allowed":true,"source":"store","limits":[{"name":"per-hour","quota":1,"window_ms":3600000,"remaining":0"#), "{allowed}");
    assert_eq!(
        serving.send_inline("TIDEGATE.PEEK user:42 1/h").split(' ').take(4).collect::<Vec<_>>(),
        ["*5", ":1", ":1", ":0"]
    );
    let denied = serving.post(r#"{"key":"user:42","limit":"1/h"}"#);
    assert!(
        denied.starts_with("HTTP/1.1 429 Too Many Requests\r\n") && denied.contains("\r\nretry-after: "),
        "{denied}"
    );
    let wrong = serving.post(r#"{"key":"user:42","limit":"1/h","cots":2}"#);
    assert!(wrong.starts_with("HTTP/1.1 400 ") && wrong.contains("unknown field `cots`"), "{wrong}");
}

const RULES: &str = r#"
[[rules]]
name = "shorten"
match = { methods = ["POST"], path = "/shorten" }
by = ["ip"]
limits = [{ name = "main", limit = "2/h" }]
"#;

const POSTED: &str = r#"{"request":{"method":"POST","path":"/shorten","peer":"203.0.113.9"}}"#;

#[test]
fn serve_decides_requests_by_rules_and_a_broken_file_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES).unwrap();
    let serving = Serving::start(&["--config", file.to_str().unwrap()]);
    let statuses: Vec<bool> = (0..3).map(|_| serving.post(POSTED).starts_with("HTTP/1.1 200")).collect();
    assert_eq!(statuses, [true, true, false]);
    assert!(serving.post(POSTED).contains(r#""limits":[{"name":"main","rule":"shorten","quota":2"#));
    let other = POSTED.replace("POST", "GET");
    assert!(serving.post(&other).contains(r#"{"allowed":true,"source":"none","limits":[],"response":{"headers":{}}}"#));

    let quota = |serving: &Serving| {
        serving.post(&POSTED.replace("9\"", "10\"")).split("\"quota\":").nth(1).map(|rest| rest[..1].to_owned())
    };
    std::fs::write(&file, RULES.replace("2/h", "3/h")).unwrap();
    serving.reload("was reloaded");
    assert_eq!(quota(&serving).as_deref(), Some("3"), "the new quota is in force");
    assert!(serving.post(POSTED).starts_with("HTTP/1.1 200"), "two of three were used before the reload");
    assert!(serving.post(POSTED).starts_with("HTTP/1.1 429"), "they stay charged after the reload");
    std::fs::write(&file, RULES.replace("2/h", "0/h")).unwrap();
    serving.reload("the old rules stay in force");
    assert_eq!(quota(&serving).as_deref(), Some("3"));
    assert!(serving.post(POSTED).starts_with("HTTP/1.1 429"), "the counters are kept");
}

#[test]
fn serve_applies_the_plan_that_a_redis_hash_names() {
    let redis = Server::redis();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    let config = r#"
        store = "REDIS"
        instances = 1
        deadline = "2s"
        api_keys = "any"
        plans = { default = { limits = ["10/h"] }, pro = { limits = ["1000/h"] } }
        plan_sources = { redis_hash = "tidegate:plans" }
        rules = [{ name = "api", limits = "plan" }]
    "#;
    std::fs::write(&file, config.replace("REDIS", &redis.url())).unwrap();
    // The output of `printf %s acme | sha256sum`.
    let field = "api_key:822b33ad87c148a0a20a5ba7cd5ebcaa68d36a18e7aad165554903f52ca82757";
    redis.command(&["HSET", "tidegate:plans", field, "pro"]);
    let serving = Serving::start(&["--config", file.to_str().unwrap()]);
    let quota = |key: &str| {
        let headers = format!(r#""headers":{{"x-api-key":"{key}"}}"#);
        let request = format!(r#"{{"request":{{"method":"GET","path":"/","peer":"203.0.113.9",{headers}}}}}"#);
        let answer = serving.post(&request);
        answer.split("\"quota\":").nth(1).and_then(|rest| rest.split(',').next()).map(str::to_owned)
    };
    assert_eq!(quota("acme").as_deref(), Some("1000"));
    assert_eq!(quota("other").as_deref(), Some("10"));
}

#[test]
fn the_redis_hash_applies_to_listed_keys_only() {
    let redis = Server::redis();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    let config = r#"
        store = "REDIS"
        instances = 1
        deadline = "2s"
        keys = [{ key = "acme" }, { key = "globex", plan = "default" }]
        plans = { default = { limits = ["10/h"] }, anonymous = { limits = ["5/h"] }, pro = { limits = ["1000/h"] } }
        plan_sources = { redis_hash = "tidegate:plans" }
        rules = [{ name = "api", limits = "plan" }]
    "#;
    std::fs::write(&file, config.replace("REDIS", &redis.url())).unwrap();
    // The output of `printf %s KEY | sha256sum` for acme, globex and unlisted.
    for digest in [
        "822b33ad87c148a0a20a5ba7cd5ebcaa68d36a18e7aad165554903f52ca82757",
        "5bc1a08d28e40fe79ca3ecb077b3bd14ff00df9bad0c4a0d74ecd0805ecf0b1f",
        "d4010cacbafbb3d65ef7a55779575e0fc0d45d77d55c3219731674171f1178ae",
    ] {
        redis.command(&["HSET", "tidegate:plans", &format!("api_key:{digest}"), "pro"]);
    }
    let serving = Serving::start(&["--config", file.to_str().unwrap()]);
    for (key, quota) in [("acme", 1000), ("globex", 10), ("unlisted", 5)] {
        let request = format!(
            r#"{{"request":{{"method":"GET","path":"/","peer":"203.0.113.9","headers":{{"x-api-key":"{key}"}}}}}}"#
        );
        let answer = serving.post(&request);
        assert!(answer.contains(&format!("\"quota\":{quota},")), "{key}: {answer}");
    }
}

#[test]
fn serve_warns_about_rules_whose_units_cannot_be_refunded() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    let refunding = RULES.replace("by =", "charge = \"on_failure\"\nby =");
    let rules = format!("{refunding}{}", RULES.replace("\"shorten\"", "\"other\""));
    let start = |settings: &str| {
        std::fs::write(&file, format!("{settings}\n{rules}")).unwrap();
        Serving::start(&["--config", file.to_str().unwrap()])
    };
    // With counters in memory, the service has a secret of its own. The warning would precede the addresses.
    let silent = start("");
    assert!(!silent.output().contains("depends on the outcome"), "{}", silent.output());
    let redis = Server::redis();
    let shared = format!("store = \"{}\"\ninstances = 1", redis.url());
    let secret = "receipt_secret = \"0123456789abcdef\"";
    for (settings, phrase) in [
        (shared.clone(), "which clients report with a receipt"),
        (
            format!("{shared}\n{secret}\ntrusted_proxies = [\"10.0.0.0/8\"]"),
            "a proxy that uses forward-auth does not report it",
        ),
    ] {
        let warning = start(&settings).wait_for_log(phrase);
        assert!(warning.contains("WARN") && warning.contains("shorten") && !warning.contains("other"), "{warning}");
    }
    let with_secret = start(&format!("{shared}\n{secret}"));
    assert!(!with_secret.output().contains("depends on the outcome"), "{}", with_secret.output());
}

#[test]
fn serve_names_the_settings_that_explicit_checks_cannot_follow() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    let start = |settings: &str| {
        std::fs::write(&file, format!("{settings}\n{RULES}")).unwrap();
        Serving::start(&["--config", file.to_str().unwrap()])
    };
    let settings = "shadow = true\nbody = \"text\"\npath_bytes_max = 100\nanonymize = true\non_failure = \"allow\"\n\
                    [exempt]\npaths = [\"/health\"]\n[[bans]]\nby = \"ip\"\nvalue = \"198.51.100.7\"";
    let line = start(settings).wait_for_log("not to checks that name their key and limit");
    assert!(line.contains("INFO") && line.contains("no address, API key, path or rule"), "{line}");
    assert!(line.contains("anonymize, bans, body, exempt, path_bytes_max, shadow"), "{line}");
    assert!(!line.contains("on_failure") && !line.contains("198.51.100.7"), "{line}");
    let only_one = start("shadow = true").wait_for_log("not to checks that name their key and limit");
    assert!(only_one.contains("shadow") && !only_one.contains("body,"), "{only_one}");
    let others = start("on_failure = \"deny\"\nheaders = [\"x\"]");
    // The message would precede the addresses of the listeners.
    assert!(!others.output().contains("not to checks that name"), "{}", others.output());
}

#[test]
fn instances_on_the_command_line_override_the_number_that_is_counted() {
    let redis = Server::redis();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, format!("store = \"{}\"\n{RULES}", redis.url())).unwrap();
    let config = ["--config", file.to_str().unwrap()];
    let said = |more: &[&str]| {
        let serving = Serving::start(&[&config[..], more].concat());
        serving.wait_for_log("connected to the store");
        serving.reload("was reloaded");
        serving.until("/readyz", |answer| answer.body.contains(r#""reachable":true"#));
        let metrics = serving.visit("/metrics").body;
        let instances = metrics.lines().find_map(|line| line.strip_prefix("tidegate_instances ")).unwrap().to_owned();
        (instances, serving.output())
    };
    assert_eq!(said(&[]).0, "1");
    let (instances, said) = said(&["--instances", "3"]);
    assert_eq!(instances, "3");
    assert!(!said.contains("this setting changed"), "{said}");
}

#[test]
fn validate_underlines_the_place_and_shows_what_is_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES.replace("2/h", "0/h")).unwrap();
    let output = tidegate(&["validate", file.to_str().unwrap()]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("0/h") && said.contains("1 to 10000000"), "{said}");
    std::fs::write(&file, RULES).unwrap();
    let output = tidegate(&["validate", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("1 rule, 0 plans"), "{}", text(&output.stdout));
}
