//! Planted secrets appear nowhere: in no log at any level, no response, no metric, no command line, no key in the
//! store.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use serde_json::json;
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::{Serving, command, ended};
use tidegate_testkit::server::{Brand, Config, Server};

const STORE_PASSWORD: &str = "planted-store-password";
const RESP_PASSWORD: &str = "planted-resp-password";
const ADMIN_TOKEN: &str = "planted-admin-token-which-is-long";
const API_KEY: &str = "planted-api-key";
const OTHER_KEY: &str = "planted-key-in-the-keys-file";
const UNKNOWN_KEY: &str = "planted-key-that-nobody-knows";
const JWT_KEY: &str = "planted-jwt-key-which-is-long-enough-for-hs256";
const SALT: &str = "planted-salt-for-pseudonyms";
const USER: &str = "planted-user";
const ADDRESSES: [&str; 2] = ["203.0.113.77", "2001:db8:77::1"];

const CONFIG: &str = r#"
keys_file = "keys.toml"

[anonymize]
secret_env = "PLANTED_SALT"

[jwt]
algorithm = "HS256"
key_env = "PLANTED_JWT_KEY"

[[keys]]
key = "planted-api-key"
plan = "default"

[plans.default]
limits = ["5/h"]

[plans.anonymous]
limits = ["3/h"]

[[rules]]
name = "all"
by = ["caller"]
limits = "plan"

[[rules]]
name = "login"
match = { path = "/login" }
by = ["ip"]
limits = ["2/h"]
on_failure = "deny"
"#;

const KEYS: &str = "[[keys]]\nkey = \"planted-key-in-the-keys-file\"\nplan = \"default\"\n";

/// All collected output, each text with the place where it appeared.
#[derive(Default)]
struct Seen(Vec<(String, String)>);

impl Seen {
    fn add(&mut self, place: impl Into<String>, text: impl Into<String>) {
        self.0.push((place.into(), text.into()));
    }

    fn holds_none_of(&self, secrets: &[String]) {
        for (place, text) in &self.0 {
            for secret in secrets {
                let at = text.find(secret.as_str());
                assert_eq!(at, None, "{secret} in {place}: {}", &text[at.unwrap_or(0).saturating_sub(80)..]);
            }
        }
    }
}

/// Returns a token of the user, signed with HS256.
fn token(key: &str) -> String {
    let parts = [json!({ "alg": "HS256", "typ": "JWT" }), json!({ "sub": USER, "exp": 4_102_444_800_u64 })];
    let signed = parts.map(|part| URL_SAFE_NO_PAD.encode(part.to_string())).join(".");
    let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()), signed.as_bytes());
    format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
}

fn start(redis: &Server, dir: &Path, form: &str) -> Serving {
    std::fs::write(dir.join("tidegate.toml"), CONFIG).unwrap();
    std::fs::write(dir.join("keys.toml"), KEYS).unwrap();
    let mut command = command();
    command.env("TIDEGATE_STORE", format!("redis://:{STORE_PASSWORD}@{}", redis.addr()));
    command.env("TIDEGATE_ADMIN_TOKEN", ADMIN_TOKEN).env("TIDEGATE_RESP_PASSWORD", RESP_PASSWORD);
    command.env("PLANTED_SALT", SALT).env("PLANTED_JWT_KEY", JWT_KEY).env("TIDEGATE_LOG", "trace");
    Serving::start_as(command, &["--config", dir.join("tidegate.toml").to_str().unwrap(), "--log", form])
}

