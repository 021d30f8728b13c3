//! schemathesis asks the real binary whatever its own OpenAPI document allows and forbids: what it allows is decided, what
//! it forbids is refused, and no answer is one that the document does not describe. `scripts/setup.sh` installs it.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

#[path = "../serving/mod.rs"]
mod serving;

use std::path::Path;
use std::process::Command;

use serving::Serving;

/// Never used up: a denial would hide that a bad question was taken for a good one. Questions with a limit of their own are denied often enough.
const RULES: &str = "[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"10000000/h\"]\n";

/// All checks that schemathesis has. Some find nothing to look at: the document has no secrets, no required headers and no
/// links from one answer to the next question. The one left out is part of `valid_data_is_accepted`, in `one_counter.py`.
const CHECKS: [&str; 4] = ["--checks", "all", "--exclude-checks", "positive_data_acceptance"];

#[test]
fn the_openapi_document_describes_requests_and_responses() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tollgate.toml");
    std::fs::write(&file, RULES).unwrap();
    let mut serving = Serving::start(&["--config", file.to_str().unwrap()]);
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut schemathesis = Command::new("python3");
    schemathesis.env("PYTHONPATH", here.join("../../.tools/python"));
    schemathesis.env("TOLLGATE_HOOKS", here.join("tests/schemathesis/one_counter.py"));
    schemathesis
        .args(["-m", "schemathesis.cli", "--config-file"])
        .arg(here.join("tests/schemathesis/schemathesis.toml"));
    schemathesis.args(["run", &format!("http://{}/openapi.json", serving.http)]).args(CHECKS);
    // The same questions on every run, and few of them: a run with more is a matter of an afternoon.
    schemathesis.args(["--seed", "1", "--max-examples", "60", "--no-color", "--phases", "examples,coverage,fuzzing"]);
    // What it remembers of failures goes where the test goes.
    let output = schemathesis.current_dir(dir.path()).output().expect("python3 runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "(scripts/setup.sh installs schemathesis) {said}{complained}");
    assert!(said.contains("Tested: 1") && said.contains("No issues found"), "{said}");
    assert!(serving.is_alive());
}
