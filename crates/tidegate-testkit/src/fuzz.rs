//! Fuzz targets: properties of any input.
//!
//! Each function is the body of a target in `fuzz/`, and panics if its property does not hold. The targets need a
//! nightly compiler. Inputs worth keeping are in `fuzz/corpus`, and tests run the same functions on them ([`replay`]).

use std::path::{Path, PathBuf};
use std::{fs, panic, str};

use tidegate_core::Limit;

use crate::conformance::{InMemory, Trace, compare};

/// Maximum length of an error message for any text, since it is used in logs and responses.
const MESSAGE_BYTES_MAX: usize = 600;

/// Parses the bytes as a limit. Checks that a limit is equal after printing and parsing it again, and that an error has
/// a span inside the text and a message below 600 bytes. Bytes that are not UTF-8 are ignored.
///
/// # Panics
/// If a check fails.
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
            assert!(text.get(error.span()).is_some(), "{:?} is not a range of {text:?}", error.span());
        }
    }
}

/// Checks that the memory store and the oracle make equal decisions on the trace that these bytes encode.
///
/// # Panics
/// If they differ. The message contains the trace and the difference.
pub fn decision(bytes: &[u8]) {
    let trace = Trace::from_bytes(bytes);
    if let Err(difference) = compare(&trace, &mut InMemory::new()) {
        panic!("{trace}{difference}");
    }
}

/// Calls `run` with the content of every file in the corpus of a target, `fuzz/corpus/TARGET`.
///
/// # Panics
/// If `run` panics for any file, after all files, with their names; or if the corpus is missing or has fewer than ten
/// files.
pub fn replay(target: &str, run: impl Fn(&[u8]) + panic::RefUnwindSafe) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let paths: Vec<_> = entries.map(|entry| entry.expect("a readable directory").path()).collect();
    assert!(paths.len() >= 10, "the corpus of {target} is missing or incomplete: {paths:?}");
    let failed = |path: &&PathBuf| {
        let bytes = fs::read(path).expect("a readable file");
        panic::catch_unwind(|| run(&bytes)).is_err()
    };
    let failed: Vec<_> = paths.iter().filter(failed).collect();
    assert!(failed.is_empty(), "{target} fails on {failed:?}");
}
