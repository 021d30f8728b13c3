//! Parses TOML into a tree.

use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use super::span::Span;
use super::tree::{DEPTH_MAX, Entry, Node, SyntaxError, Value};

/// Parses a TOML text. Returns its root, which is a table.
///
/// # Errors
/// Returns all syntax errors; or, if there are none, the first number that does not fit into 64 bits or value that is
/// nested deeper than [`DEPTH_MAX`].
pub(crate) fn parse(text: &str) -> Result<Node, Vec<SyntaxError>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        return Err(errors.into_iter().map(|error| syntax_error(&error, text)).collect());
    }
    let value = table_value(table.get_ref(), 0).map_err(|error| vec![error])?;
    Ok(Node { span: Span::new(0, 1.min(text.len())), value })
}

fn syntax_error(error: &toml::de::Error, text: &str) -> SyntaxError {
    let span = error.span().unwrap_or(0..text.len());
    SyntaxError { message: error.message().to_owned(), span: Span::new(span.start, span.end) }
}

fn node(spanned: &Spanned<DeValue<'_>>, depth: usize) -> Result<Node, SyntaxError> {
    let span = span_of(spanned.span());
    let value = match spanned.get_ref() {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(number) => integer(number, span)?,
        DeValue::Float(_) => Value::Float,
        DeValue::Boolean(value) => Value::Bool(*value),
        DeValue::Datetime(time) => Value::Text(time.to_string()),
        _ if depth == DEPTH_MAX => return Err(too_deep(span)),
        DeValue::Array(items) => Value::List(items.iter().map(|item| node(item, depth + 1)).collect::<Result<_, _>>()?),
        DeValue::Table(table) => table_value(table, depth + 1)?,
    };
    Ok(Node { span, value })
}

fn table_value(table: &DeTable<'_>, depth: usize) -> Result<Value, SyntaxError> {
    let entry = |(key, value): (&Spanned<std::borrow::Cow<'_, str>>, &Spanned<DeValue<'_>>)| {
        Ok(Entry { key: key.get_ref().to_string(), key_span: span_of(key.span()), node: node(value, depth)? })
    };
    let mut entries = table.iter().map(entry).collect::<Result<Vec<_>, SyntaxError>>()?;
    // The parser sorts by name; errors are reported in the order of the file.
    entries.sort_by_key(|entry| entry.key_span);
    Ok(Value::Table(entries))
}

fn integer(number: &DeInteger<'_>, span: Span) -> Result<Value, SyntaxError> {
    let value = i64::from_str_radix(number.as_str(), number.radix());
    value.map(Value::Int).map_err(|_| SyntaxError { message: "this number is too large".to_owned(), span })
}

fn too_deep(span: Span) -> SyntaxError {
    SyntaxError { message: format!("nested deeper than {DEPTH_MAX} levels"), span }
}

fn span_of(range: std::ops::Range<usize>) -> Span {
    Span::new(range.start, range.end)
}
