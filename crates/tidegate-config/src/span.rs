//! Places in a file.

use std::ops::{Deref, DerefMut};

/// A range of bytes in a file. The default, `0..0`, means that the place is unknown.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Span {
    /// The offset of the first byte.
    pub start: usize,
    /// The offset after the last byte.
    pub end: usize,
}

impl Span {
    /// Creates the span of the bytes `start..end`.
    pub const fn new(start: usize, end: usize) -> Span {
        Span { start, end }
    }

    /// Returns whether the place is unknown: the span ends at 0.
    pub const fn is_unknown(&self) -> bool {
        self.end == 0
    }
}

impl From<Span> for miette::SourceSpan {
    fn from(span: Span) -> Self {
        (span.start, span.end.saturating_sub(span.start)).into()
    }
}

/// A value and its span in the file. The span of a value that was converted with `into` is unknown.
///
/// If the configuration was built in code, the span starts at the index of the value's name in its
/// [`ConfigSource`](super::source::ConfigSource).
///
/// Equality and order are those of the values alone.
#[derive(Clone, Debug, Default)]
pub struct Spanned<T> {
    value: T,
    span: Span,
}

impl<T> Spanned<T> {
    /// Creates a value with its span.
    pub const fn new(value: T, span: Span) -> Spanned<T> {
        Spanned { value, span }
    }

    /// Sets the span.
    pub(crate) const fn set_span(&mut self, span: Span) {
        self.span = span;
    }

    /// Returns the span in the file, which may be unknown.
    pub const fn span(&self) -> Span {
        self.span
    }
}

impl<T> From<T> for Spanned<T> {
    fn from(value: T) -> Self {
        Spanned { value, span: Span::default() }
    }
}

impl<T> Deref for Spanned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Spanned<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: PartialEq> PartialEq for Spanned<T> {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl<T: Eq> Eq for Spanned<T> {}

impl<T: PartialOrd> PartialOrd for Spanned<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        self.value.partial_cmp(&other.value)
    }
}

impl<T: Ord> Ord for Spanned<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.value.cmp(&other.value)
    }
}
