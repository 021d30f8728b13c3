//! The commands `explain`, `inspect`, `reset`, `validate` and `completions`, alone and with a running instance.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::process::Output;

use tidegate_testkit::poll::eventually;
use tidegate_testkit::program::{Serving, command, ended};
use tidegate_testkit::server::Server;

const RULES: &str = r#"
[plans.anonymous]
limits = ["2/h"]
[plans.default]
limits = ["3/h"]
[plans.pro]
limits = ["30/h"]
[[keys]]
key = "planted-key-of-acme"
name = "acme"
plan = "pro"
[[rules]]
name = "shorten"
match = { methods = ["POST"], path = "/shorten" }
by = ["ip"]
limits = [{ name = "main", limit = "2/h" }]
[[rules]]
name = "api"
match = { path = "/api/*" }
limits = "plan"
"#;

const POSTED: &str = r#"{"request":{"method":"POST","path":"/shorten","peer":"203.0.113.9"}}"#;

fn tidegate(arguments: &[&str]) -> Output {
    command().args(arguments).output().unwrap()
}

fn with_token(arguments: &[&str]) -> Output {
    command().env("TIDEGATE_ADMIN_TOKEN", "a-token-for-tests-only").args(arguments).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn rules_file() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES).unwrap();
    let name = file.to_str().unwrap().to_owned();
    (dir, name)
}

