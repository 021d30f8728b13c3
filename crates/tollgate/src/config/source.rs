//! A file as reports may show it: the text with every secret masked, byte for byte, so that places stay true.

use std::fmt;

use miette::{MietteError, MietteSpanContents, SourceCode, SourceSpan, SpanContents};

use super::mask;
use super::span::Span;
use super::tree::Node;

/// A file's name and its masked text; or, for a configuration that was built in code, the names of its values.
pub(crate) struct Source {
    name: String,
    text: String,
    /// The name of the value whose span starts at this index. Empty for a file.
    values: Vec<String>,
}

impl Source {
    /// A file that was understood: the masked values are known from its tree.
    pub(crate) fn of_tree(name: &str, text: &str, root: &Node) -> Source {
        Source { name: name.to_owned(), text: mask::by_tree(text, root), values: Vec::new() }
    }

    /// A file that was not: whatever looks like a secret is masked.
    pub(crate) fn of_broken(name: &str, text: &str) -> Source {
        Source { name: name.to_owned(), text: mask::by_looks(text), values: Vec::new() }
    }

    /// No file at all: a configuration that was made in code.
    pub(crate) fn unwritten(name: &str) -> Source {
        Source::of_values(name, Vec::new())
    }

    /// Creates the source of a configuration that was built in code. The span of a value is its index in `values`.
    pub(crate) fn of_values(name: &str, values: Vec<String>) -> Source {
        Source { name: name.to_owned(), text: String::new(), values }
    }

    /// Returns the name of the value with this span, or `None` if this is a file or the span is unknown.
    pub(crate) fn value(&self, span: Span) -> Option<&str> {
        self.values.get(span.start).filter(|_| !span.is_unknown()).map(String::as_str)
    }

    /// A place that can be underlined: at least one character, none of it a line end.
    pub(crate) fn visible(&self, span: Span) -> Span {
        if span.end > span.start || self.text.is_empty() {
            return span;
        }
        let start = span.start.min(self.text.len() - 1);
        let before = self.text.as_bytes()[..=start].iter().rposition(|byte| !byte.is_ascii_whitespace()).unwrap_or(0);
        let at = if self.text.as_bytes()[start].is_ascii_whitespace() { before } else { start };
        let at = self.text.floor_char_boundary(at);
        Span::new(at, self.text.ceil_char_boundary(at + 1))
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Line and column, both from 1, of a byte.
    pub(crate) fn line_and_column(&self, at: usize) -> (usize, usize) {
        let before = &self.text.as_bytes()[..at.min(self.text.len())];
        let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
        let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
        (line, String::from_utf8_lossy(&before[line_start..]).chars().count() + 1)
    }

    /// The place of a part of a text value: exact if the value stands in the file as it is, with or without quotes,
    /// else the whole value.
    pub(crate) fn inside(&self, value_span: Span, value: &str, part: std::ops::Range<usize>) -> Span {
        let written = self.text.get(value_span.start..value_span.end).unwrap_or_default();
        let Some(at) = written.find(value).filter(|_| !value.is_empty()) else { return value_span };
        let start = value_span.start + at;
        // An empty part is where something is missing: show the character before it.
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
        let inner = self.text.read_span(span, context_lines_before, context_lines_after)?;
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
