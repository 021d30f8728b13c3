//! The values of fields: reads them from a tree, and collects every error on the way.
//!
//! A type that implements [`FieldValue`] reads itself from a node. A value that cannot be read is noted, and reading
//! continues with the next one, so that one attempt reports all errors of a file. Messages name types ("a string"),
//! never values: a value may be a secret.
//!
//! The reader also collects what reports may quote: the names of known fields, and the values of fields that hold no
//! secret. Everything else stays masked (see [`mask`](super::mask)): secrets, unknown fields with their values,
//! comments.

use std::collections::BTreeMap;

use super::changes::{self, Changes};
use super::finding::{Code, Finding};
use super::span::{Span, Spanned};
use super::suggest::nearest;
use super::table::ValueNames;
use super::tree::{Entry, Node, Value};

/// A type that a field of a table can have: how it is read, and how findings and reloads name it.
pub(crate) trait FieldValue: Sized + PartialEq {
    /// Reads the value from a node. If it cannot be read, adds an error to the reader and returns `None`.
    ///
    /// A value may be returned although a part of it has an error: that part has its default, and the reader has the
    /// error.
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<Self>;

    /// Returns the value for a field that is absent from its table. Defaults to `None`: the field is required.
    fn absent() -> Option<Self> {
        None
    }

    /// Returns a placeholder for a required field that is missing or cannot be read, so that the rest of its table is
    /// still checked. Defaults to `None`: the table is left out.
    ///
    /// The span of the placeholder is unknown, so findings about it are left out; see
    /// [`ConfigSource::is_certain`](super::source::ConfigSource).
    fn stand_in() -> Option<Self> {
        None
    }

    /// Adds the difference between this value and the one that replaces it to the changes of a reload.
    ///
    /// `name` is the field, and `owner` its part, such as `rule login`, or empty if it is a setting of the file. By
    /// default, the field is removed if it has the value of an absent one now, and changed if it has any other.
    fn note_changes(&self, after: &Self, name: &str, owner: &str, changes: &mut Changes) {
        if self != after {
            match Self::absent() {
                Some(absent) if absent == *after => changes.lost_field(name, owner),
                _ => changes.changed_field(name, owner),
            }
        }
    }

    /// Adds the difference of a value that need not be in the file, but is there before and after. By default, the
    /// field is changed if it differs.
    fn note_changes_of_present(&self, after: &Self, name: &str, owner: &str, changes: &mut Changes) {
        if self != after {
            changes.changed_field(name, owner);
        }
    }

    /// Adds the name of this value, which is read only at startup, to the changes of a reload if it differs. Of a table,
    /// the names of the fields that differ.
    fn note_restart(&self, after: &Self, name: &str, changes: &mut Changes) {
        if self != after {
            changes.restart.push(name.to_owned());
        }
    }

    /// Adds the difference between two lists of such values. By default, see [`changes::note_list`].
    fn note_item_changes(
        before: &[Spanned<Self>],
        after: &[Spanned<Self>],
        name: &str,
        owner: &str,
        changes: &mut Changes,
    ) {
        changes::note_list(before, after, name, owner, changes);
    }

    /// Names all values in this one that were set in code, for findings about them. `name` is that of this value. Does
    /// nothing by default.
    fn name_values(&mut self, _name: &str, _names: &mut ValueNames) {}

    /// Returns the name of this value as the entry `index` of the list with the name `list`. Defaults to `list`.
    fn item_name(&self, list: &str, _index: usize) -> String {
        list.to_owned()
    }
}

/// An enum whose values are written in the file as one of a few names.
pub(crate) trait Named: Clone + PartialEq + 'static {
    /// The names, each with its value.
    const NAMES: &'static [(&'static str, Self)];

    /// Returns the value for a field that is absent from its table. Defaults to `None`: the field is required.
    fn absent() -> Option<Self> {
        None
    }

    /// Returns all names, separated by commas, for messages.
    fn names() -> String {
        Self::NAMES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    }
}

/// Collects the errors of a file while it is read, and the places that reports may quote.
pub(crate) struct Reader<'t> {
    text: &'t str,
    errors: Vec<Finding>,
    shown: Vec<Span>,
    partly_read: Vec<Span>,
}

/// What a [`Reader`] collected.
pub(crate) struct ReadResult {
    /// The errors, in the order in which they were found.
    pub(crate) errors: Vec<Finding>,
    /// The spans that reports may quote.
    pub(crate) shown: Vec<Span>,
    /// The spans of the tables that have an error: some of their fields have a default or a stand-in instead of their
    /// value.
    pub(crate) partly_read: Vec<Span>,
}

