//! Popular Redis clients with the RESP listener of the real binary: they connect without errors, and the counts are
//! exact.
//!
//! Each script sends the same commands and prints the replies as one line of JSON. `scripts/setup.sh` installs the
//! clients, into `.tools` or from Debian.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tidegate_testkit::program::Serving;

fn tools() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools")
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite/clients").join(name)
}

fn port(serving: &Serving) -> String {
    serving.resp_addr().port().to_string()
}

/// Runs a program with this input and returns its standard output. Panics if it fails or prints to standard error.
fn printed(command: &mut Command, input: &[u8]) -> String {
    let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = started.unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/setup.sh installs it"));
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success() && complained.is_empty(),
        "{command:?} (scripts/setup.sh installs what it needs): {}\n{said}{complained}",
        output.status
    );
    said.into_owned()
}

/// Asserts that a script prints the replies that all scripts have in common. Returns all replies.
fn counts_exactly(command: &mut Command) -> Value {
    let said: Value = serde_json::from_str(&printed(command, b"")).unwrap();
    let error = said["error"].as_str().unwrap_or_default();
    assert!(error.starts_with("ERR limit: unknown unit of time"), "{said}");
    let expected = json!({
        "pong": "PONG",
        "check": [1, 5, 4, 0],
        "throttle": [0, 2, 1, -1, 3600],
        "error": error,
        "admitted": 37,
        "throttled": 81,
    });
    for (name, reply) in expected.as_object().unwrap() {
        assert_eq!(&said[name], reply, "{name} in {said}");
    }
    said
}

/// The rules of `with_rules`: one request per hour for each path.
const RULES: &str =
    "[[rules]]\nname = \"paths\"\nby = [\"ip\", \"path\"]\nlimits = [\"1/h\"]\nbody = \"text\"\nheaders = [\"x\"]\n";

fn with_rules() -> (tempfile::TempDir, Serving) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES).unwrap();
    let serving = Serving::start(&["--config", file.to_str().unwrap()]);
    (dir, serving)
}

#[test]
fn redis_py_in_both_protocols() {
    let (_dir, serving) = with_rules();
    for protocol in ["2", "3"] {
        let mut python = Command::new("python3");
        python.env("PYTHONPATH", tools().join("python")).arg(script("redis-py.py"));
        let mut said = counts_exactly(python.args([&*port(&serving), protocol]));
        assert_eq!(said["several"], json!([1, [1, 6, 3, 0, 3_600_000], [1, 7, 5, 0, 86_400_000]]));
        assert_eq!((&said["wait"], &said["waited"]), (&json!([1, 1]), &json!([1, 1])));
        let headers: Vec<Value> =
            said["request"].as_array_mut().unwrap().iter_mut().map(|reply| reply[5].take()).collect();
        let message = "the limit of 1 per hour has been reached; try again in 3600 seconds\n";
        assert_eq!(said["request"][0], json!([1, 200, 0, null, null, null, ""]));
        let retry_after_ms = said["request"][1][2].as_i64().unwrap();
        assert!((3_500_000..=3_600_000).contains(&retry_after_ms), "{said}");
        assert_eq!(said["request"][1][0], 0);
        assert_eq!((&said["request"][1][3], &said["request"][1][6]), (&json!("paths"), &json!(message)), "{said}");
        for headers in headers {
            let remaining = json!(["x-ratelimit-remaining", "0"]);
            assert!(headers.as_array().unwrap().contains(&remaining), "{headers}");
        }
    }
}

#[test]
fn ioredis() {
    let serving = Serving::start(&[]);
    let mut node = Command::new("node");
    counts_exactly(node.env("NODE_PATH", tools().join("node_modules")).arg(script("ioredis.js")).arg(port(&serving)));
}

#[test]
fn phpredis() {
    let serving = Serving::start(&[]);
    counts_exactly(Command::new("php").arg(script("phpredis.php")).arg(port(&serving)));
}

#[test]
fn redis_cli_one_by_one_in_both_protocols() {
    let (_dir, serving) = with_rules();
    for protocol in ["-2", "-3"] {
        let mut redis_cli = Command::new("redis-cli");
        redis_cli.args([protocol, "--raw", "-p", &port(&serving)]);
        let script = format!(
            "PING\nTIDEGATE.CHECK cli{protocol} 2/h\nCL.THROTTLE cli{protocol} 3 1 3600\nTIDEGATE.RESET cli{protocol} 2/h\nTIDEGATE.CHECK cli{protocol} 2/h cli{protocol} 3/day\nTIDEGATE.WAIT cli{protocol}w 2/h TIMEOUT 50 COST 3\nTIDEGATE.REQUEST GET /{protocol} 203.0.113.9\n"
        );
        let said = printed(&mut redis_cli, script.as_bytes());
        let words: Vec<&str> = said.split_whitespace().collect();
        let words = words.join(" ");
        let several = "1 1 2 1 0 3600000 1 3 2 0 86400000";
        let begin = format!("PONG 1 2 1 0 3600000 0 4 3 -1 3600 OK {several} 0 2 2 -1 0 1 200 0 ");
        assert!(words.starts_with(&begin) && words.contains("x-ratelimit-remaining 0"), "{words}");
    }
}

/// `--pipe` sends everything at once and counts the replies. Their effect is checked afterwards.
#[test]
fn redis_cli_in_bulk() {
    let serving = Serving::start(&[]);
    let command = b"*3\r\n$14\r\nTIDEGATE.CHECK\r\n$4\r\nbulk\r\n$10\r\n100000/day\r\n";
    let mut redis_cli = Command::new("redis-cli");
    let said = printed(redis_cli.args(["--pipe", "-p", &port(&serving)]), &command.repeat(30_000));
    assert!(said.contains("errors: 0, replies: 30000"), "{said}");
    assert_eq!(serving.connect().call(&["TIDEGATE.PEEK", "bulk", "100000/day"]).unwrap().items()[2].integer(), 70_000);
}
