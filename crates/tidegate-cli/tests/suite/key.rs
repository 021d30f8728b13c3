//! `tidegate key`, and the paths below `/v1/keys/` of the admin API: one customer's plan and limits at run time.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::process::Output;

use serde_json::Value;
use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::{Brand, Config, Server};

use tidegate_testkit::http::HttpResponse;
use tidegate_testkit::program::{Serving, command};

const RULES: &str = r#"
instances = 1
deadline = "20s"
[key_sources]
redis_hash = "tidegate:keys"
[plans]
anonymous = { limits = ["20/h"] }
default = { limits = ["30/h"] }
pro = { limits = ["30000/h"] }
[[keys]]
key = "planted-key-of-acme"
name = "acme"
[[rules]]
name = "api"
match = { path = "/api/*" }
limits = "plan"
[[rules]]
name = "export"
match = { path = "/export" }
limits = "plan"
cost = 5
[[rules]]
name = "partner"
match = { path = "/partner", groups = ["partners"] }
limits = ["40/h"]
"#;

/// The key of `initech`, and its field: the output of `printf %s planted-key-of-initech | sha256sum`.
const KEY: &str = "planted-key-of-initech";
const FIELD: &str = "api_key:8f7b38aafc1e6e66b995f86495e2c8432612de068b89cb8c2ac78a9413b92c7c";

struct Bench {
    redis: Server,
    _dir: tempfile::TempDir,
    file: String,
}

