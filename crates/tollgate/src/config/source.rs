//! A file as reports quote it, or the names of values that were set in code.

use std::fmt;

use miette::{MietteError, MietteSpanContents, SourceCode, SourceSpan, SpanContents};

use super::forms::Secret;
use super::span::Span;

/// The name of a file, its text, and what reports may quote of it; or, for a configuration that was built in code, the names
/// of its values.
pub(crate) struct Source {
    name: String,
    text: Secret,
    /// The text with its secrets masked, byte for byte. `None` if no part of the text may be quoted.
    masked: Option<String>,
    /// The name of the value whose span starts at this index. Empty for a file.
    values: Vec<String>,
}

impl Source {
    /// Creates the source of a file that was parsed: reports quote `masked`.
    pub(crate) fn masked(name: &str, text: &str, masked: String) -> Source {
        Source { masked: Some(masked), ..Source::unquoted(name, text) }
    }

    /// Creates the source of a file that could not be parsed: reports give lines and columns and quote nothing.
    pub(crate) fn unquoted(name: &str, text: &str) -> Source {
        Source { name: name.to_owned(), text: Secret::new(text), masked: None, values: Vec::new() }
    }

    /// Creates the source of a configuration that was built in code. The span of a value is its index in `values`.
    pub(crate) fn of_values(name: &str, values: Vec<String>) -> Source {
        Source { values, ..Source::unquoted(name, "") }
    }

    /// Returns the name of the value with this span, or `None` if this is a file or the span is unknown.
    pub(crate) fn value(&self, span: Span) -> Option<&str> {
        self.values.get(span.start).filter(|_| !span.is_unknown()).map(String::as_str)
    }

    /// Returns whether reports may quote the text.
    pub(crate) fn is_quoted(&self) -> bool {
        self.masked.is_some()
    }

    /// Returns the span itself, or the nearest character that can be underlined if the span is empty.
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

    /// Returns the name of the file.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the text. It may contain secrets.
    pub(crate) fn text(&self) -> &str {
        self.text.reveal()
    }

    /// Returns line and column of a byte, both from 1. Columns count characters.
    pub(crate) fn line_and_column(&self, at: usize) -> (usize, usize) {
        let text = self.text.reveal().as_bytes();
        let before = &text[..at.min(text.len())];
        let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
        let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
        (line, String::from_utf8_lossy(&before[line_start..]).chars().count() + 1)
    }

    /// Returns the place of a part of a string value: exact if the value is written without escapes, else the whole value.
    pub(crate) fn inside(&self, value_span: Span, value: &str, part: std::ops::Range<usize>) -> Span {
        let written = self.text.reveal().get(value_span.start..value_span.end).unwrap_or_default();
        let Some(at) = written.find(value).filter(|_| !value.is_empty()) else { return value_span };
        let start = value_span.start + at;
        // An empty part is where something is missing: the character before it is underlined.
        let end = start + part.end.max(part.start + 1).min(value.len());
        Span::new((start + part.start).min(end.saturating_sub(1)), end)
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("name", &self.name).finish_non_exhaustive()
    }
}

impl SourceCode for Source {
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
