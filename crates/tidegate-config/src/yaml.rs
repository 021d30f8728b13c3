//! Parses YAML into a tree.
//!
//! The parser reports the place of every scalar, but only the start of a list or a table, so the place of a table is
//! that of its first field. Only `true` and `false` are booleans; `yes`, `no`, `on` and `off` are strings. Messages of
//! the parser that may contain a part of the file are replaced, because the part may be a secret.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Location, Spanned};

use super::span::Span;
use super::tree::{DEPTH_MAX, Entry, Node, SyntaxError, Value};

/// Parses a YAML text. Returns its root, which need not be a table.
///
/// A root that is null, as in a text that is empty or has only comments, becomes an empty table, as in TOML.
///
/// # Errors
/// Returns one error: the first that the parser finds, or a value that is nested deeper than [`DEPTH_MAX`].
pub(crate) fn parse(text: &str) -> Result<Node, Vec<SyntaxError>> {
    let options = serde_saphyr::options! {
        strict_booleans: true,
        with_snippet: false,
    };
    let root: Spanned<Raw> =
        serde_saphyr::from_str_with_options(text, options).map_err(|error| vec![syntax_error(&error, text)])?;
    let root = node(root, text, 0).map_err(|error| vec![error])?;
    match root.value {
        Value::Null => Ok(Node { span: root.span, value: Value::Table(Vec::new()) }),
        _ => Ok(root),
    }
}

fn syntax_error(error: &serde_saphyr::Error, text: &str) -> SyntaxError {
    use serde_saphyr::Error;
    let mut message = match error.without_snippet() {
        Error::DuplicateMappingKey { .. } => "duplicate key".to_owned(),
        // These contain nothing of the file.
        error @ (Error::Message { .. }
        | Error::ExternalMessage { .. }
        | Error::Eof { .. }
        | Error::MultipleDocuments { .. }
        | Error::Unexpected { .. }
        | Error::UnknownAnchor { .. }
        | Error::IndentationError { .. }
        | Error::Budget { .. }) => error.to_string(),
        _ => "expected a string, a number, true, false, a list or a table".to_owned(),
    };
    if let Some(at) = message.rfind(" at line ") {
        message.truncate(at);
    }
    let span = error.location().map_or(Span::new(0, text.len()), |location| span_of(&location, text));
    SyntaxError { message, span }
}

fn node(spanned: Spanned<Raw>, text: &str, depth: usize) -> Result<Node, SyntaxError> {
    let mut span = span_of(&spanned.referenced, text);
    if depth > DEPTH_MAX {
        return Err(SyntaxError { message: format!("nested deeper than {DEPTH_MAX} levels"), span });
    }
    let value = match spanned.value {
        Raw::Scalar(value) => value,
        Raw::List(items) => {
            Value::List(items.into_iter().map(|item| node(item, text, depth + 1)).collect::<Result<_, _>>()?)
        }
        Raw::Table(entries) => {
            let entry = |(key, value): (Spanned<String>, Spanned<Raw>)| {
                let key_span = span_of(&key.referenced, text);
                Ok(Entry { key: key.value, key_span, node: node(value, text, depth + 1)? })
            };
            let entries = entries.into_iter().map(entry).collect::<Result<Vec<_>, SyntaxError>>()?;
            if let Some(first) = entries.first() {
                span = first.key_span;
            }
            Value::Table(entries)
        }
    };
    Ok(Node { span, value })
}

fn span_of(location: &Location, text: &str) -> Span {
    let span = location.span();
    if let (Some(start), Some(bytes)) = (span.byte_offset(), span.byte_len()) {
        let clip = |at: u64| usize::try_from(at).map_or(text.len(), |at| at.min(text.len()));
        let (start, end) = (clip(start), clip(start.saturating_add(bytes)));
        // A block string reaches to the indentation of the line after it.
        let inside = text.get(start..end).unwrap_or_default();
        return Span::new(start, start + inside.trim_end().len());
    }
    // Errors have offsets in characters only.
    let byte_at = |chars: u64| {
        let chars = usize::try_from(chars).unwrap_or(usize::MAX);
        text.char_indices().nth(chars).map_or(text.len(), |(at, _)| at)
    };
    Span::new(byte_at(span.offset()), byte_at(span.offset() + span.len()))
}

enum Raw {
    Scalar(Value),
    List(Vec<Spanned<Raw>>),
    Table(Vec<(Spanned<String>, Spanned<Raw>)>),
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Int(value)))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Raw, E> {
        let value = i64::try_from(value).map_err(|_| E::custom("this number is too large"))?;
        Ok(Raw::Scalar(Value::Int(value)))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Float))
    }

    fn visit_str<E>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Text(value.to_owned())))
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        Raw::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Raw, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Raw::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Raw, A::Error> {
        let mut table = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            table.push(entry);
        }
        Ok(Raw::Table(table))
    }
}