impl Bench {
    fn start(brand: Brand) -> Bench {
        let redis = Config::new(brand).start();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tidegate.toml");
        std::fs::write(&file, format!("store = \"{}\"\n{RULES}", redis.url())).unwrap();
        let file = file.to_str().unwrap().to_owned();
        let bench = Bench { redis, _dir: dir, file };
        bench.set(r#"{"name": "initech", "plan": "pro"}"#);
        bench
    }

    fn set(&self, value: &str) {
        self.redis.command(&["HSET", "tidegate:keys", FIELD, value]);
    }

    fn entry(&self) -> Value {
        serde_json::from_str(&self.redis.command(&["HGET", "tidegate:keys", FIELD]).text()).unwrap()
    }
}

fn tidegate(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output: Output =
        command().env("TIDEGATE_ADMIN_TOKEN", "a-token-for-tests-only").args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Returns the quota and the remaining units of a request to `path` with the key.
fn quota(serving: &Serving, path: &str) -> (u64, u64) {
    let body = serde_json::json!({ "request": {
        "method": "GET", "path": path, "peer": "203.0.113.9", "headers": { "x-api-key": KEY },
    } });
    let answer: Value = serde_json::from_str(&serving.check(&body.to_string()).body).unwrap();
    let limit = &answer["limits"][0];
    (limit["quota"].as_u64().unwrap(), limit["remaining"].as_u64().unwrap())
}

fn send(serving: &Serving, method: &str, path: &str, body: &str) -> HttpResponse {
    let mut client = tidegate_testkit::http::HttpClient::open(&serving.admin);
    client.ask(method, path, &[("authorization", "Bearer a-token-for-tests-only")], body)
}

#[test]
fn set_and_unset_are_in_force_on_every_instance_and_keep_the_counter() {
    for brand in Brand::ALL {
        let bench = Bench::start(brand);
        let instances = [(); 2].map(|()| Serving::start(&["--config", &bench.file]));
        let admin = format!("http://{}", instances[0].admin);
        let mut used = 0;
        let mut await_quota = |expected: u64| {
            for serving in &instances {
                eventually(
                    "the change is in force",
                    || {
                        let (quota, left) = quota(serving, "/api/x");
                        used += 1;
                        assert_eq!(left, quota - used, "the counter is kept");
                        quota
                    },
                    |quota| *quota == expected,
                );
            }
        };
        await_quota(30_000);
        for (options, expected) in [
            (&["set", "initech", "--limit", "99900/h"][..], 99_900),
            (&["unset", "initech", "--limits"], 30_000),
            (&["set", "initech", "--limit", "88800/h", "--limit", "5000/day"], 88_800),
            (&["set", "initech", "--plan", "default", "--limit", "77700/h"], 77_700),
        ] {
            for source in [["--admin", &admin], ["--config", &bench.file]] {
                let (code, out, err) = tidegate(&[&["key"], options, &source[..]].concat());
                assert_eq!(code, Some(0), "{out}{err}");
                assert!(out.starts_with("initech\n") && !out.contains("planted"), "{out}");
            }
            await_quota(expected);
        }
        assert_eq!(bench.entry(), serde_json::json!({ "name": "initech", "plan": "default", "limits": ["77700/h"] }));
        let log = instances[0].wait_for_log("the operator changed an API key");
        assert!(log.contains("INFO") && log.contains("initech") && !log.contains("planted"), "{log}");

        let shown = "initech\n  plan     default\n  limit    77700/h (per-hour)\n  field    api_key:8f7b38aa*\n";
        for source in [["--admin", &admin], ["--config", &bench.file]] {
            assert_eq!(tidegate(&[&["key", "show", "initech"], &source[..]].concat()).1, shown);
            assert_eq!(tidegate(&[&["key", "list"], &source[..]].concat()).1, shown);
            let json = tidegate(&[&["key", "list", "--json"], &source[..]].concat()).1;
            let json: Value = serde_json::from_str(&json).unwrap();
            assert_eq!((&json["has_more"], &json["keys"][0]["limits"][0]["limit"]), (&false.into(), &"77700/h".into()));
            let explained = ["explain", "GET", "/api/x", "-H", &format!("x-api-key: {KEY}")].map(str::to_owned);
            let explained: Vec<&str> = explained.iter().map(String::as_str).collect();
            let store = bench.redis.url();
            let store = if source[0] == "--config" { vec!["--store", &store] } else { Vec::new() };
            let said = tidegate(&[&explained[..], &source[..], &store].concat()).1;
            assert!(said.contains("plan     default (the API key's own limits)\n"), "{said}");
            assert!(said.contains("per-hour: 77700/h") && !said.contains("ignored"), "{said}");
            let said = tidegate(&[&["inspect", KEY, "--rule", "api"], &source[..]].concat()).1;
            assert!(said.contains("plan         default (the API key's own limits)\n"), "{said}");
            assert!(said.contains("of 77700\n"), "{said}");
        }
    }
}

#[test]
fn group_that_is_set_at_run_time_decides_which_rules_apply() {
    let bench = Bench::start(Brand::Redis);
    let serving = Serving::start(&["--config", &bench.file]);
    let admin = format!("http://{}", serving.admin);
    let body = serde_json::json!({ "request": {
        "method": "GET", "path": "/partner", "peer": "203.0.113.9", "headers": { "x-api-key": KEY },
    } });
    let quota = || {
        let answer: Value = serde_json::from_str(&serving.check(&body.to_string()).body).unwrap();
        answer["limits"][0]["quota"].as_u64()
    };
    assert_eq!(quota(), None, "the key is in no group");
    for source in [["--admin", &admin], ["--config", &bench.file]] {
        let inspect = || tidegate(&[&["inspect", "initech", "--rule", "partner"], &source[..]].concat());
        let (code, _, err) = inspect();
        assert!(code == Some(2) && err.contains("the rule counts only callers in the group partners"), "{err}");
        let (code, out, err) = tidegate(&[&["key", "set", "initech", "--group", "partners"], &source[..]].concat());
        assert!(code == Some(0) && out.contains("  groups   partners\n"), "{out}{err}");
        eventually("the group is in force", quota, |quota| *quota == Some(40));
        assert!(inspect().1.contains("of 40\n"));
        let (code, out, err) = tidegate(&[&["key", "unset", "initech", "--groups"], &source[..]].concat());
        assert!(code == Some(0) && !out.contains("groups"), "{out}{err}");
        eventually("the group is removed", quota, |quota| quota.is_none());
    }
}

#[test]
fn admin_api_sets_and_removes_one_part() {
    let bench = Bench::start(Brand::Redis);
    let serving = Serving::start(&["--config", &bench.file]);
    for (method, path, body, entry) in [
        ("PUT", "/plan", r#"{"plan": "default"}"#, r#"{"name":"initech","plan":"default"}"#),
        (
            "PUT",
            "/limits",
            r#"{"limits": ["9/h", {"name": "burst", "quota": 5, "window": "1s"}]}"#,
            r#"{"limits":["9/h",{"limit":"5/s","name":"burst"}],"name":"initech","plan":"default"}"#,
        ),
        ("DELETE", "/plan", "", r#"{"limits":["9/h",{"limit":"5/s","name":"burst"}],"name":"initech"}"#),
        ("PATCH", "", r#"{"plan": "pro", "limits": null}"#, r#"{"name":"initech","plan":"pro"}"#),
        ("PUT", "/limits", r#"{"limits": "8/h"}"#, r#"{"limits":["8/h"],"name":"initech","plan":"pro"}"#),
        ("DELETE", "/limits", "", r#"{"name":"initech","plan":"pro"}"#),
        ("PUT", "/groups", r#"{"groups": ["b", "a"]}"#, r#"{"groups":["b","a"],"name":"initech","plan":"pro"}"#),
        ("DELETE", "/groups", "", r#"{"name":"initech","plan":"pro"}"#),
    ] {
        let answer = send(&serving, method, &format!("/v1/keys/initech{path}"), body);
        assert_eq!(answer.status, 200, "{method} {path}: {answer:?}");
        assert_eq!(bench.entry().to_string(), entry, "{method} {path}");
    }
    let before = bench.entry();
    for (method, path, body, status, phrase) in [
        (
            "PUT",
            "/initech/plan",
            r#"{"plan": "gold"}"#,
            400,
            "there is no plan `gold`; expected one of anonymous, default, pro",
        ),
        ("PUT", "/initech/plan", r#"{"plan": null}"#, 400, "expected"),
        ("PUT", "/initech/limits", r#"{"limits": ["9/h", "9/fortnight"]}"#, 400, "limits: "),
        ("PUT", "/initech/limits", r#"{"limits": []}"#, 400, "limits: the key's own limits are empty"),
        ("PUT", "/initech/limits", r#"{"limits": ["4/h"]}"#, 400, "a cost of 5 never fits within the limit 4/h"),
        ("PATCH", "/initech", r#"{"plan": "default", "limits": ["x"]}"#, 400, "limits: "),
        ("PATCH", "/initech", "{}", 400, "expected plan, limits or groups"),
        ("PUT", "/initech/groups", r#"{"groups": ["a b"]}"#, 400, "groups: a group must be 1 to 64 letters"),
        ("PUT", "/initech/groups", r#"{"groups": null}"#, 400, "expected"),
        ("POST", "/initech", "{}", 405, ""),
        ("PUT", "/initech", "{}", 405, ""),
        ("GET", "/initech/limits", "", 405, ""),
        ("GET", "/initech/other", "", 404, ""),
        ("GET", "/nobody", "", 404, "no API key in the Redis hash tidegate:keys has the name nobody"),
        ("PUT", "/acme/plan", r#"{"plan": "pro"}"#, 409, "is listed in the configuration"),
    ] {
        let answer = send(&serving, method, &format!("/v1/keys{path}"), body);
        assert_eq!(answer.status, status, "{method} {path} {body}: {answer:?}");
        assert!(answer.body.contains(phrase), "{method} {path} {body}: {answer:?}");
    }
    assert_eq!(bench.entry(), before, "nothing was changed");
    let named = "api_key:4e738ca5563c06cfd0018299933d58db1dd8bf97f6973dc99bf6cdc64b5550bd";
    bench.redis.command(&["HSET", "tidegate:keys", named, r#"{"name": "initech"}"#]);
    let answer = send(&serving, "GET", "/v1/keys/initech", "");
    assert!(answer.status == 409 && answer.body.contains("2 API keys"), "{answer:?}");
}

#[test]
fn command_says_where_a_key_is_and_what_is_accepted() {
    let bench = Bench::start(Brand::Redis);
    let serving = Serving::start(&["--config", &bench.file]);
    let admin = format!("http://{}", serving.admin);
    for source in [["--admin", &admin], ["--config", &bench.file]] {
        for (options, code, phrase) in [
            (&["show", "nobody"][..], 1, "no API key in the Redis hash tidegate:keys has the name nobody"),
            (&["set", "nobody", "--plan", "pro"], 1, "has the name nobody"),
            (&["set", "acme", "--plan", "pro"], 2, "is listed in the configuration or its keys file"),
            (&["set", "initech", "--plan", "gold"], 2, "expected one of anonymous, default, pro"),
            (&["set", "initech", "--plan", "pro", "--limit", "5/fortnight"], 2, "limits: "),
            (&["set", "initech"], 2, "--plan"),
            (&["unset", "initech"], 2, "--plan"),
        ] {
            let (found, out, err) = tidegate(&[&["key"], options, &source[..]].concat());
            assert_eq!(found, Some(code), "{options:?}: {out}{err}");
            // A report is wrapped to the width of the terminal.
            let words = |text: &str| text.split_whitespace().filter(|word| *word != "│").collect::<Vec<_>>().join(" ");
            assert!(words(&err).contains(&words(phrase)) && out.is_empty(), "{options:?}: {out}{err}");
        }
    }
    assert_eq!(bench.entry(), serde_json::json!({ "name": "initech", "plan": "pro" }));
    let text = std::fs::read_to_string(&bench.file).unwrap();
    std::fs::write(&bench.file, text.replace("[key_sources]\nredis_hash = \"tidegate:keys\"\n", "")).unwrap();
    let (code, _, err) = tidegate(&["key", "list", "--config", &bench.file]);
    assert!(code == Some(2) && err.contains("redis_hash") && err.contains("key_sources"), "{err}");
}

/// The user of `tidegate script --acl` may change the hash of keys.
#[test]
fn user_of_the_printed_permissions_may_change_a_key() {
    let bench = Bench::start(Brand::Redis);
    let acl = tidegate(&["script", "--acl", "--config", &bench.file]).1.replace("PASSWORD", "for-tests-only");
    bench.redis.command(&acl.split_whitespace().collect::<Vec<_>>());
    let url = bench.redis.url().replace("redis://", "redis://tidegate:for-tests-only@");
    let serving = Serving::start(&["--config", &bench.file, "--store", &url]);
    let admin = format!("http://{}", serving.admin);
    let (code, out, err) = tidegate(&["key", "set", "initech", "--limit", "99900/h", "--admin", &admin]);
    assert_eq!(code, Some(0), "{out}{err}");
    eventually("the limit is in force", || quota(&serving, "/api/x").0, |quota| *quota == 99_900);
}