/// Sends requests of every kind: known and unknown callers, users, addresses, until they are denied, and invalid ones.
fn send_everything(serving: &Serving, seen: &mut Seen, when: &str) {
    let bearer = format!("Bearer {}", token(JWT_KEY));
    let forged = format!("Bearer {}", token("planted-forger-key-which-is-long-enough"));
    let mut client = HttpClient::open(&serving.http);
    for headers in [
        json!({ "x-api-key": API_KEY }),
        json!({ "x-api-key": OTHER_KEY }),
        json!({ "x-api-key": UNKNOWN_KEY }),
        json!({ "authorization": bearer }),
        json!({ "authorization": forged }),
        json!({ "authorization": format!("Bearer {API_KEY}") }),
        json!({ "x-api-key": format!("{API_KEY}\n") }),
        json!({}),
    ] {
        for peer in ADDRESSES {
            for path in ["/", "/login"] {
                let request = json!({ "request": { "method": "GET", "path": path, "headers": headers, "peer": peer } });
                let answer = client.ask("POST", "/v1/check", &[("x-api-key", API_KEY)], &request.to_string());
                seen.add(format!("an answer {when}"), format!("{answer:?}"));
            }
        }
    }
    for body in ["", "nonsense", r#"{"request":{"method":"G T","path":"/","peer":"::1"}}"#] {
        let answer = client.ask("POST", "/v1/check", &[("authorization", &bearer), ("x-api-key", API_KEY)], body);
        seen.add(format!("a refusal {when}"), format!("{answer:?}"));
    }
    let mut client = HttpClient::open(&serving.admin);
    let right = format!("Bearer {ADMIN_TOKEN}");
    let wrong = format!("Bearer {ADMIN_TOKEN}x");
    for bearer in [&right, &wrong] {
        for path in ["/v1/rules", "/v1/keys", "/metrics", "/readyz", "/healthz", "/nowhere"] {
            let answer = client.ask("GET", path, &[("authorization", bearer)], "");
            seen.add(format!("{path} {when}"), format!("{answer:?}"));
        }
    }
    for command in [
        format!("AUTH {RESP_PASSWORD}x"),
        format!("HELLO 3 AUTH default {RESP_PASSWORD}x"),
        format!("AUTH {RESP_PASSWORD}"),
        format!("TIDEGATE.CHECK {API_KEY} 10/min"),
        format!("AUTH a b {RESP_PASSWORD}"),
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        seen.add(format!("a reply {when}"), format!("{:?}", serving.connect().call(&words)));
    }
}

fn planted_secrets_appear_nowhere(form: &str) {
    let redis = Config::new(Brand::Redis).set("requirepass", STORE_PASSWORD).start();
    let dir = tempfile::tempdir().unwrap();
    let mut serving = start(&redis, dir.path(), form);
    let mut seen = Seen::default();
    send_everything(&serving, &mut seen, "while the store is up");
    seen.add("the store's keys", format!("{:?}", redis.command(&["KEYS", "*"])));

    // Invalid files, with the error right beside a secret.
    for broken in [
        CONFIG.replace("key = \"planted-api-key\"", "key = \"planted-api-key"),
        CONFIG.replace("key = \"planted-api-key\"", "key = \"planted-api-key\" and more"),
        CONFIG.replace("plan = \"default\"", "plan = \"planted-api-key\"\nplam = 1"),
        CONFIG.replace("secret_env = \"PLANTED_SALT\"", "secret = \"planted-salt-for-pseudonyms\"\nrotate = 5"),
        CONFIG.replace("key_env = \"PLANTED_JWT_KEY\"", "key = 'planted-jwt-key-which-is-long-enough-for-hs256"),
    ] {
        std::fs::write(dir.path().join("tidegate.toml"), broken.replace("plan = \"planted-api-key\"", "plan = \"x\""))
            .unwrap();
        serving.signal("HUP");
        serving.wait_for_log("old rules stay in force");
        let right = format!("Bearer {ADMIN_TOKEN}");
        let answer = HttpClient::open(&serving.admin).ask("POST", "/v1/reload", &[("authorization", &right)], "");
        seen.add("a broken reload", format!("{answer:?}"));
        seen.add("/readyz after a broken reload", format!("{:?}", serving.visit("/readyz")));
    }
    std::fs::write(dir.path().join("keys.toml"), KEYS.replace("plan =", "plan")).unwrap();
    let _ = serving.operate("POST", "/v1/reload");

    // The store rejects the password; then it is down.
    redis.command(&["CONFIG", "SET", "requirepass", "another-password"]);
    send_everything(&serving, &mut seen, "while the store rejects the password");
    redis.kill9();
    send_everything(&serving, &mut seen, "while the store is down");
    seen.add("the command line", serving.proc("cmdline"));
    serving.signal("TERM");
    serving.end();
    let said = serving.output();
    assert!(said.lines().count() > 5, "the log has lines: {said}");
    seen.add("the log", said);
    seen.holds_none_of(&secrets());
}

