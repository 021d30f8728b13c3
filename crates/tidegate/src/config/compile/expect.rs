//! Checks of `expect`: the number of rules and keys, and that the file is complete.

use std::sync::Arc;

use super::Compiler;
use crate::config::finding::{Code, Finding};
use crate::config::source::Source;
use crate::config::span::{Span, Spanned};
use crate::config::types::Config;

impl Compiler<'_> {
    /// Adds an error if `count` is not the expected number. `noun` is what is counted: `rule` or `key`.
    ///
    /// Does nothing if `expected` is `None`.
    pub(super) fn check_count(&mut self, expected: Option<&Spanned<u32>>, count: usize, noun: &str) {
        let Some(expected) = expected else { return };
        if u64::from(**expected) != count as u64 {
            let plural = if **expected == 1 { "" } else { "s" };
            let message = format!("expected {} {noun}{plural}, found {count}", **expected);
            let help = format!("correct the number; if there should be {}, the file is incomplete", **expected);
            self.note(Finding::new(Code::ExpectationUnmet, message).help(help).at(expected.span()));
        }
    }

    /// Adds an error if the configuration has `expect` and its file does not end with a newline.
    pub(super) fn check_line_end(&mut self, config: &Config) {
        let source = self.source.clone();
        if config.expect.is_some() {
            self.check_line_end_in(&source);
        }
    }

    /// Adds an error if a file is not empty and does not end with a newline: its last line may be truncated.
    pub(super) fn check_line_end_in(&mut self, source: &Arc<Source>) {
        let text = source.text();
        if !text.is_empty() && !text.ends_with('\n') {
            let message = "the file does not end with a newline: its last line may be truncated";
            let finding = Finding::new(Code::FileCutOff, message).help("end the last line with a newline");
            let end = source.visible(Span::new(text.len(), text.len()));
            self.note_in(source, finding.label("the last character").at(end));
        }
    }
}
