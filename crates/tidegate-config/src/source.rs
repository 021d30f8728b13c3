//! The text to which findings refer: a file as reports quote it, or the names of values that were set in code.

use std::fmt;

use miette::{MietteError, MietteSpanContents, SourceCode, SourceSpan, SpanContents};

use super::forms::Secret;
use super::span::Span;

/// The origin of a configuration, to which the spans of its findings refer.
///
/// Either a file, with its name, its text and a masked copy for reports; or a configuration that was built in code,
/// with the names of its values, such as `store`.
pub struct ConfigSource {
    name: String,
    text: Secret,
    /// The text with its secrets masked, of the same length. `None` if no part of the text may be quoted.
    masked: Option<String>,
    /// The name of the value whose span starts at this index. Empty for a file.
    values: Vec<String>,
    /// The spans of the tables of a file that could be read only in part.
    partly_read: Vec<Span>,
}

impl ConfigSource {
    /// Creates the source of a file that was parsed. Reports quote `masked`, in which every byte has the position that
    /// it has in `text`. `partly_read` are the spans of the tables that have an error.
    pub(crate) fn masked(name: &str, text: &str, masked: String, partly_read: Vec<Span>) -> ConfigSource {
        ConfigSource { masked: Some(masked), partly_read, ..ConfigSource::unquoted(name, text) }
    }

    /// Creates the source of a file that could not be parsed. Reports give lines and columns, and quote nothing.
    pub fn unquoted(name: &str, text: &str) -> ConfigSource {
        ConfigSource {
            name: name.to_owned(),
            text: Secret::new(text),
            masked: None,
            values: Vec::new(),
            partly_read: Vec::new(),
        }
    }

    /// Creates the source of a configuration that was built in code, for which reports use `name`.
    ///
    /// The span of a value starts at the index of its name in `values`.
    pub(crate) fn of_values(name: &str, values: Vec<String>) -> ConfigSource {
        ConfigSource { values, ..ConfigSource::unquoted(name, "") }
    }

    /// Returns the name of the value that was built in code and has this span. Returns `None` for a file or an unknown
    /// span.
    pub(crate) fn value(&self, span: Span) -> Option<&str> {
        self.values.get(span.start).filter(|_| !span.is_unknown()).map(String::as_str)
    }

    /// Returns whether the configuration was built in code.
    pub fn is_code(&self) -> bool {
        !self.values.is_empty()
    }

    /// Returns whether a finding with this span is certain, although parts of the file may not have been read.
    ///
    /// If there are such parts, a finding without a place may be about a default or a stand-in for a value that could
    /// not be read. A finding about a whole table that was read in part may be about a field that is not missing.
    pub fn is_certain(&self, span: Span) -> bool {
        self.partly_read.is_empty() || !(span.is_unknown() || self.partly_read.contains(&span))
    }

    /// Returns whether reports may quote the masked text: it is a file that was parsed.
    pub(crate) fn is_quoted(&self) -> bool {
        self.masked.is_some()
    }

    /// Returns a span that can be underlined: `span` itself, or one character if `span` is empty.
    ///
    /// The character is the one at `span.start`; if that is white space or beyond the end, the last one before it that
    /// is not white space. If the text is empty, `span` is returned.
    pub(crate) fn visible(&self, span: Span) -> Span {
        let text = self.text.reveal();
        if span.end > span.start || text.is_empty() {
            return span;
        }
        let start = span.start.min(text.len() - 1);
        let before = text.as_bytes()[..=start].iter().rposition(|byte| !byte.is_ascii_whitespace()).unwrap_or(0);
        let at = if text.as_bytes()[start].is_ascii_whitespace() { before } else { start };
        let at = text.floor_char_boundary(at);
        Span::new(at, text.ceil_char_boundary(at + 1))
    }

    /// Returns the name of the file, or that of a configuration built in code.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the text of the file with its secrets. It is empty for a configuration built in code.
    pub fn text(&self) -> &str {
        self.text.reveal()
    }

    /// Returns the line and the column of the byte at offset `at`, both counted from 1. Columns count characters.
    ///
    /// An offset beyond the end is treated as the end of the text.
    pub(crate) fn line_and_column(&self, at: usize) -> (usize, usize) {
        let text = self.text.reveal().as_bytes();
        let before = &text[..at.min(text.len())];
        let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
        let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
        (line, String::from_utf8_lossy(&before[line_start..]).chars().count() + 1)
    }

    /// Returns the span in the file of a part of a string value. `part` is a range of bytes in `value`.
    ///
    /// Returns `value_span`, the span of the whole value, if the value is empty or written with escapes. For an empty
    /// part, returns the character after it, or the last one of the value.
    pub fn inside(&self, value_span: Span, value: &str, part: std::ops::Range<usize>) -> Span {
        let written = self.text.reveal().get(value_span.start..value_span.end).unwrap_or_default();
        let Some(at) = written.find(value).filter(|_| !value.is_empty()) else { return value_span };
        let start = value_span.start + at;
        let end = start + part.end.max(part.start + 1).min(value.len());
        Span::new((start + part.start).min(end.saturating_sub(1)), end)
    }
}

impl fmt::Debug for ConfigSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigSource").field("name", &self.name).finish_non_exhaustive()
    }
}

impl SourceCode for ConfigSource {
    fn read_span<'a>(
        &'a self,
        span: &SourceSpan,
        context_lines_before: usize,
        context_lines_after: usize,
    ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
        let masked = self.masked.as_deref().unwrap_or_default();
        let inner = masked.read_span(span, context_lines_before, context_lines_after)?;
        Ok(Box::new(MietteSpanContents::new_named(
            self.name.clone(),
            inner.data(),
            *inner.span(),
            inner.line(),
            inner.column(),
            inner.line_count(),
        )))
    }
}
