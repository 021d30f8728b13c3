//! What must hold for any bytes whatever.
//!
//! Each function here is the whole of a fuzz target in `fuzz/`: it takes what the fuzzer invents and panics when
//! something is wrong with it. The targets need a nightly compiler and time; the inputs worth keeping are in
//! `fuzz/corpus`, and a plain test puts them through the same functions.

use std::path::{Path, PathBuf};
use std::{fs, panic, str};

use tollgate_core::Limit;

use crate::conformance::{InMemory, Trace, compare};

/// The longest that an error may grow, whatever the text: it ends up in log lines and answers.
const MESSAGE_BYTES_MAX: usize = 600;

/// A limit's text is read and printed back, or refused with a place and a bounded message.
pub fn limit_text(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    match text.parse::<Limit>() {
        Ok(limit) => {
            let printed = limit.to_string();
            let read_back = printed.parse::<Limit>();
            assert_eq!(read_back.as_ref(), Ok(&limit), "{text:?} is printed as {printed:?}");
        }
        Err(error) => {
            let message = error.to_string();
            assert!(message.len() < MESSAGE_BYTES_MAX, "{} bytes: {message}", message.len());
            assert!(text.get(error.span()).is_some(), "{:?} is no part of {text:?}", error.span());
        }
    }
}

/// The memory store and the oracle answer the trace that the bytes mean alike, in every field.
pub fn decision(bytes: &[u8]) {
    let trace = Trace::from_bytes(bytes);
    if let Err(difference) = compare(&trace, &mut InMemory::new()) {
        panic!("{trace}{difference}");
    }
}

/// Puts every kept input of a target through it.
///
/// # Panics
/// When some fail, with their names; when the corpus is not there.
pub fn replay(target: &str, run: impl Fn(&[u8]) + panic::RefUnwindSafe) {
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
