//! Guards against truncated files: what makes sure that a file is complete before its content is used.
//!
//! **Problem.** A file that is read while it is being written, or that was truncated by a full disk or a killed deploy,
//! is usually still valid, with fewer rules. The limits of the missing rules are off, and nothing else looks wrong.
//!
//! **While it is read.** [`read`] fails if a file changes meanwhile. The [watch](super::watch) first waits until files
//! have been unchanged for a moment.
//!
//! **By itself.** A file may state in `expect` how many rules and keys it has. It, and its keys file, must then end with
//! a newline.
//!
//! **In a reload,** the file can also be compared with the active configuration. The reload fails, and the active
//! configuration stays, if
//!
//! 1. the file is empty and the active one is not;
//! 2. the file has no rules (no keys, no upstreams), the active one has some, and the file does not contain `rules = []`
//!    (`keys = []`, `upstreams = []`);
//! 3. the file has no expected number of rules (keys), and the active one has;
//! 4. the active one has `expect`, there are changes, and the file (the keys file) is only the beginning of it; or
//! 5. a secret that is read from a file is only the beginning of the active one.
//!
//! Everything else that is removed is named in a warning. Condition 3 makes `expect` effective wherever it is in the
//! file: a file that is truncated before it has none, and one that is truncated after it has fewer rules than expected.
//! Condition 4 covers a truncation inside the last rule, after its required fields.

use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;

use super::changes::{Changes, PartKind};
use super::document::Document;
use super::finding::{Code, Finding};
use super::source::ConfigSource;
use super::span::{Span, Spanned};
use super::types::{ConfigTable, Expect};

/// The maximum size of a configuration file, a keys file or a secret file, in bytes.
pub const BYTES_MAX: u64 = 64 * 1024 * 1024;
/// The maximum number of parts that a warning names. It gives the number of the others.
const NAMES_MAX: usize = 10;

/// Reads a whole file. Returns its bytes, and its metadata from before the read.
///
/// # Errors
/// If the file cannot be read, has more than `bytes_max` bytes (a device may never end), or is a regular file whose
/// size or modification time changed during the read.
pub fn read(path: &Path, bytes_max: u64) -> std::io::Result<(Vec<u8>, Metadata)> {
    let file = File::open(path)?;
    let before = file.metadata()?;
    let mut bytes = Vec::new();
    (&file).take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("it has more than {bytes_max} bytes")));
    }
    let after = file.metadata()?;
    let is_same = before.len() == after.len() && before.modified().ok() == after.modified().ok();
    if before.is_file() && !(is_same && bytes.len() as u64 == before.len()) {
        return Err(Error::new(ErrorKind::ResourceBusy, "it changed while it was read"));
    }
    Ok((bytes, before))
}

/// Returns an error if `count` is not the expected number, and `None` if it is or if `expected` is `None`. `noun` is what
/// is counted: `rule` or `key`.
pub fn check_count(expected: Option<&Spanned<u32>>, count: usize, noun: &str) -> Option<Finding> {
    let expected = expected.filter(|expected| u64::from(***expected) != count as u64)?;
    let plural = if **expected == 1 { "" } else { "s" };
    let message = format!("expected {} {noun}{plural}, found {count}", **expected);
    let help = format!("correct the number; if there should be {}, the file is incomplete", **expected);
    Some(Finding::new(Code::ExpectationUnmet, message).help(help).at(expected.span()))
}

/// Returns an error if a file is not empty and does not end with a newline: its last line may be truncated.
pub fn check_line_end(source: &Arc<ConfigSource>) -> Option<Finding> {
    let text = source.text();
    if text.is_empty() || text.ends_with('\n') {
        return None;
    }
    let message = "the file does not end with a newline: its last line may be truncated";
    let end = source.visible(Span::new(text.len(), text.len()));
    let finding = Finding::new(Code::FileCutOff, message).help("end the last line with a newline");
    Some(finding.label("the last character").at(end).with_source(source))
}

/// Returns findings about a configuration that is to replace the active one, `running`, and differs from it by `changes`.
///
/// They are errors if the file, its keys file or a secret file may be truncated. Otherwise they are warnings about
/// removed parts and a missing newline.
pub fn check_replacement(document: &Document, running: &Document, changes: &Changes) -> Vec<Finding> {
    let errors = errors(document, running, changes);
    let findings = if errors.is_empty() { warnings(document, running, changes) } else { errors };
    findings.into_iter().map(|finding| finding.with_source(&document.source)).collect()
}