fn secrets() -> Vec<String> {
    let mut secrets: Vec<String> =
        [STORE_PASSWORD, RESP_PASSWORD, ADMIN_TOKEN, API_KEY, OTHER_KEY, UNKNOWN_KEY, JWT_KEY, SALT, USER]
            .into_iter()
            .chain(ADDRESSES)
            .map(str::to_owned)
            .collect();
    // The signature of a token is a secret, too.
    secrets.extend(token(JWT_KEY).rsplit('.').next().map(str::to_owned));
    secrets
}

#[test]
fn planted_secrets_appear_nowhere_with_logs_as_text() {
    planted_secrets_appear_nowhere("text");
}

#[test]
fn planted_secrets_appear_nowhere_with_logs_as_json() {
    planted_secrets_appear_nowhere("json");
}

#[test]
fn a_failed_start_prints_no_secret() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    for (config, store) in [
        (CONFIG.replace("[jwt]", "[jwtt]"), format!("redis://:{STORE_PASSWORD}@127.0.0.1:1")),
        (CONFIG.replace("key = \"planted-api-key\"", "key = \"planted-api-key"), "memory".to_owned()),
        (String::new(), format!("redis://:{STORE_PASSWORD}@host with spaces")),
        (String::new(), format!("postgres://:{STORE_PASSWORD}@127.0.0.1:1")),
    ] {
        std::fs::write(&file, config).unwrap();
        std::fs::write(dir.path().join("keys.toml"), KEYS).unwrap();
        let mut command = command();
        command.args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--config"]);
        command.arg(&file).env("TIDEGATE_STORE", store).env("PLANTED_SALT", SALT).env("PLANTED_JWT_KEY", JWT_KEY);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
        let mut seen = Seen::default();
        seen.add("its errors", String::from_utf8_lossy(&output.stderr));
        seen.add("its output", String::from_utf8_lossy(&output.stdout));
        seen.holds_none_of(&secrets());
    }
}

#[test]
fn password_in_an_invalid_argument_is_masked() {
    let listen = ["--listen", "127.0.0.1:0", "--admin", "off"];
    for (arguments, expected) in [
        (&["gateway", "--upstream", "http://user:planted@host"][..], "'http://***@host' for '--upstream <URL>'"),
        (&["gateway", "--upstream=https://user:plan/ted@host"], "'https://***@host' for '--upstream <URL>'"),
        (&["gateway", "--upstream", "user:planted@host:80"], "'***@host:80' for '--upstream <URL>'"),
        (&["gateway", "http://user:planted@host"], "unexpected argument 'http://***@host'"),
        (&["redis://:planted@host"], "unrecognized subcommand 'redis://***@host'"),
    ] {
        let arguments = if arguments.len() > 1 { [arguments, &listen[..]].concat() } else { arguments.to_vec() };
        let output = ended(command().args(&arguments));
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected) && !said.contains("planted") && !said.contains("plan/ted"), "{said}");
    }
}

#[test]
fn an_empty_password_file_does_not_disable_authentication() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("password");
    for text in ["", "\n", "\r\n"] {
        std::fs::write(&file, text).unwrap();
        let mut command = command();
        command.args(["serve", "--http", "off", "--resp", "127.0.0.1:0", "--admin", "off", "--resp-password-file"]);
        let output = ended(command.arg(&file));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("contains no password") && said.contains(file.to_str().unwrap()), "{said}");
    }
    let mut command = command();
    command.args(["serve", "--http", "off", "--resp", "127.0.0.1:0", "--admin", "off"]);
    command.env("TIDEGATE_RESP_PASSWORD", OsStr::from_bytes(b"planted\xff"));
    let output = ended(&mut command);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("$TIDEGATE_RESP_PASSWORD is not valid UTF-8") && !said.contains("planted"), "{said}");

    let mut empty = Serving::command();
    empty.env("TIDEGATE_RESP_PASSWORD", "");
    assert_eq!(
        Serving::start_as(empty, &[]).send_inline("PING").split(' ').next(),
        Some("+PONG"),
        "an empty variable sets no password"
    );
}

#[test]
#[should_panic(expected = "planted-user in the log")]
fn a_printed_secret_is_found_by_this_test() {
    let mut seen = Seen::default();
    seen.add("the log", format!("a line\nand {USER} in another"));
    seen.holds_none_of(&secrets());
}
