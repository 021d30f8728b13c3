//! A file as a tree of values, each with its place: what TOML and YAML have in common.
//!
//! ```text
//!   TOML text ─▶ toml.rs ─┐              ┌─▶ Config, and every error with its place
//!                         ├─▶ tree ─▶ read.rs
//!   YAML text ─▶ yaml.rs ─┘              └─▶ what reports may quote ─▶ mask.rs
//! ```
//!
//! Both formats have a serde deserializer of their own, but each reports places in its own way, loses them in its own
//! cases, and stops at the first error. With one tree there is one reader, one kind of error, and one place that
//! decides which values are secret.

use super::span::Span;

/// The maximum number of nested lists and tables in a file. A configuration needs six levels.
pub(crate) const DEPTH_MAX: usize = 32;

/// A value of a file, and its span.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) span: Span,
    pub(crate) value: Value,
}

/// A value of a file, without its span. Only YAML and JSON have `Null`. The value of a `Float` is not kept, because no field
/// takes one. A date or time of TOML is a `Text`.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Float,
    Text(String),
    List(Vec<Node>),
    Table(Vec<Entry>),
}

/// A field of a table: its name, the span of the name, and its value.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_span: Span,
    pub(crate) node: Node,
}

/// The error of a text that is not valid TOML or YAML. The message contains no value of the text, which may be a
/// secret.
#[derive(Clone, Debug)]
pub(crate) struct SyntaxError {
    pub(crate) message: String,
    pub(crate) span: Span,
}

impl Node {
    /// Converts a JSON value, whose spans are unknown. A number that is not an `i64` becomes a `Float`.
    pub(crate) fn from_json(json: &serde_json::Value) -> Node {
        let value = match json {
            serde_json::Value::Null => Value::Null,
            serde_json::Value::Bool(value) => Value::Bool(*value),
            serde_json::Value::Number(number) => number.as_i64().map_or(Value::Float, Value::Int),
            serde_json::Value::String(text) => Value::Text(text.clone()),
            serde_json::Value::Array(items) => Value::List(items.iter().map(Node::from_json).collect()),
            serde_json::Value::Object(fields) => {
                let entry = |(key, value): (&String, &serde_json::Value)| Entry {
                    key: key.clone(),
                    key_span: Span::default(),
                    node: Node::from_json(value),
                };
                Value::Table(fields.iter().map(entry).collect())
            }
        };
        Node { span: Span::default(), value }
    }
}

impl Value {
    /// Returns the type of the value for messages, such as `a string`.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Value::Null => "nothing",
            Value::Bool(_) => "true or false",
            Value::Int(_) | Value::Float => "a number",
            Value::Text(_) => "a string",
            Value::List(_) => "a list",
            Value::Table(_) => "a table",
        }
    }
}
