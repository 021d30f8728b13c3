//! The text of a file as reports may quote it.
//!
//! A report shows the line with the error and its neighbours, and reports end up in logs. So everything is masked that
//! the reader has not recognised as free of secrets: the values of secret fields, unknown fields, comments. A file that
//! is not valid TOML or YAML is not quoted at all.
//!
//! Each byte is replaced by one byte, so spans of the text are also spans of the masked text.

use super::span::Span;
use super::tree::{Node, Value};

/// Returns a copy of the text, of the same length, in which everything is replaced by `*` except the `shown` spans,
/// white space and punctuation.
///
/// Within the values and field names of `root`, punctuation other than quotes is replaced too. Each byte of a character
/// that is not ASCII becomes one `*`.
pub(crate) fn mask(text: &str, root: &Node, shown: &[Span]) -> String {
    let star = |byte: u8| if byte.is_ascii_alphanumeric() || !byte.is_ascii() { b'*' } else { byte };
    let mut bytes: Vec<u8> = text.bytes().map(star).collect();
    cover_values(root, &mut bytes);
    for span in shown {
        if let Some(part) = text.get(span.start..span.end) {
            bytes[span.start..span.end].copy_from_slice(part.as_bytes());
        }
    }
    String::from_utf8(bytes).expect("whole characters are replaced by ASCII bytes")
}

/// Replaces the bytes of all values and all names of fields under a node.
fn cover_values(node: &Node, bytes: &mut [u8]) {
    match &node.value {
        Value::List(items) => items.iter().for_each(|item| cover_values(item, bytes)),
        Value::Table(entries) => entries.iter().for_each(|entry| {
            cover(entry.key_span, bytes);
            cover_values(&entry.node, bytes);
        }),
        Value::Null | Value::Bool(_) | Value::Int(_) | Value::Float | Value::Text(_) => cover(node.span, bytes),
    }
}

/// Replaces the bytes of a span by `*`, except quotes, line ends and spaces. Ignores a span outside `bytes`.
fn cover(span: Span, bytes: &mut [u8]) {
    for byte in bytes.get_mut(span.start..span.end).unwrap_or_default() {
        if !matches!(byte, b'"' | b'\'' | b'\n' | b'\r' | b' ') {
            *byte = b'*';
        }
    }
}

#[cfg(test)]
mod tests;
