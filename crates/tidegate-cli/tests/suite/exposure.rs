//! Listeners that other machines can reach, the token of the HTTP listener, and the password of the store.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::{Serving, command, ended};
use tidegate_testkit::server::{Brand, Config};

const TOKEN: &str = "planted-token-of-http";
const CHECK: &str = r#"{"key":"user:42","limit":"10/h"}"#;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_public_listener_without_a_secret_is_refused_unless_insecure() {
    for (listener, secret, variable) in
        [("--http", "token", "TIDEGATE_HTTP_TOKEN"), ("--resp", "password", "TIDEGATE_RESP_PASSWORD")]
    {
        for address in ["0.0.0.0:0", "[::]:0"] {
            let mut serve = Serving::command();
            serve.args([
                "serve",
                "--http",
                "127.0.0.1:0",
                "--resp",
                "127.0.0.1:0",
                "--admin",
                "off",
                listener,
                address,
            ]);
            let output = ended(&mut serve);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{listener} {address}: {said}");
            assert!(said.contains(&format!("is reachable from other machines and requires no {secret}")), "{said}");
            assert!(said.contains(variable) && said.contains("--insecure"), "{said}");
        }
        let mut serve = Serving::command();
        serve.env(variable, TOKEN);
        drop(Serving::start_as(serve, &[listener, "0.0.0.0:0"]));
        drop(Serving::start(&[listener, "0.0.0.0:0", "--insecure"]));
    }
}

#[test]
fn checks_over_http_need_the_token() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, format!("{TOKEN}\n")).unwrap();
    let mut from_variable = Serving::command();
    from_variable.env("TIDEGATE_HTTP_TOKEN", TOKEN);
    for serving in
        [Serving::start(&["--http-token-file", file.to_str().unwrap()]), Serving::start_as(from_variable, &[])]
    {
        let right = format!("bearer {TOKEN}");
        let (wrong, longer) = (format!("Bearer {}", TOKEN.replace("http", "htt_")), format!("Bearer {TOKEN}x"));
        for (headers, status) in [
            (&[][..], 401),
            (&[("authorization", &*wrong)], 401),
            (&[("authorization", &*longer)], 401),
            (&[("authorization", TOKEN)], 401),
            (&[("authorization", "Bearer ")], 401),
            (&[("authorization", &*right)], 200),
        ] {
            // A rejected request is the last one on its connection, because its body is not read.
            let answer = HttpClient::open(&serving.http).ask("POST", "/v1/check", headers, CHECK);
            assert_eq!(answer.status, status, "{headers:?}: {answer:?}");
            assert_eq!(answer.headers.contains_key("www-authenticate"), status == 401, "{answer:?}");
            assert_eq!(answer.body.contains(r#""remaining":9"#), status == 200, "nothing else is charged: {answer:?}");
        }
        assert_eq!(HttpClient::open(&serving.http).ask("GET", "/openapi.json", &[], "").status, 200);
        assert!(serving.announced.contains("Bearer $TIDEGATE_HTTP_TOKEN"), "{}", serving.announced);
        assert!(!serving.output().contains(TOKEN), "{}", serving.output());
        let metrics = serving.visit("/metrics").body;
        let failures =
            metrics.lines().find(|line| line.starts_with("tidegate_auth_failures_total{") && line.contains("http"));
        assert!(failures.is_some(), "{metrics}");
    }
    std::fs::write(&file, "short").unwrap();
    let output = ended(Serving::command().args(["serve", "--http-token-file", file.to_str().unwrap()]));
    assert!(text(&output.stderr).contains("a token must be at least 16 characters long"), "{}", text(&output.stderr));
}

#[test]
fn a_password_in_the_arguments_is_reported_and_a_file_is_accepted() {
    let redis = Config::new(Brand::Redis).set("requirepass", "planted-password").start();
    let url = redis.url().replace("redis://", "redis://:planted-password@");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("store");
    std::fs::write(&file, format!("{url}\n")).unwrap();
    let check = |more: &[&str]| command().args(["check", "user:42", "10/h"]).args(more).output().unwrap();
    let given = check(&["--store", &url]);
    assert_eq!(given.status.code(), Some(0), "{}", text(&given.stderr));
    let warning = text(&given.stderr);
    assert!(warning.starts_with("warning: the password in --store is visible"), "{warning}");
    assert!(warning.lines().count() == 1 && !warning.contains("planted"), "{warning}");
    let read = check(&["--store-file", file.to_str().unwrap()]);
    assert_eq!((read.status.code(), text(&read.stderr)), (Some(0), String::new()));
    assert!(text(&read.stdout).contains("8 of 10"), "{}", text(&read.stdout));
    std::fs::write(&file, "\n").unwrap();
    for (file, phrase) in [(file.to_str().unwrap(), "contains no store URL"), ("absent", "cannot read absent: no such")]
    {
        let refused = check(&["--store-file", file]);
        assert_eq!(refused.status.code(), Some(2));
        assert!(text(&refused.stderr).contains(phrase), "{}", text(&refused.stderr));
    }
}
