//! schemathesis asks the real binary whatever its own OpenAPI document allows and forbids, and finds no answer that the
//! document does not describe. `scripts/setup.sh` installs it.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

mod serving;

use std::path::Path;
use std::process::Command;

use serving::Serving;

const RULES: &str = "[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"5/h\"]\n";
/// What an answer must be: no 5xx; a status, a media type, headers and a body that the document names.
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,\
                      response_schema_conformance";

#[test]
fn no_answer_is_a_server_error_or_undocumented() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tollgate.toml");
    std::fs::write(&file, RULES).unwrap();
    let mut serving = Serving::start(&["--config", file.to_str().unwrap()]);
    let mut schemathesis = Command::new("python3");
    schemathesis.env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/python"));
    schemathesis.args(["-m", "schemathesis.cli", "run", &format!("http://{}/openapi.json", serving.http)]);
    // The same questions on every run, and few of them: a run with more is a matter of an afternoon.
    schemathesis.args(["--seed", "1", "--max-examples", "60", "--no-color", "--phases", "examples,coverage,fuzzing"]);
    // What it remembers of failures goes where the test goes.
    let output = schemathesis.args(["--checks", CHECKS]).current_dir(dir.path()).output().expect("python3 runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "(scripts/setup.sh installs schemathesis) {said}{complained}");
    assert!(said.contains("Tested: 1") && said.contains("No issues found"), "{said}");
    assert!(serving.is_alive());
}
