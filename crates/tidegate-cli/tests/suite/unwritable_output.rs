//! Output that cannot be written: a closed pipe, a full disk. The service continues, and a command still exits with its
//! verdict.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::fs::OpenOptions;
use std::process::{Output, Stdio};

use tidegate_testkit::http::HttpClient;
use tidegate_testkit::poll::eventually;
use tidegate_testkit::program::{Serving, command};

const RULES: &str = "[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"QUOTA/h\"]\n";
const REQUEST: &str = r#"{"request":{"method":"GET","path":"/","peer":"203.0.113.9"}}"#;

/// Returns a pipe whose reading end is closed.
fn closed_pipe() -> Stdio {
    let (_, writer) = std::io::pipe().unwrap();
    writer.into()
}

/// Returns a file on which every write fails as on a full disk.
fn full_disk() -> Stdio {
    OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

fn serve_continues_when_its_logs_are_lost(stderr: Stdio) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    let write = |quota: &str| std::fs::write(&file, RULES.replace("QUOTA", quota)).unwrap();
    write("100");
    let arguments = ["--config", file.to_str().unwrap(), "--drain", "0s"];
    let mut serving = Serving::start_logging_to(stderr, Serving::command(), &arguments);

    write("200");
    assert_eq!(serving.operate("POST", "/v1/reload").status, 200, "a successful reload is answered");
    write("0");
    assert_eq!(serving.operate("POST", "/v1/reload").status, 422, "a failed reload is answered");
    for quota in [300, 400] {
        write(&quota.to_string());
        // The file watcher reloads the changed file.
        eventually(
            "the new rules are in force",
            || serving.check(REQUEST),
            |answer| answer.body.contains(&format!("\"quota\":{quota},")),
        );
    }
    let mut inside = HttpClient::open(&serving.http);
    assert_eq!(inside.ask("POST", "/v1/check", &[], REQUEST).status, 200);
    serving.signal("TERM");
    assert_eq!(serving.end().code(), Some(0), "an orderly shutdown");
}

#[test]
fn serve_continues_when_its_log_pipe_is_closed() {
    serve_continues_when_its_logs_are_lost(closed_pipe());
}

#[test]
fn serve_continues_when_its_log_disk_is_full() {
    serve_continues_when_its_logs_are_lost(full_disk());
}

/// Returns commands that print, and the exit code of each.
fn printing(config: &str) -> Vec<(Vec<&str>, i32)> {
    vec![
        (vec!["check", "k", "1/h", "--store", "memory"], 0),
        (vec!["check", "k", "1/h", "--store", "memory", "--json"], 0),
        (vec!["check", "k", "1/h", "--store", "memory", "--cost", "2"], 1),
        (vec!["script"], 0),
        (vec!["boundary"], 0),
        (vec!["completions", "bash"], 0),
        (vec!["man"], 0),
        (vec!["validate", config], 0),
        (vec!["validate", config, "--json"], 0),
        (vec!["explain", "--config", config, "GET", "/"], 0),
        (vec!["--help"], 0),
        (vec!["check", "--help"], 0),
    ]
}

fn rules_file() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES.replace("QUOTA", "100")).unwrap();
    let name = file.to_str().unwrap().to_owned();
    (dir, name)
}

fn run(arguments: &[&str], stdout: Stdio, stderr: Stdio) -> Output {
    command().args(arguments).stdout(stdout).stderr(stderr).spawn().unwrap().wait_with_output().unwrap()
}

#[test]
fn a_command_with_a_closed_pipe_exits_quietly_with_its_verdict() {
    let (_dir, config) = rules_file();
    for (arguments, code) in printing(&config) {
        let output = run(&arguments, closed_pipe(), Stdio::piped());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), said.as_str()), (Some(code), ""), "{arguments:?}");
    }
}

#[test]
fn a_command_that_cannot_write_exits_with_two_and_reports_it() {
    let (_dir, config) = rules_file();
    for (arguments, _) in printing(&config) {
        let output = run(&arguments, full_disk(), Stdio::piped());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains("cannot write the output"), "{arguments:?}: {said}");
    }
}

#[test]
fn an_error_that_cannot_be_printed_exits_with_two() {
    for stderr in [closed_pipe, full_disk] {
        for arguments in [&["check", "k", "1/fortnight"][..], &["validate", "absent.toml"], &["chekc"]] {
            assert_eq!(run(arguments, Stdio::null(), stderr()).status.code(), Some(2), "{arguments:?}");
        }
    }
}
