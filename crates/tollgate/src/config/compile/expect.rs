//! What the file says about itself: how many rules and keys it has, and that it is whole.

use std::sync::Arc;

use super::Compiler;
use crate::config::finding::{Code, Finding};
use crate::config::source::Source;
use crate::config::span::{Span, Spanned};
use crate::config::types::Config;

impl Compiler<'_> {
    /// Notes a number of rules or keys that is not the expected one.
    pub(super) fn check_count(&mut self, expected: Option<&Spanned<u32>>, count: usize, noun: &str) {
        let Some(expected) = expected else { return };
        if u64::from(**expected) != count as u64 {
            let plural = if **expected == 1 { "" } else { "s" };
            let message = format!("expected {} {noun}{plural}, found {count}", **expected);
            let help = format!("correct the number; or, if there should be {}, the file is not whole", **expected);
            self.note(Finding::new(Code::ExpectationUnmet, message).help(help).at(expected.span()));
        }
    }

    /// Notes a file that has `expect` and whose last line may be cut off.
    pub(super) fn check_line_end(&mut self, config: &Config, text: &str) {
        let source = self.source.clone();
        if config.expect.is_some() {
            self.check_line_end_in(text, &source);
        }
    }

    /// The same for the text of another file.
    pub(super) fn check_line_end_in(&mut self, text: &str, source: &Arc<Source>) {
        if !text.is_empty() && !text.ends_with('\n') {
            let message = "the file does not end with a line end: its last line may be cut off";
            let finding = Finding::new(Code::FileCutOff, message).help("end the last line with a line end");
            let end = source.visible(Span::new(text.len(), text.len()));
            self.note_in(source, finding.label("the last character").at(end));
        }
    }
}