fn errors(document: &Document, running: &Document, changes: &Changes) -> Vec<Finding> {
    let (config, before) = (&document.config, &running.config);
    let is_blank = |document: &Document| document.source.text().trim().is_empty();
    if is_blank(document) && !is_blank(running) {
        let help = "to limit nothing, write `rules = []`";
        return vec![Finding::new(Code::FileCutOff, "the file is empty, but the active one is not").help(help)];
    }
    let mut findings = Vec::new();
    if config.rules.is_absent() && !before.rules.is_empty() {
        let message =
            format!("there are no rules; the active configuration has {}", counted(before.rules.len(), "rule"));
        let help = "to limit nothing, write `rules = []`";
        findings.push(Finding::new(Code::RulesGone, message).help(help));
    }
    let keys_before = before.keys.len() + running.keys_file.keys.len();
    if config.keys.is_absent() && config.keys_file.is_none() && keys_before > 0 {
        let message = format!("there are no keys; the active configuration has {}", counted(keys_before, "key"));
        let help = "to remove all keys, write `keys = []`";
        findings.push(Finding::new(Code::KeysGone, message).help(help));
    }
    if config.upstreams.is_absent() && !before.upstreams.is_empty() {
        let count = counted(before.upstreams.len(), "upstream");
        let message = format!("there are no upstreams; the active configuration has {count}");
        findings.push(Finding::new(Code::UpstreamsGone, message).help("to forward nothing, write `upstreams = []`"));
    }
    let expected = |config: &ConfigTable| config.expect.as_deref().cloned().unwrap_or_default();
    let (expect, expect_before): (Expect, Expect) = (expected(config), expected(before));
    for (field, is_gone) in [
        ("rules", expect.rules.is_none() && expect_before.rules.is_some()),
        ("keys", expect.keys.is_none() && expect_before.keys.is_some()),
    ] {
        if is_gone {
            let message = format!("the active file has `expect.{field}`, but this one does not");
            let help =
                "to remove an expectation, restart; a reload requires it, because a truncated file may have lost it";
            findings.push(Finding::new(Code::ExpectationGone, message).help(help));
        }
    }
    if before.expect.is_some() && !changes.is_empty() {
        let keys = (document.keys_file.text.reveal(), running.keys_file.text.reveal());
        for (file, (text, of)) in
            [("the file", (document.source.text(), running.source.text())), ("the keys file", keys)]
        {
            if is_beginning(text, of) {
                let message = format!("{file} is only the beginning of the active one: the rest is missing");
                let help = "if the rest was removed on purpose, add a comment at the end of the file";
                findings.push(Finding::new(Code::FileCutOff, message).help(help));
            }
        }
    }
    // With a truncated secret all pseudonyms would change, and every counter would start again.
    for (name, secret) in &document.secret_files {
        if running.secret_file(name).is_some_and(|before| is_beginning(secret.reveal(), before.reveal())) {
            let message = format!("the secret in {name} is only the beginning of the active one");
            findings.push(Finding::new(Code::FileCutOff, message).help("write the whole file again"));
        }
    }
    findings
}

fn warnings(document: &Document, running: &Document, changes: &Changes) -> Vec<Finding> {
    let mut findings = Vec::new();
    for kind in PartKind::ALL {
        let count = changes.removed_of(kind).count();
        if count == 0 {
            continue;
        }
        let names: Vec<&str> = changes.removed_of(kind).take(NAMES_MAX).collect();
        let more = match count - names.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let message = format!("{} removed: {}{more}", counted(count, kind.as_str()), names.join(", "));
        findings.push(Finding::new(Code::Removed, message).help("check that the file is complete"));
    }
    let ends = |text: &str| text.is_empty() || text.ends_with('\n');
    let lost_end = |before: &str, now: &str| ends(before) && !ends(now);
    let is_lost = lost_end(running.source.text(), document.source.text())
        || lost_end(running.keys_file.text.reveal(), document.keys_file.text.reveal());
    if is_lost && !changes.is_empty() {
        let message = "the file no longer ends with a newline: its last line may be truncated";
        findings.push(Finding::new(Code::LineEndGone, message).help("end the last line with a newline"));
    }
    findings
}

/// Returns whether `text` is a beginning of `of` that is neither empty nor all of it.
fn is_beginning(text: &str, of: &str) -> bool {
    !text.is_empty() && text.len() < of.len() && of.starts_with(text)
}

/// Formats a count and its noun, such as `1 rule` or `2 rules`.
fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
