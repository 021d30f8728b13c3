//! A file as a tree of values, each with its place: what TOML and YAML have in common.
//!
//! ```text
//!   TOML text ─▶ toml.rs ─┐
//!                         ├─▶ tree ─▶ read.rs ─▶ Config, or an error with a place
//!   YAML text ─▶ yaml.rs ─┘     └───▶ mask.rs ─▶ the text that reports may show
//! ```
//!
//! Both formats have their own serde deserializer, but each reports places in its own way and loses them in
//! its own cases. One tree gives one reader, one kind of error, and one place that knows which values are secret.

use super::span::Span;

/// Deeper files are refused; ours need six levels.
pub(crate) const DEPTH_MAX: usize = 32;

/// A value and its place.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) span: Span,
    pub(crate) value: Value,
}

#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// Only YAML has it.
    #[cfg_attr(not(feature = "yaml"), allow(dead_code))]
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Table(Vec<Entry>),
}

/// A field of a table.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_span: Span,
    pub(crate) node: Node,
}

/// Why a text is no tree.
#[derive(Clone, Debug)]
pub(crate) struct SyntaxError {
    pub(crate) message: String,
    pub(crate) span: Span,
}

impl Value {
    /// The kind, as messages call it.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Value::Null => "nothing",
            Value::Bool(_) => "true or false",
            Value::Int(_) => "a whole number",
            Value::Float(_) => "a number",
            Value::Text(_) => "a text",
            Value::List(_) => "a list",
            Value::Table(_) => "a table",
        }
    }
}
