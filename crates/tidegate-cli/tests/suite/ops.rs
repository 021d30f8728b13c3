//! The files in `ops/` and the workflow, checked with the programs that read them and with the real binary.
//!
//! The image is not built, which would need a container engine. Each deployment's command line is
//! started with its environment, on free ports and with a Redis server of the test.

mod deployment;
mod monitoring;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Returns the path of a file in the repository.
pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// Reads a file in the repository.
pub(crate) fn read(name: &str) -> String {
    std::fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Parses the documents of a YAML file in the repository.
fn yaml(name: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(&read(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns a command of a program that `scripts/setup.sh` links into `.tools/bin`, or else of the one in the `PATH`.
pub(crate) fn tool(name: &str) -> Command {
    let linked = path(".tools/bin").join(name);
    if linked.exists() { Command::new(linked) } else { Command::new(name) }
}

/// Returns standard output and standard error of a command. Panics if it fails.
pub(crate) fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/setup.sh installs it"));
    let text = output_text(&output);
    assert!(output.status.success(), "{command:?}: {}\n{text}", output.status);
    text
}

fn output_text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// Returns the text of each item of a list. Panics if the value is no list of texts.
fn texts(list: &Value) -> Vec<&str> {
    let items = list.as_array().unwrap_or_else(|| panic!("not a list: {list}"));
    items.iter().map(|item| item.as_str().unwrap_or_else(|| panic!("not a text: {item}"))).collect()
}