/// A table whose fields are being read, returned by [`Reader::table`].
pub(crate) struct Fields<'n> {
    entries: &'n [Entry],
    span: Span,
    /// The number of errors of the file before this table.
    errors_before: usize,
    /// The known fields that are similar to an unknown one. They are probably misspelt, so they are not reported as
    /// missing.
    misspelt: Vec<&'static str>,
}

impl<'t> Reader<'t> {
    /// Creates a reader for a tree that was parsed from `text`.
    pub(crate) fn new(text: &'t str) -> Reader<'t> {
        Reader { text, errors: Vec::new(), shown: Vec::new(), partly_read: Vec::new() }
    }

    /// Returns the errors, the spans that reports may quote, and the tables that could be read only in part.
    pub(crate) fn finish(self) -> ReadResult {
        ReadResult { errors: self.errors, shown: self.shown, partly_read: self.partly_read }
    }

    /// Adds the error that a node does not have the type `expected`, such as `a string`. Returns `None`, for the caller
    /// to return.
    pub(crate) fn wrong_type<T>(&mut self, node: &Node, expected: &str) -> Option<T> {
        let message = format!("expected {expected}, found {}", node.value.kind());
        let finding = Finding::new(Code::WrongType, message).at(node.span);
        let is_unquoted = matches!(node.value, Value::Int(_) | Value::Float | Value::Bool(_));
        self.refuse(match &node.value {
            _ if is_unquoted && expected == "a string" => finding.help("put it in quotes"),
            Value::Table(_) if expected == "a list" => finding.help(self.list_help(node)),
            _ => finding,
        })
    }

    /// Returns how to write a table as an entry of a list.
    fn list_help(&self, node: &Node) -> String {
        let written = self.text.get(node.span.start..node.span.end).unwrap_or_default();
        // The header of a table in TOML, whose names were all known.
        let header = written.strip_prefix('[').and_then(|rest| rest.split_once(']')).map(|(name, _)| name);
        match header.filter(|name| !name.starts_with('[')) {
            Some(name) => format!("write [[{name}]], with two brackets, before each entry of the list"),
            None => "write a list: [{ … }] in TOML, or entries that begin with `-` in YAML".to_owned(),
        }
    }

    /// Adds an error. Returns `None`, for the caller to return. The error must not contain a value that may be secret.
    pub(crate) fn refuse<T>(&mut self, finding: Finding) -> Option<T> {
        self.errors.push(finding);
        None
    }

    /// Adds an error about the value of a node that has the right type. Returns `None`, for the caller to return.
    ///
    /// `message` must not contain a value that may be secret.
    pub(crate) fn invalid<T>(&mut self, node: &Node, message: String) -> Option<T> {
        self.refuse(Finding::new(Code::InvalidValue, message).at(node.span))
    }

    /// Allows reports to quote the value of a node. Does nothing for a list or a table, whose entries are allowed one
    /// by one.
    ///
    /// Of a text with `:` before its last `@`, only the scheme and the part from the `@` are allowed: it may contain a
    /// password.
    pub(crate) fn show(&mut self, node: &Node) {
        match &node.value {
            Value::List(_) | Value::Table(_) => {}
            Value::Text(text) => self.show_text(node.span, text),
            Value::Null | Value::Bool(_) | Value::Int(_) | Value::Float => self.shown.push(node.span),
        }
    }

    /// Allows reports to quote a text, except a user and a password in it, as in `redis://user:password@host`.
    fn show_text(&mut self, span: Span, text: &str) {
        match text.rsplit_once('@') {
            Some((before, _)) if before.contains(':') => self.show_host(span),
            _ => self.shown.push(span),
        }
    }

    /// Allows reports to quote a store's URL. If it contains an `@`, only the scheme and the part from the last `@` are
    /// allowed.
    pub(crate) fn show_url(&mut self, span: Span, url: &str) {
        if url.contains('@') { self.show_host(span) } else { self.shown.push(span) }
    }

    /// Allows reports to quote the scheme of a URL, and the part from its last `@`. Nothing if the `@` is written as an
    /// escape.
    fn show_host(&mut self, span: Span) {
        let written = self.text.get(span.start..span.end).unwrap_or_default();
        // Without an `@` it is written with escapes: nothing is shown.
        let Some(at) = written.rfind('@') else { return };
        let is_scheme_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.\"'".contains(&byte);
        if let Some(scheme) = written[..at].find("://").filter(|end| written[..*end].bytes().all(is_scheme_byte)) {
            self.shown.push(Span::new(span.start, span.start + scheme + "://".len()));
        }
        self.shown.push(Span::new(span.start + at, span.end));
    }

    /// Returns the fields of a table, to be read by [`Reader::field`]. Adds an error for each field that is not in
    /// `known`.
    ///
    /// If the node is not a table, adds an error and returns `None`. Allows reports to quote the names of known fields.
    /// The name of an unknown field is quoted only if it is similar to a known one, and its value never: both may be
    /// secret.
    pub(crate) fn table<'n>(&mut self, node: &'n Node, known: &[&'static str]) -> Option<Fields<'n>> {
        let Value::Table(entries) = &node.value else { return self.wrong_type(node, "a table") };
        let written = self.text.get(node.span.start..node.span.end).unwrap_or_default();
        if written.starts_with('[') {
            // The header of a table in TOML, whose names were all known.
            self.show_text(node.span, written);
        }
        let errors_before = self.errors.len();
        let mut misspelt = Vec::new();
        for Entry { key, key_span, .. } in entries {
            if known.contains(&key.as_str()) {
                self.shown.push(*key_span);
                continue;
            }
            let finding = match nearest(key, known.iter().copied()) {
                Some(meant) => {
                    self.shown.push(*key_span);
                    misspelt.push(meant);
                    Finding::new(Code::UnknownField, format!("unknown field `{key}`"))
                        .help(format!("did you mean `{meant}`?"))
                }
                None => Finding::new(Code::UnknownField, "unknown field")
                    .help(format!("accepted here: {}", known.join(", "))),
            };
            self.errors.push(finding.at(*key_span));
        }
        Some(Fields { entries, span: node.span, errors_before, misspelt })
    }

    /// Reads the field `name` of a table. `name` must be among the known fields that were passed to [`Reader::table`].
    ///
    /// If the table does not have the field, or its value cannot be read, returns `absent`, or else the
    /// [stand-in](FieldValue::stand_in) of its type. Returns `None` if there is neither.
    ///
    /// A value that cannot be read adds its own error. If `absent` is `None`, the field is required: a missing one adds
    /// an error, unless an unknown field has a similar name.
    pub(crate) fn field<T: FieldValue>(
        &mut self,
        fields: &Fields<'_>,
        name: &'static str,
        absent: Option<T>,
    ) -> Option<T> {
        if let Some(entry) = fields.entries.iter().find(|entry| entry.key == name) {
            return T::from_node(&entry.node, self).or(absent).or_else(T::stand_in);
        }
        if absent.is_none() && !fields.misspelt.contains(&name) {
            let finding = Finding::new(Code::MissingField, format!("missing field `{name}`"));
            self.errors.push(finding.help(format!("add `{name}` to this table")).at(fields.span));
        }
        absent.or_else(T::stand_in)
    }

    /// Ends the reading of a table, all of whose fields were read. Records the table as partly read if it has an error.
    pub(crate) fn end_table(&mut self, fields: &Fields<'_>) {
        if self.errors.len() > fields.errors_before {
            self.partly_read.push(fields.span);
        }
    }

    /// Reads the values of a list. Those that cannot be read are noted and left out, so that the others are still
    /// checked.
    ///
    /// Returns `None` if there are values and none of them can be read: an empty list would mean something else.
    pub(crate) fn list<T: FieldValue>(&mut self, nodes: &[Node]) -> Option<Vec<T>> {
        let values: Vec<T> = nodes.iter().filter_map(|node| T::from_node(node, self)).collect();
        (nodes.is_empty() || !values.is_empty()).then_some(values)
    }
}

impl FieldValue for bool {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<bool> {
        reader.show(node);
        match node.value {
            Value::Bool(value) => Some(value),
            _ => reader.wrong_type(node, "true or false"),
        }
    }

    fn absent() -> Option<bool> {
        Some(false)
    }
}

impl FieldValue for String {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<String> {
        reader.show(node);
        match &node.value {
            Value::Text(text) => Some(text.clone()),
            _ => reader.wrong_type(node, "a string"),
        }
    }

    fn stand_in() -> Option<String> {
        Some(String::new())
    }

    fn item_name(&self, list: &str, _index: usize) -> String {
        format!("{list} `{self}`")
    }
}

macro_rules! whole_numbers {
    ($($type:ident)*) => {$(
        impl FieldValue for $type {
            fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<$type> {
                reader.show(node);
                let Value::Int(number) = node.value else { return reader.wrong_type(node, "a whole number") };
                $type::try_from(number).ok().or_else(|| {
                    let max = $type::MAX;
                    reader.invalid(node, format!("expected a whole number from 0 to {max}, found {number}"))
                })
            }
        }
    )*};
}

whole_numbers! { u8 u32 u64 }

impl<T: Named> FieldValue for T {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<T> {
        reader.show(node);
        let expected = format!("one of {}", T::names());
        let Value::Text(text) = &node.value else { return reader.wrong_type(node, &expected) };
        let found = T::NAMES.iter().find(|(name, _)| name == text);
        found.map(|(_, value)| value.clone()).or_else(|| {
            let finding = Finding::new(Code::InvalidValue, format!("expected {expected}")).at(node.span);
            let meant = nearest(text, T::NAMES.iter().map(|(name, _)| *name));
            reader.errors.push(match meant {
                Some(name) => finding.help(format!("did you mean `{name}`?")),
                None => finding,
            });
            None
        })
    }

    fn absent() -> Option<T> {
        <T as Named>::absent()
    }
}

impl<T: FieldValue> FieldValue for Option<T> {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<Option<T>> {
        match node.value {
            Value::Null => Some(None),
            _ => T::from_node(node, reader).map(Some),
        }
    }

    fn absent() -> Option<Option<T>> {
        Some(None)
    }

    fn note_changes(&self, after: &Option<T>, name: &str, owner: &str, changes: &mut Changes) {
        match (self, after) {
            (Some(_), None) => changes.lost_field(name, owner),
            (None, Some(_)) => changes.added_field(owner),
            (Some(before), Some(after)) => before.note_changes_of_present(after, name, owner, changes),
            (None, None) => {}
        }
    }

    fn name_values(&mut self, name: &str, names: &mut ValueNames) {
        if let Some(value) = self {
            value.name_values(name, names);
        }
    }
}

impl<T: FieldValue> FieldValue for Vec<T> {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<Vec<T>> {
        match &node.value {
            Value::List(items) => reader.list(items),
            _ => reader.wrong_type(node, "a list"),
        }
    }

    fn absent() -> Option<Vec<T>> {
        Some(Vec::new())
    }

    fn note_changes(&self, after: &Vec<T>, name: &str, owner: &str, changes: &mut Changes) {
        changes::note_list(self, after, name, owner, changes);
    }

    fn name_values(&mut self, name: &str, names: &mut ValueNames) {
        name_items(self, name, names);
    }
}

/// Names the values in a list, each by [`FieldValue::item_name`].
pub(crate) fn name_items<T: FieldValue>(items: &mut [T], name: &str, names: &mut ValueNames) {
    for (index, item) in items.iter_mut().enumerate() {
        item.name_values(&item.item_name(name, index), names);
    }
}

/// Reads a table with free names. Entries that cannot be read are noted and left out.
impl<T: FieldValue> FieldValue for BTreeMap<Spanned<String>, T> {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<Self> {
        let Value::Table(entries) = &node.value else { return reader.wrong_type(node, "a table") };
        let mut map = BTreeMap::new();
        for Entry { key, key_span, node } in entries {
            reader.show_text(*key_span, key);
            if let Some(value) = T::from_node(node, reader) {
                map.insert(Spanned::new(key.clone(), *key_span), value);
            }
        }
        Some(map)
    }

    fn absent() -> Option<Self> {
        Some(BTreeMap::new())
    }

    /// Only the removal of an entry is noted.
    fn note_changes(&self, after: &Self, name: &str, owner: &str, changes: &mut Changes) {
        if self.keys().any(|key| !after.contains_key(key)) {
            changes.lost_field(name, owner);
        }
    }

    fn name_values(&mut self, name: &str, names: &mut ValueNames) {
        let entries = std::mem::take(self).into_iter().map(|(key, mut value)| {
            let name = key.item_name(name, 0);
            value.name_values(&name, names);
            (Spanned::new(key.to_string(), names.add(&name)), value)
        });
        *self = entries.collect();
    }
}

impl<T: FieldValue> FieldValue for Spanned<T> {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<Spanned<T>> {
        T::from_node(node, reader).map(|value| Spanned::new(value, node.span))
    }

    fn absent() -> Option<Spanned<T>> {
        T::absent().map(Spanned::from)
    }

    fn stand_in() -> Option<Spanned<T>> {
        T::stand_in().map(Spanned::from)
    }

    fn note_changes(&self, after: &Spanned<T>, name: &str, owner: &str, changes: &mut Changes) {
        T::note_changes(self, after, name, owner, changes);
    }

    fn note_changes_of_present(&self, after: &Spanned<T>, name: &str, owner: &str, changes: &mut Changes) {
        T::note_changes_of_present(self, after, name, owner, changes);
    }

    fn name_values(&mut self, name: &str, names: &mut ValueNames) {
        self.set_span(names.add(name));
        T::name_values(self, name, names);
    }

    fn item_name(&self, list: &str, index: usize) -> String {
        T::item_name(self, list, index)
    }
}
