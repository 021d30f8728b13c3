//! `tidegate validate` finds every error of a configuration file with which `tidegate serve` and `tidegate gateway` do not
//! start.

use std::path::Path;
use std::process::{Command, Output};

use tidegate_testkit::certificates::Authority;

use tidegate_testkit::program::{Serving, command, ended};

/// A text that is PEM, but whose certificate or key is not one.
fn malformed_pem(kind: &str) -> String {
    format!("-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n")
}

/// Returns a command in whose environment `UNSET_VARIABLE` is not set and `SHORT_SECRET` is too short.
fn with_arguments(arguments: &[&str]) -> Command {
    let mut command = command();
    command.env("SHORT_SECRET", "short").env_remove("UNSET_VARIABLE").args(arguments);
    command
}

/// Runs a command until it ends. One that starts to serve is killed.
fn run(arguments: &[&str]) -> Output {
    ended(&mut with_arguments(arguments))
}

/// Writes the files that broken configurations name to `dir`, and returns the configurations: for each its name, its
/// text, and a phrase of its error. Certificates are those of `authority`.
fn broken_files(dir: &Path, authority: &Authority) -> Vec<(&'static str, String, &'static str)> {
    let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
    write("malformed.pem", &malformed_pem("CERTIFICATE"));
    write("malformed.key", &malformed_pem("PRIVATE KEY"));
    write("text.pem", "no certificate");
    write("cut.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n");
    write("empty", "");
    write("short", "short");
    write("keys.toml", "[[keys]]\nkey = \"planted\"\nplan = \"absent\"\n");
    let (one, other) = (authority.issue(&["localhost"]), authority.issue(&["localhost"]));
    let (cert, key) = (one.cert_file.display(), other.key_file.display());

    let upstream = |more: &str| format!("[[upstreams]]\nname = \"api\"\nservers = [\"https://127.0.0.1:1\"]\n{more}");
    let store = |more: &str| format!("instances = 1\n[store]\nurls = [\"rediss://127.0.0.1:1\"]\n{more}");
    vec![
        (
            "authority malformed",
            upstream("ca_file = \"malformed.pem\""),
            "cannot use the certificate authorities for the upstream `api`",
        ),
        (
            "authority cut off",
            upstream("ca_file = \"cut.pem\""),
            "cannot use the certificate authorities for the upstream `api`",
        ),
        ("authority is text", upstream("ca_file = \"text.pem\""), "text.pem contains no certificate"),
        ("authority absent", upstream("ca_file = \"absent.pem\""), "absent.pem: no such file or directory"),
        ("store authority malformed", store("tls = { ca_file = \"malformed.pem\" }"), "malformed.pem"),
        (
            "store authority absent",
            store("tls = { ca_file = \"absent.pem\" }"),
            "absent.pem: no such file or directory",
        ),
        (
            "store key of another certificate",
            store(&format!("tls = {{ cert_file = \"{cert}\", key_file = \"{key}\" }}")),
            "invalid-store",
        ),
        (
            "store key malformed",
            store(&format!("tls = {{ cert_file = \"{cert}\", key_file = \"malformed.key\" }}")),
            "malformed.key",
        ),
        ("store password absent", store("password_file = \"absent\""), "absent: no such file or directory"),
        ("store password empty", store("password_file = \"empty\""), "the password of the store is empty"),
        ("store password not set", store("password_env = \"UNSET_VARIABLE\""), "`UNSET_VARIABLE` is not set"),
        ("receipt secret not set", "receipt_secret_env = \"UNSET_VARIABLE\"".to_owned(), "UNSET_VARIABLE"),
        ("receipt secret short", "receipt_secret_env = \"SHORT_SECRET\"".to_owned(), "at least 16 bytes"),
        ("receipt secret file short", "receipt_secret_file = \"short\"".to_owned(), "at least 16 bytes"),
        (
            "pseudonym secret absent",
            "[anonymize]\nsecret_file = \"absent\"".to_owned(),
            "absent: no such file or directory",
        ),
        ("token key malformed", "[jwt]\nalgorithm = \"RS256\"\nkey_file = \"malformed.pem\"".to_owned(), "invalid-jwt"),
        (
            "token key not set",
            "[jwt]\nalgorithm = \"HS256\"\nkey_env = \"UNSET_VARIABLE\"".to_owned(),
            "UNSET_VARIABLE",
        ),
        ("keys absent", "keys_file = \"absent.toml\"".to_owned(), "absent.toml: no such file or directory"),
        ("keys with an unknown plan", "keys_file = \"keys.toml\"".to_owned(), "unknown-plan"),
        (
            "gateway without an upstream",
            "[gateway]\nlisten = \"127.0.0.1:0\"".to_owned(),
            "no upstream to forward requests to",
        ),
        ("store without a scheme", "store = \"localhost:6379\"".to_owned(), "did you mean redis://localhost:6379?"),
        (
            "table instead of a list",
            "[rules]\nname = \"a\"\nlimits = [\"1/s\"]".to_owned(),
            "write [[rules]], with two brackets",
        ),
        ("time without a unit", "deadline = 25".to_owned(), "such as \"25ms\""),
        ("syntax", "deadline = \"25ms".to_owned(), "broken.toml, line 1"),
    ]
}