#[test]
fn explain_shows_which_rules_apply_why_others_do_not_and_the_plan() {
    let (dir, file) = rules_file();
    let said = tidegate(&["explain", "--config", &file, "POST", "/shorten", "--peer", "203.0.113.9"]);
    assert_eq!(said.status.code(), Some(0), "{}", err(&said));
    for phrase in [
        "POST /shorten\n",
        "caller   identified by ip\n",
        "plan     anonymous (the caller has no known identity)\n",
        "applies  shorten (enforce), counts ip:***, costs 1\n",
        "  main: 2/h\n",
        "skipped  api: the path does not match /api/*\n",
    ] {
        assert!(out(&said).contains(phrase), "{phrase}: {}", out(&said));
    }
    let headers = dir.path().join("headers");
    std::fs::write(&headers, "x-api-key: planted-key-of-acme\n").unwrap();
    let headers = format!("@{}", headers.to_str().unwrap());
    let said = tidegate(&["explain", "--config", &file, "GET", "/api/x?y=1", "-H", &headers, "--json"]);
    let json = out(&said);
    assert!(
        json.contains(r#""key_name":"acme""#) && json.contains(r#"{"name":"pro","source":"the API key"}"#),
        "{json}"
    );
    assert!(json.contains("api_key:***") && !json.contains("planted"), "{json}");
    let said = tidegate(&["explain", "--config", &file, "POST", "/shorten", "--peer", "203.0.113.9", "--reveal"]);
    assert!(out(&said).contains("counts ip:203.0.113.9"), "{}", out(&said));
    // A URI without the slash would have a host and the path `/`.
    let said = tidegate(&["explain", "--config", &file, "POST", "shorten"]);
    assert_eq!((said.status.code(), out(&said)), (Some(2), String::new()));
    assert!(err(&said).contains("the path must begin with /"), "{}", err(&said));
    let said = tidegate(&["explain", "POST", "/shorten"]);
    assert_eq!(said.status.code(), Some(2));
    assert!(err(&said).contains("--config FILE") && err(&said).contains("--admin URL"), "{}", err(&said));
}

#[test]
fn explain_reads_counters_and_charges_nothing() {
    let (_dir, file) = rules_file();
    let redis = Server::redis();
    let serving = Serving::start(&["--config", &file, "--store", &redis.url()]);
    let explain = ["explain", "--config", &file, "POST", "/shorten", "--peer", "203.0.113.9", "--store", &redis.url()];
    for left in ["2 left", "1 left", "0 left: denied for "] {
        for _ in 0..2 {
            let said = tidegate(&explain);
            assert!(out(&said).contains(left), "{left}: {}{}", out(&said), err(&said));
        }
        serving.check(POSTED);
    }
    // The store of the file, as `inspect` and `reset` use it, and the option overrides it.
    std::fs::write(&file, format!("store = \"{}\"\ninstances = 1\n{RULES}", redis.url())).unwrap();
    let explain = ["explain", "--config", &file, "POST", "/shorten", "--peer", "203.0.113.9"];
    let said = tidegate(&explain);
    assert!(out(&said).contains("0 left: denied for "), "{}{}", out(&said), err(&said));
    let in_memory = tidegate(&[&explain[..], &["--store", "memory"]].concat());
    assert!(out(&in_memory).contains("2/h\n"), "{}{}", out(&in_memory), err(&in_memory));
}

/// If a Redis hash assigns the plan, `explain` reads the hash, or says that the hash may assign another plan.
#[test]
fn explain_reads_the_plan_from_the_redis_hash() {
    let (_dir, file) = rules_file();
    let plans = "instances = 1\napi_keys = \"any\"\n[plan_sources]\nredis_hash = \"tidegate:plans\"\n";
    std::fs::write(&file, format!("{plans}{RULES}")).unwrap();
    let redis = Server::redis();
    let explain = |more: &[&str]| {
        let said =
            with_token(&[&["explain", "GET", "/api/x", "-H", "x-api-key: planted-key-of-globex"], more].concat());
        out(&said) + &err(&said)
    };
    let (config, url) = (["--config", &file], redis.url());
    let with_store = [&config[..], &["--store", &url]].concat();
    let not_read =
        "plan     default (the Redis hash tidegate:plans was not read, and no other source assigns a plan)\n";
    let not_in_hash = "plan     default (the Redis hash tidegate:plans assigns no plan)\n";
    let in_hash = "plan     pro (the Redis hash tidegate:plans)\n";
    assert!(explain(&config).contains(not_read), "{}", explain(&config));
    assert!(explain(&with_store).contains(not_in_hash), "{}", explain(&with_store));

    let digest = "4b868c7c6c7d62fb93fb00e8825f1a1f2536099c83759aedeebef2ecb4fbafe2";
    redis.command(&["HSET", "tidegate:plans", &format!("api_key:{digest}"), "pro"]);
    let said = explain(&with_store);
    assert!(said.contains(in_hash) && said.contains("30/h, 30 left"), "{said}");
    let serving = Serving::start(&with_store);
    let admin = format!("http://{}", serving.admin);
    let said = explain(&["--admin", &admin]);
    assert!(said.contains(in_hash) && said.contains("30/h, 30 left") && !said.contains("planted"), "{said}");
}

/// Keys of a Redis hash identify their callers in `serve`, and `explain`, `inspect` and `reset` know them.
#[test]
fn keys_of_a_redis_hash_are_known_to_serve_explain_and_inspect() {
    let redis = Server::redis();
    let (_dir, file) = rules_file();
    let sources = "[key_sources]\nredis_hash = \"tidegate:keys\"\n";
    let config = format!("store = \"{}\"\ninstances = 1\ndeadline = \"20s\"\n{sources}{RULES}", redis.url());
    std::fs::write(&file, config).unwrap();
    // The output of `printf %s planted-key-of-initech | sha256sum`.
    let field = "api_key:8f7b38aafc1e6e66b995f86495e2c8432612de068b89cb8c2ac78a9413b92c7c";
    let key = "planted-key-of-initech";
    let serving = Serving::start(&["--config", &file]);
    let quota = || {
        let headers = format!(r#""headers":{{"x-api-key":"{key}"}}"#);
        let body = format!(r#"{{"request":{{"method":"GET","path":"/api/x","peer":"203.0.113.9",{headers}}}}}"#);
        let answer = serving.check(&body).body;
        answer.split("\"quota\":").nth(1).and_then(|rest| rest.split(',').next()).map(str::to_owned)
    };
    assert_eq!(quota().as_deref(), Some("2"), "an unknown key: the plan `anonymous`");
    redis.command(&["HSET", "tidegate:keys", field, r#"{"name": "initech", "plan": "pro"}"#]);
    eventually("the key is known", quota, |quota| quota.as_deref() == Some("30"));

    let (header, url) = (format!("x-api-key: {key}"), redis.url());
    let admin = format!("http://{}", serving.admin);
    let explain = |more: &[&str]| {
        let said = with_token(&[&["explain", "GET", "/api/x", "-H", &header], more].concat());
        out(&said) + &err(&said)
    };
    let not_read = explain(&["--config", &file, "--store", "memory"]);
    assert!(not_read.contains("key      not listed, and the Redis hash tidegate:keys was not read\n"), "{not_read}");
    let config = ["--config", &file];
    for said in [explain(&["--admin", &admin]), explain(&config), explain(&[&config[..], &["--store", &url]].concat())]
    {
        assert!(said.contains("caller   identified by api_key (initech)\n"), "{said}");
        assert!(said.contains("key      found in the Redis hash tidegate:keys\n"), "{said}");
        assert!(said.contains("plan     pro (the API key)\n") && said.contains("30/h"), "{said}");
        assert!(!said.contains("planted"), "{said}");
    }
    for source in [["--admin", &admin], ["--config", &file]] {
        let said = with_token(&[&["inspect", key, "--rule", "api"], &source[..]].concat());
        let said = out(&said) + &err(&said);
        assert!(said.contains("plan         pro (the API key)\n") && said.contains("of 30\n"), "{said}");
        assert!(!said.contains("planted"), "{said}");
    }
    let said = with_token(&["reset", key, "--rule", "api", "--admin", &admin]);
    assert_eq!((said.status.code(), out(&said).as_str()), (Some(0), "the counter was reset\n"), "{}", err(&said));

    // An entry that cannot be understood: the key stays known, under the default plan. Without a field it is unknown.
    redis.command(&["HSET", "tidegate:keys", field, r#"{"plann": "pro"}"#]);
    eventually("the plan is the default one", quota, |quota| quota.as_deref() == Some("3"));
    let warning = serving.wait_for_log("a part of the entry of an API key is ignored");
    assert!(warning.contains("WARN") && warning.contains("api_key:8f7b38aa*"), "{warning}");
    assert!(!warning.contains("planted") && !warning.contains(field), "{warning}");
    for said in [explain(&["--admin", &admin]), explain(&["--config", &file, "--store", &url])] {
        assert!(
            said.contains("ignored  the entry has an unknown field; expected name, plan, limits, groups and exempt\n"),
            "{said}"
        );
        assert!(said.contains("caller   identified by api_key\n"), "{said}");
    }
    redis.command(&["HDEL", "tidegate:keys", field]);
    eventually("the key is unknown", quota, |quota| quota.as_deref() == Some("2"));
    let said = explain(&["--config", &file, "--store", &url]);
    assert!(said.contains("not found in the Redis hash tidegate:keys"), "{said}");
}

#[test]
fn a_running_instance_explains_inspects_and_resets() {
    let (_dir, file) = rules_file();
    let serving = Serving::start(&["--config", &file]);
    (0..3).for_each(|_| drop(serving.check(POSTED)));
    let url = format!("http://{}", serving.admin);
    let said = with_token(&["explain", "--admin", &url, "POST", "/shorten", "--peer", "203.0.113.9", "--reveal"]);
    assert!(
        out(&said).contains("counts ip:203.0.113.9") && out(&said).contains("0 left: denied"),
        "{}{}",
        out(&said),
        err(&said)
    );

    let seen = with_token(&["inspect", "ip:203.0.113.9", "--rule", "shorten", "--admin", &url]);
    assert!(out(&seen).contains("shorten main") && out(&seen).contains("0 of 2"), "{}{}", out(&seen), err(&seen));
    let reset = with_token(&["reset", "ip:203.0.113.9", "main", "--rule", "shorten", "--admin", &url, "--json"]);
    let report = "{\"counters\":1,\"key\":\"ip:203.0.113.9\",\"reset\":true}\n";
    assert_eq!((reset.status.code(), out(&reset).as_str()), (Some(0), report), "{}", err(&reset));
    assert_eq!(serving.check(POSTED).status, 200);

    serving.check(r#"{"key":"user 42&x","limit":"5/min token-bucket"}"#);
    let seen = with_token(&["inspect", "user 42&x", "5/min token-bucket", "--admin", &url, "--json"]);
    assert!(out(&seen).contains(r#""remaining":4"#), "{}{}", out(&seen), err(&seen));
    serving.check(r#"{"request":{"method":"GET","path":"/api/x","peer":"::1"}}"#);
    let plan = with_token(&["inspect", "::1", "--rule", "api", "--plan", "pro", "--admin", &url]);
    let report = "ip:::/64\n  plan         pro (given)\napi per-hour\n  limit        30/h\n  remaining    29 of 30\n";
    assert!(out(&plan).starts_with(report), "{}{}", out(&plan), err(&plan));
}

/// A header may have several lines. All of them are used, with a file and with an instance.
#[test]
fn explain_takes_every_line_of_a_header_from_a_file_and_from_an_instance() {
    let (_dir, file) = rules_file();
    let proxies = "trusted_proxies = [\"127.0.0.1\", \"10.0.0.0/8\"]\n";
    std::fs::write(&file, format!("{proxies}{RULES}")).unwrap();
    let serving = Serving::start(&["--config", &file]);
    let url = format!("http://{}", serving.admin);
    for lines in [["203.0.113.9", "10.0.0.1"], ["198.51.100.7", "203.0.113.9, 10.0.0.1"]] {
        let [first, second] = [format!("x-forwarded-for: {}", lines[0]), format!("X-Forwarded-For: {}", lines[1])];
        let request = ["explain", "POST", "/shorten", "--peer", "127.0.0.1", "--reveal", "-H", &first, "-H", &second];
        for place in [["--config", &file], ["--admin", &url]] {
            let said = with_token(&[&request[..], &place[..]].concat());
            assert!(out(&said).contains("counts ip:203.0.113.9"), "{place:?}: {}{}", out(&said), err(&said));
        }
    }
}

#[test]
fn a_refusal_of_an_instance_exits_with_two_and_its_message() {
    let serving = Serving::start(&[]);
    let url = format!("http://{}", serving.admin);
    let inspect = |url: &str| ["inspect", "k", "1/h", "--admin", url].map(str::to_owned);
    let run = |arguments: [String; 5], token: &str| {
        command().env("TIDEGATE_ADMIN_TOKEN", token).args(arguments).output().unwrap()
    };
    for (output, phrase) in [
        (tidegate(&["inspect", "k", "1/h", "--admin", &url]), "$TIDEGATE_ADMIN_TOKEN"),
        (run(inspect(&url), "planted-wrong-token-x"), "does not accept the token: it is wrong"),
        (run(inspect(&url), "planted-wrong-token-x"), "--admin-token-file"),
        (
            run(inspect("http://127.0.0.1:1"), "planted-wrong-token-x"),
            "cannot reach the admin listener http://127.0.0.1:1: connection refused",
        ),
        (run(inspect("ftp://127.0.0.1"), "planted-wrong-token-x"), "http://127.0.0.1:9180"),
        (run(inspect("http://ann:planted@127.0.0.1:1"), "planted-wrong-token-x"), "without a user or password"),
        (run(inspect("http://planted@127.0.0.1:1"), "planted-wrong-token-x"), "without a user or password"),
        (with_token(&["inspect", "k", "1/fortnight", "--admin", &url]), "us, ms, s, min, h, day, week"),
        (with_token(&["explain", "GET", "/", "--admin", &url]), "start it with --config FILE"),
        (tidegate(&["inspect", "k", "--rule", "x"]), "--config FILE, or a running instance with --admin URL"),
        (tidegate(&["reset", "k", "1/h", "--rule", "x", "--store", "redis://127.0.0.1:1"]), "--config FILE"),
        (tidegate(&["explain", "GET", "/"]), "--config"),
        (tidegate(&["explain", "--config", "absent.toml", "GET", "/"]), "absent.toml"),
        (tidegate(&["explain", "--config", "absent.toml", "GET", "/", "-H", "planted"]), "NAME: VALUE"),
    ] {
        let said = err(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(phrase), "{phrase}: {said}");
        assert!(!said.contains("planted"), "{said}");
    }
}

#[test]
fn address_that_is_not_an_admin_listener_is_named_with_the_one_to_use() {
    let serving = Serving::start(&[]);
    let url = format!("http://{}", serving.http);
    for arguments in
        [&["inspect", "k", "1/h"][..], &["reset", "k", "1/h"], &["ban", "user:42"], &["explain", "GET", "/"]]
    {
        let output = with_token(&[arguments, &["--admin", &url]].concat());
        let said = err(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(&format!("{url} is not an admin listener")), "{said}");
        assert!(said.contains("the address on the `admin` line that `tidegate serve` prints"), "{said}");
    }
}

/// With `--config`, the commands use the counters under the configured prefix.
#[test]
fn inspect_reset_and_check_use_the_store_and_prefix_of_the_configuration() {
    let redis = Server::redis();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, format!("store = \"{}\"\nprefix = \"shop\"\ninstances = 1\n", redis.url())).unwrap();
    let config = ["--config", file.to_str().unwrap()];
    let serving = Serving::start(&config);
    serving.check(r#"{"key":"user:42","limit":"10/h","cost":4}"#);
    let ask = |command: &str, more: &[&str]| {
        let said = tidegate(&[&[command, "user:42", "10/h"], more].concat());
        assert_eq!(said.status.code(), Some(0), "{}", err(&said));
        out(&said) + &err(&said)
    };
    assert!(ask("inspect", &config).contains("6 of 10"), "{}", ask("inspect", &config));
    let other = tidegate(&["inspect", "user:42", "10/h", "--store", &redis.url()]);
    let nothing = "no such counter: nothing is counted for user:42 under the limit 10/h\n";
    assert_eq!((other.status.code(), &*out(&other)), (Some(1), nothing), "another prefix is another counter");
    assert!(ask("check", &config).contains("5 of 10"));
    assert_eq!(ask("reset", &config), "the counter was reset\n", "no other output");
    assert!(serving.check(r#"{"key":"user:42","limit":"10/h"}"#).body.contains(r#""remaining":9"#));
}

/// The counters of a rule are found in the store of the configuration, for a client named in any way, without and with
/// `anonymize`. The counter that denies is deleted.
#[test]
fn inspect_and_reset_use_the_counters_of_a_rule_in_the_store() {
    const BY_ADDRESS: &[&str] = &["203.0.113.9", "ip:203.0.113.9"];
    const BY_KEY: &[&str] = &["acme", "planted-key-of-acme", "api_key:#57ce8399c61a3dee7ba0700fcededd2a"];
    let anonymize = "anonymize = { secret = \"planted-secret-of-32-characters!\", rotate = \"never\" }\n";
    let by_key = r#"{"request":{"method":"GET","path":"/api/x","peer":"203.0.113.7","headers":{"x-api-key":"planted-key-of-acme"}}}"#;
    for anonymize in ["", anonymize] {
        let redis = Server::redis();
        let (_dir, file) = rules_file();
        let head = format!("store = \"{}\"\ninstances = 1\ndeadline = \"2s\"\n{anonymize}", redis.url());
        std::fs::write(&file, format!("{head}{}", RULES.replace("30/h", "1/h"))).unwrap();
        let serving = Serving::start(&["--config", &file]);
        let admin = format!("http://{}", serving.admin);
        for (rule, request, clients, left) in
            [("shorten", POSTED, BY_ADDRESS, "0 of 2"), ("api", by_key, BY_KEY, "0 of 1")]
        {
            for client in clients {
                for place in [["--config", &file], ["--admin", &admin]] {
                    let run =
                        |command: &str| with_token(&[&[command, client, "--rule", rule][..], &place[..]].concat());
                    let is_text = |output: &Output, code: i32, text: &str| {
                        let said = out(output) + &err(output);
                        assert_eq!(output.status.code(), Some(code), "{client} {place:?}: {said}");
                        assert!(said.contains(text) && !said.contains("planted"), "{client} {place:?}: {said}");
                    };
                    for command in ["inspect", "reset"] {
                        is_text(&run(command), 1, "no such counter: nothing is counted for ");
                        is_text(&run(command), 1, &format!(" under rule {rule}\n"));
                    }
                    while serving.check(request).status == 200 {}
                    is_text(&run("inspect"), 0, left);
                    is_text(&run("reset"), 0, "the counter was reset\n");
                    // The instance caches the denial for up to a second.
                    eventually("the request is allowed", || serving.check(request).status, |status| *status == 200);
                    is_text(&run("reset"), 0, "the counter was reset\n");
                }
            }
        }
    }
}

/// `inspect` shows the plan and where it is assigned, and bans in the configuration and in the store.
#[test]
fn inspect_shows_the_plan_and_the_ban_of_a_client() {
    let redis = Server::redis();
    let (_dir, file) = rules_file();
    let more = r#"
[[keys]]
key = "planted-key-of-globex"
name = "globex"
[[bans]]
by = "ip"
value = "198.51.100.0/24"
reason = "scraper"
[plan_sources]
redis_hash = "tidegate:plans"
"#;
    let config = format!("store = \"{}\"\ninstances = 1\n{RULES}{more}", redis.url());
    std::fs::write(&file, config).unwrap();
    let inspect = |client: &str, rule: &str| {
        let said = tidegate(&["inspect", client, "--rule", rule, "--config", &file]);
        out(&said) + &err(&said)
    };
    for (client, rule, expected) in [
        ("acme", "api", "  plan         pro (the API key)\nno such counter: "),
        ("globex", "api", "  plan         default (the Redis hash tidegate:plans assigns no plan)\n"),
        ("203.0.113.9", "api", "ip:203.0.113.9\n  plan         anonymous (the caller has no known identity)\n"),
        ("198.51.100.7", "shorten", "ip:198.51.100.7\n  refused      banned: scraper\nno such counter: "),
    ] {
        assert!(inspect(client, rule).contains(expected), "{client}: {}", inspect(client, rule));
    }
    // The output of `printf %s planted-key-of-globex | sha256sum`.
    let field = "api_key:4b868c7c6c7d62fb93fb00e8825f1a1f2536099c83759aedeebef2ecb4fbafe2";
    redis.command(&["HSET", "tidegate:plans", field, "pro"]);
    assert!(
        inspect("globex", "api").contains("plan         pro (the Redis hash tidegate:plans)\n"),
        "{}",
        inspect("globex", "api")
    );
    assert_eq!(tidegate(&["ban", "ip:203.0.113.9", "--for", "1h", "--config", &file]).status.code(), Some(0));
    let said = inspect("203.0.113.9", "shorten");
    assert!(said.contains("  refused      ip:203.0.113.9 is banned in the store for "), "{said}");
    let inspect = ["inspect", "ip:203.0.113.9", "10/h", "--store", &redis.url()];
    assert!(!out(&tidegate(&inspect)).contains("banned"), "the client is banned, not the key of explicit checks");
    assert_eq!(tidegate(&["ban", "--key", "ip:203.0.113.9", "--config", &file]).status.code(), Some(0));
    assert!(out(&tidegate(&inspect)).contains("ip:203.0.113.9 is banned in the store permanently"));
}

/// A store that does not answer is reported in one line with its address. Everything else is explained.
#[test]
fn explain_names_the_store_that_does_not_answer() {
    let (_dir, file) = rules_file();
    let store = ["--config", &file, "--store", "redis://:planted@127.0.0.1:1"];
    let said = tidegate(&[&["explain", "POST", "/shorten", "--peer", "203.0.113.9"][..], &store[..]].concat());
    let line = "  unknown  remaining units: cannot reach the store redis://127.0.0.1:1: connection refused\n";
    assert!(out(&said).contains(line) && out(&said).contains("applies  shorten"), "{}{}", out(&said), err(&said));
    assert!(!(out(&said) + &err(&said)).contains("planted"));
}

#[test]
fn a_client_that_a_rule_does_not_count_is_refused() {
    let redis = Server::redis();
    let (_dir, file) = rules_file();
    let two = "[[keys]]\nkey = \"planted-1\"\nname = \"twice\"\n[[keys]]\nkey = \"planted-2\"\nname = \"twice\"\n";
    std::fs::write(&file, format!("instances = 1\n{RULES}{two}")).unwrap();
    for (client, rule, phrase) in [
        ("planted-unknown-key", "api", "unknown client; expected an address, a network, an API key or the name of one"),
        ("ip:***", "shorten", "the subject is masked"),
        ("acme", "shorten", "the rule counts by ip; specify the whole subject"),
        ("twice", "api", "2 API keys have this name"),
        ("203.0.113.9", "shortn", "unknown rule; expected one of shorten, api"),
        ("user:42", "api", "add --plan NAME"),
    ] {
        for command in ["inspect", "reset"] {
            if (command, client) == ("reset", "user:42") {
                continue; // deletes the counters of all plans
            }
            let said = tidegate(&[command, client, "--rule", rule, "--config", &file, "--store", &redis.url()]);
            assert_eq!((said.status.code(), &*out(&said)), (Some(2), ""), "{command} {client}: {}", err(&said));
            assert!(err(&said).contains(phrase) && !err(&said).contains("planted"), "{client}: {}", err(&said));
        }
    }
}

#[test]
fn inspect_and_reset_refuse_the_memory_store() {
    let (_dir, file) = rules_file();
    for command in ["inspect", "reset"] {
        for store in [&[][..], &["--store", "memory"], &["--config", &file]] {
            let said = tidegate(&[&[command, "user:42", "10/h"], store].concat());
            assert_eq!((said.status.code(), out(&said).as_str()), (Some(2), ""), "{command} {store:?}");
            for option in ["--store URL", "--config FILE", "--admin URL"] {
                assert!(err(&said).contains(option), "{}", err(&said));
            }
        }
    }
}

/// Without a store, `check` would count in memory of its own and allow everything.
#[test]
fn check_needs_a_store_unless_memory_is_chosen() {
    let (_dir, file) = rules_file();
    let check = |more: &[&str]| tidegate(&[&["check", "user:42", "10/h"], more].concat());
    for store in [&[][..], &["--config", &file]] {
        let said = check(store);
        assert_eq!((said.status.code(), &*out(&said)), (Some(2), ""), "{store:?}");
        assert!(err(&said).contains("no store was given") && err(&said).contains("--store memory"), "{}", err(&said));
    }
    for variable in ["TIDEGATE_STORE", "REDIS_URL"] {
        let said = command().args(["check", "user:42", "10/h"]).env(variable, "memory").output().unwrap();
        assert_eq!(said.status.code(), Some(2), "{variable}");
    }
    let said = check(&["--store", "memory"]);
    assert!(said.status.code() == Some(0) && out(&said).contains("9 of 10"), "{}{}", out(&said), err(&said));
    assert_eq!(check(&["--store", "memory", "--cost", "11"]).status.code(), Some(1));
    assert!(out(&tidegate(&["check", "--help"])).contains("--store memory"));
}

#[test]
fn an_empty_key_is_refused() {
    for arguments in
        [&["check", "", "10/h"][..], &["inspect", "", "10/h"], &["reset", "", "10/h"], &["ban", ""], &["unban", ""]]
    {
        let said = tidegate(&[arguments, &["--store", "memory"]].concat());
        assert_eq!((said.status.code(), &*out(&said)), (Some(2), ""), "{arguments:?}");
        assert!(err(&said).contains("a value is required for '"), "{arguments:?}: {}", err(&said));
    }
}

/// `validate` and a reload reject every store URL that `serve` rejects at the start.
#[test]
fn a_store_that_serve_refuses_is_refused_by_validate_and_by_a_reload() {
    let (_dir, file) = rules_file();
    let serving = Serving::start(&["--config", &file]);
    let forms = "expected redis://[user:password@]host[:port][/database]";
    for (url, expected) in [
        ("redis+cluster://:planted@h:1/2", forms),
        ("redis+sentinel://:planted@h", "did you mean redis+sentinel://h/NAME?"),
        ("redis://u:planted@h:xx", forms),
    ] {
        let text = format!("store = \"{url}\"\ninstances = 1\n{RULES}");
        std::fs::write(&file, text).unwrap();
        let reloaded = serving.operate("POST", "/v1/reload");
        assert_eq!(reloaded.status, 422, "{reloaded:?}");
        assert!(reloaded.body.contains("invalid-store") && !reloaded.body.contains("planted"), "{reloaded:?}");
        let closed = ["--http", "off", "--resp", "off", "--admin", "off"];
        let written = command().args(["validate", &file]).output().unwrap();
        let served = ended(command().args(["serve", "--config", &file]).args(closed));
        std::fs::write(&file, RULES).unwrap();
        let given = command().args(["validate", &file]).env("TIDEGATE_STORE", url).output().unwrap();
        for said in [written, served, given] {
            assert_eq!(said.status.code(), Some(2), "{}", err(&said));
            let said = out(&said) + &err(&said);
            assert!(said.contains(expected) && !said.contains("planted"), "{said}");
            assert!(said.contains("memory") || expected != forms, "{said}");
        }
    }
}

#[test]
fn validate_prints_counts_and_each_error_once() {
    let (_dir, file) = rules_file();
    let validate = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let said = tidegate(&["validate", &file]);
        out(&said) + &err(&said)
    };
    assert!(validate(RULES).contains(" is valid: 2 rules, 3 plans\n"));
    let one = "[plans.default]\nlimits = [\"1/h\"]\n[[rules]]\nname = \"a\"\nlimits = \"plan\"\n";
    assert!(validate(one).contains(" is valid: 1 rule, 1 plan, 1 warning\n"), "{}", validate(one));
    let said = validate(&RULES.replace("30/h", "0/h"));
    assert!(said.contains(" is invalid: 1 error\n"), "{said}");
    assert_eq!(said.matches("expected a quota").count(), 1, "{said}");
    let said = validate(&RULES.replace("\"30/h", "\"0/h").replace("\"3/h", "\"0/h"));
    assert!(said.contains(" is invalid: 2 errors\n"), "{said}");
    assert_eq!(said.matches("expected a quota").count(), 2, "{said}");
    let said = validate("rules = [");
    assert_eq!(said.matches("line 1, column").count(), 1, "{said}");
}

#[test]
fn validate_prints_json() {
    let (_dir, file) = rules_file();
    let good = tidegate(&["validate", "--json", &file]);
    assert_eq!(good.status.code(), Some(0));
    assert!(out(&good).contains(r#""valid":true"#) && out(&good).contains(r#""rules":2"#), "{}", out(&good));
    std::fs::write(&file, RULES.replace("2/h", "0/h")).unwrap();
    let bad = tidegate(&["validate", "--json", &file]);
    assert_eq!(bad.status.code(), Some(2));
    let said = out(&bad);
    assert!(said.contains(r#""valid":false"#) && said.contains(r#""code":"invalid-limit""#), "{said}");
    assert!(said.contains(r#""line":3"#) && !said.contains("planted"), "{said}");
}

#[test]
fn denied_warnings_exit_with_one_and_are_printed_as_warnings() {
    let (_dir, file) = rules_file();
    let validate = |text: &str, arguments: &[&str]| {
        std::fs::write(&file, text).unwrap();
        let output = tidegate(&[&["validate", &file], arguments].concat());
        (output.status.code(), out(&output), err(&output))
    };
    let good = "[[rules]]\nname = \"a\"\nlimits = [\"10/min\"]\n";
    let warned = "[[rules]]\nname = \"a\"\nlimits = [\"10/min\", \"1000/min\"]\n";
    let advised = &format!("shadow = true\n{good}");
    let broken = &format!("instances = 0\n{warned}");
    let deny: &[&str] = &["--deny-warnings"];
    for (text, arguments, code) in [
        (good, deny, 0),
        (warned, &[][..], 0),
        (warned, deny, 1),
        (warned, &["--deny-warnings", "--json"], 1),
        (warned, &["--json"], 0),
        (broken, deny, 2),
        (broken, &["--deny-warnings", "--json"], 2),
    ] {
        let said = validate(text, arguments);
        assert_eq!(said.0, Some(code), "{arguments:?} {said:?}");
    }
    let (_, printed, said) = validate(warned, deny);
    assert!(said.starts_with("Warning: redundant-limit\n"), "{said}");
    assert!(printed.contains(" is valid: 1 rule, 0 plans, 1 warning\n"), "{printed}");
    let (_, _, said) = validate(broken, deny);
    assert!(said.contains("\nWarning: redundant-limit\n") && said.contains("\nError: invalid-value\n"), "{said}");
    let (code, _, said) = validate(advised, deny);
    assert!(code == Some(0) && said.starts_with("Advice: shadow-on\n"), "{code:?} {said}");
}

#[test]
fn the_example_of_all_settings_is_valid_as_it_stands() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.toml");
    let output = tidegate(&["validate", file, "--deny-warnings"]);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
}

#[test]
fn completions_are_printed_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let printed = tidegate(&["completions", shell]);
        assert!(out(&printed).contains("explain") && out(&printed).contains("admin-token-file"), "{shell}");
    }
    assert_eq!(tidegate(&["completions", "csh"]).status.code(), Some(2));
}

#[test]
fn success_exits_with_zero_and_invalid_arguments_with_two() {
    for (arguments, code) in [
        (&["--help"][..], 0),
        (&["--version"], 0),
        (&["serve", "--help"], 0),
        (&["--nonsense"], 2),
        (&["check"], 2),
        (&["check", "k"], 2),
        (&["serve", "--drain", "soon"], 2),
        (&["serve", "--connections", "0"], 2),
        (&["inspect", "k", "1/h", "--admin", "http://x", "--store", "memory"], 2),
    ] {
        assert_eq!(tidegate(arguments).status.code(), Some(code), "{arguments:?}");
    }
}
