//! The inputs that fuzzing has found worth keeping, without the fuzzer.

use std::fs;
use std::panic;
use std::path::{Path, PathBuf};

use tollgate_testkit::fuzz;

/// Puts every kept input of a target through it, and names those that fail.
fn replay(target: &str, run: impl Fn(&[u8]) + panic::RefUnwindSafe) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let paths: Vec<_> = entries.map(|entry| entry.expect("a readable directory").path()).collect();
    assert!(paths.len() >= 10, "the corpus of {target} is not there: {paths:?}");
    let failed = |path: &&PathBuf| {
        let bytes = fs::read(path).expect("a readable file");
        panic::catch_unwind(|| run(&bytes)).is_err()
    };
    let failed: Vec<_> = paths.iter().filter(failed).collect();
    assert!(failed.is_empty(), "{target} fails on {failed:?}");
}

#[test]
fn kept_limit_texts_hold() {
    replay("limit_text", fuzz::limit_text);
}

#[test]
fn kept_traces_hold() {
    replay("decision", fuzz::decision);
}