#[test]
fn validate_and_the_start_report_the_same_errors() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let cases = broken_files(dir.path(), &authority);
    let file = dir.path().join("broken.toml");
    let config = file.to_str().unwrap();
    for (name, text, phrase) in cases {
        std::fs::write(&file, format!("{text}\n")).unwrap();
        let validated = run(&["validate", config]);
        let report = String::from_utf8_lossy(&validated.stderr).into_owned();
        assert_eq!(validated.status.code(), Some(2), "{name}: {report}");
        assert!(report.contains(phrase), "{name}: {report}");
        let off = ["--admin", "off", "--config", config];
        for server in
            [&["serve", "--http", "127.0.0.1:0", "--resp", "off"][..], &["gateway", "--listen", "127.0.0.1:0"]]
        {
            let started = run(&[server, &off[..]].concat());
            let said = String::from_utf8_lossy(&started.stderr).into_owned();
            assert_eq!((started.status.code(), said), (Some(2), report.clone()), "{name}: {server:?}");
        }
        let json = with_arguments(&["validate", config, "--json"]).output().unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
        assert_eq!(json["valid"], false, "{name}");
        assert!(json["findings"].as_array().is_some_and(|findings| !findings.is_empty()), "{name}: {json}");
    }
}

/// The running configuration has no rules, upstreams or keys, so no file is rejected because it has fewer of them.
#[test]
fn a_reload_rejects_what_validate_rejects_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let cases = broken_files(dir.path(), &authority);
    let file = dir.path().join("broken.toml");
    std::fs::write(&file, "path_bytes_max = 100\n").unwrap();
    let mut command = Serving::command();
    command.env("SHORT_SECRET", "short").env_remove("UNSET_VARIABLE");
    let serving = Serving::start_as(command, &["--config", file.to_str().unwrap()]);
    let request = format!(r#"{{"request":{{"method":"GET","path":"/{}","peer":"203.0.113.9"}}}}"#, "x".repeat(101));
    // The store reads its files again at each connect, so a reload does not depend on them.
    let is_read_at_connect = |text: &str| text.contains("[store]") && text.contains("_file");
    for (name, text, phrase) in cases.into_iter().filter(|(_, text, _)| !is_read_at_connect(text)) {
        // A reload would replace the bound on paths by its default.
        std::fs::write(&file, format!("{text}\n")).unwrap();
        let answer = serving.operate("POST", "/v1/reload");
        let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!((answer.status, &body["reloaded"]), (422, &serde_json::json!(false)), "{name}: {body}");
        let findings = body["findings"].as_array().unwrap().iter();
        let said = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let parts = findings.map(|finding| {
            let place = format!("{}, line {}", said(&finding["file"]), finding["line"]);
            ["code", "message", "help"].map(|part| said(&finding[part])).join("\n") + "\n" + &place
        });
        let said = [said(&body["message"]), parts.collect::<Vec<_>>().join("\n")].join("\n");
        assert!(said.contains(phrase), "{name}: {phrase} in {said}");
        assert_eq!(serving.check(&request).status, 414, "{name}");
    }
}
