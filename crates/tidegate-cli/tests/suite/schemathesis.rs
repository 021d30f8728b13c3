//! schemathesis sends requests that the OpenAPI document allows and forbids to the real binary. What the document
//! allows is decided, what it forbids is rejected, and every response is documented. `scripts/setup.sh` installs
//! schemathesis.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::path::Path;
use std::process::Command;

use tidegate_testkit::program::Serving;

/// A limit that is never reached, because a denial would hide that an invalid request was accepted. Enough explicit
/// checks are denied.
const RULES: &str = r#"
trusted_proxies = ["127.0.0.1"]
[[rules]]
name = "all"
by = ["ip"]
limits = ["10000000/h"]
"#;

/// Minimum number of different limits that must be accepted. With fewer, the generated data would test only rejections.
const LIMITS_ACCEPTED_MIN: usize = 3;

/// All checks that schemathesis has. Some have no effect: the document has no secrets and no links between operations.
/// The excluded ones are parts of those in `hooks.py`.
const CHECKS: [&str; 4] = ["--checks", "all", "--exclude-checks", "positive_data_acceptance,unsupported_method"];

#[test]
fn the_document_and_the_listener_agree_on_requests_and_responses() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES).unwrap();
    let mut serving = Serving::start(&["--config", file.to_str().unwrap()]);
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut schemathesis = Command::new("python3");
    schemathesis.env("PYTHONPATH", here.join("../../.tools/python"));
    schemathesis.env("TIDEGATE_HOOKS", here.join("tests/suite/schemathesis/hooks.py"));
    schemathesis
        .args(["-m", "schemathesis.cli", "--config-file"])
        .arg(here.join("tests/suite/schemathesis/schemathesis.toml"));
    schemathesis.args(["run", &format!("http://{}/openapi.json", serving.http)]).args(CHECKS);
    // The same requests on every run, and few of them: more would take hours.
    schemathesis.args(["--seed", "1", "--max-examples", "60", "--no-color", "--phases", "examples,coverage,fuzzing"]);
    // It stores failures in the current directory, which is removed with the test.
    let output = schemathesis.current_dir(dir.path()).output().expect("python3 runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "(scripts/setup.sh installs schemathesis) {said}{complained}");
    assert!(said.contains("Tested: 4") && said.contains("No issues found"), "{said}");
    let accepted = said.split("limits accepted: ").nth(1).and_then(|rest| rest.lines().next()?.parse::<usize>().ok());
    assert!(accepted.is_some_and(|accepted| accepted >= LIMITS_ACCEPTED_MIN), "{accepted:?} limits accepted: {said}");
    assert!(serving.is_alive());
}
