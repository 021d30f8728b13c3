//! The forms in which values may be written: one value or a list, a string or a table, `true` or a table; and secrets.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::changes::Changes;
use super::finding::{Code, Finding};
use super::read::{FieldValue, Named, Reader, name_items};
use super::span::Spanned;
use super::table::ValueNames;
use super::tree::{Node, Value};
use super::types::{Anonymize, LimitTable, StoreTable, TemplateTable};
use super::values::BodyName;

/// A list that may also be written as a single value: `"a"` instead of `["a"]`. An absent one is empty.
#[derive(Clone, PartialEq, Debug)]
pub struct OneOrMany<T>(pub Vec<T>);

impl<T> Default for OneOrMany<T> {
    fn default() -> Self {
        OneOrMany(Vec::new())
    }
}

impl<T> std::ops::Deref for OneOrMany<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: FieldValue> FieldValue for OneOrMany<Spanned<T>> {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<Self> {
        let items = match &node.value {
            Value::List(items) => items,
            _ => std::slice::from_ref(node),
        };
        reader.list(items).map(OneOrMany)
    }

    fn absent() -> Option<Self> {
        Some(OneOrMany::default())
    }

    fn stand_in() -> Option<Self> {
        Some(OneOrMany::default())
    }

    fn note_changes(&self, after: &Self, name: &str, owner: &str, changes: &mut Changes) {
        T::note_item_changes(self, after, name, owner, changes);
    }

    fn note_changes_of_present(&self, after: &Self, name: &str, owner: &str, changes: &mut Changes) {
        T::note_item_changes(self, after, name, owner, changes);
    }

    fn name_values(&mut self, name: &str, names: &mut ValueNames) {
        name_items(&mut self.0, name, names);
    }
}

/// A list of which it is known whether the file has it: `rules = []` states that there are no rules, a missing `rules`
/// may be a mistake.
///
/// Dereferences to a slice, which is empty if the list is absent.
#[derive(Clone, PartialEq, Debug)]
pub struct OptionalList<T>(pub Option<Vec<T>>);

impl<T> OptionalList<T> {
    /// Returns whether the file has no such list. `false` for an empty list.
    pub const fn is_absent(&self) -> bool {
        self.0.is_none()
    }
}

impl<T> Default for OptionalList<T> {
    fn default() -> Self {
        OptionalList(None)
    }
}

impl<T> std::ops::Deref for OptionalList<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl<'l, T> IntoIterator for &'l OptionalList<T> {
    type Item = &'l T;
    type IntoIter = std::slice::Iter<'l, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Reads a list. Entries that cannot be read are noted and left out, so that the others are still checked.
impl<T: FieldValue> FieldValue for OptionalList<T> {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<Self> {
        match &node.value {
            Value::List(items) => {
                Some(OptionalList(Some(items.iter().filter_map(|item| T::from_node(item, reader)).collect())))
            }
            _ => reader.wrong_type(node, "a list"),
        }
    }

    fn absent() -> Option<Self> {
        Some(OptionalList::default())
    }

    fn name_values(&mut self, name: &str, names: &mut ValueNames) {
        name_items(self.0.as_deref_mut().unwrap_or_default(), name, names);
    }
}

/// A string whose `Debug` output is `***`, and which reports mask. Of a store's URL, they mask only user and password.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    /// Creates a secret from its plain text.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// Returns the secret in plain text. The caller must neither print nor log it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl FieldValue for Secret {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<Secret> {
        match &node.value {
            Value::Text(text) => Some(Secret::new(text)),
            _ => reader.wrong_type(node, "a string"),
        }
    }

    fn stand_in() -> Option<Secret> {
        Some(Secret::default())
    }
}

/// A time, as written: a whole number and a unit, such as `25ms`. It is parsed when it is compiled.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TimeText(pub String);

impl TimeText {
    /// Returns the error of a time that is a number without a unit.
    pub fn without_unit(number: impl fmt::Display) -> Finding {
        Finding::new(Code::InvalidTime, "this time has no unit")
            .help(format!("write it with a unit and in quotes, such as \"{number}ms\" or \"{number}s\""))
    }
}

impl std::ops::Deref for TimeText {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl FieldValue for TimeText {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<TimeText> {
        reader.show(node);
        match &node.value {
            Value::Text(text) => Some(TimeText(text.clone())),
            Value::Int(number) => reader.refuse(TimeText::without_unit(number).at(node.span)),
            _ => reader.wrong_type(node, "a time such as \"25ms\""),
        }
    }

    fn stand_in() -> Option<TimeText> {
        Some(TimeText(String::new()))
    }
}

/// The URL of a store, or `memory`, not checked yet. Reports do not quote its user and password.
#[derive(Clone, PartialEq, Debug)]
pub struct StoreUrl(pub Secret);

impl FieldValue for StoreUrl {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<StoreUrl> {
        let secret = Secret::from_node(node, reader)?;
        reader.show_url(node.span, secret.reveal());
        Some(StoreUrl(secret))
    }
}

/// The value of `store`: a URL or `memory`, or a table with URLs, credentials and TLS.
#[derive(Clone, PartialEq, Debug)]
pub enum StoreEntry {
    /// `"redis://127.0.0.1:6379"`
    Url(StoreUrl),
    /// `{ urls = ["rediss://10.0.0.1:6379"], password_file = "/run/secrets/redis" }`
    Table(Box<StoreTable>),
}

impl FieldValue for StoreEntry {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<StoreEntry> {
        match node.value {
            Value::Text(_) => StoreUrl::from_node(node, reader).map(StoreEntry::Url),
            Value::Table(_) => StoreTable::from_node(node, reader).map(Box::new).map(StoreEntry::Table),
            _ => reader.wrong_type(node, "a URL, `memory`, or a table with `urls`"),
        }
    }
}

/// A limit, as a string or as a table.
#[derive(Clone, PartialEq, Debug)]
pub enum LimitEntry {
    /// `"10/min"`
    Text(String),
    /// `{ name = "burst", limit = "10/s" }` or `{ quota = 10, window = "1min" }`
    Table(Box<LimitTable>),
}

impl FieldValue for LimitEntry {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<LimitEntry> {
        reader.show(node);
        match &node.value {
            Value::Text(text) => Some(LimitEntry::Text(text.clone())),
            Value::Table(_) => LimitTable::from_node(node, reader).map(Box::new).map(LimitEntry::Table),
            _ => reader.wrong_type(node, "a limit: a string such as \"10/min\", or a table with quota and window"),
        }
    }

    /// Adds the limits that were added, removed or changed to `changes`. Limits are compared by their names, and without a
    /// name by their windows.
    fn note_item_changes(
        before: &[Spanned<LimitEntry>],
        after: &[Spanned<LimitEntry>],
        _name: &str,
        owner: &str,
        changes: &mut Changes,
    ) {
        changes.limits(before, after, owner);
    }

    fn name_values(&mut self, name: &str, names: &mut ValueNames) {
        if let LimitEntry::Table(table) = self {
            table.name_values(name, names);
        }
    }

    fn item_name(&self, list: &str, _index: usize) -> String {
        let owner = list.strip_suffix("limits").unwrap_or(list);
        let text = match self {
            LimitEntry::Text(text) => text,
            LimitEntry::Table(table) => table.limit.as_deref().map_or("", |limit| limit),
        };
        // Added by `Rule::limits_from_plan`.
        if text == "plan" { format!("{owner}limits_from_plan") } else { format!("{owner}limit `{text}`") }
    }
}

/// The limits of a rule: its own, or those of the caller's plan.
#[derive(Clone, PartialEq, Debug)]
pub enum Limits {
    /// `"plan"`, or a list of nothing else: the limits of the caller's plan.
    Plan,
    /// The rule's own limits: one, or a list of them. A `"plan"` among others is kept; compiling it is an error.
    Own(OneOrMany<Spanned<LimitEntry>>),
}

impl Default for Limits {
    fn default() -> Self {
        Limits::Own(OneOrMany::default())
    }
}

impl FieldValue for Limits {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<Limits> {
        let list: OneOrMany<Spanned<LimitEntry>> = OneOrMany::from_node(node, reader)?;
        Some(match list.0.as_slice() {
            [only] if matches!(&**only, LimitEntry::Text(text) if text == "plan") => Limits::Plan,
            _ => Limits::Own(list),
        })
    }

    fn stand_in() -> Option<Limits> {
        Some(Limits::default())
    }

    fn note_changes(&self, after: &Limits, name: &str, owner: &str, changes: &mut Changes) {
        if let (Limits::Own(before), Limits::Own(after)) = (self, after) {
            before.note_changes(after, name, owner, changes);
        }
    }

    fn name_values(&mut self, name: &str, names: &mut ValueNames) {
        if let Limits::Own(list) = self {
            list.name_values(name, names);
        }
    }
}

/// The condition on a request header in a rule's `match`.
///
/// The value may be a secret, so `Debug` output shows `***` instead, and no report quotes it.
#[derive(Clone, PartialEq, Eq)]
pub enum HeaderTest {
    /// `true`: the header is present, with any value.
    Present,
    /// The header has exactly this value.
    Equals(String),
}

impl fmt::Debug for HeaderTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HeaderTest::Present => "Present",
            HeaderTest::Equals(_) => "Equals(***)",
        })
    }
}

impl FieldValue for HeaderTest {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<HeaderTest> {
        const EXPECTED: &str = "true (the header is present) or the string that it must equal";
        match &node.value {
            Value::Bool(true) => {
                reader.show(node);
                Some(HeaderTest::Present)
            }
            Value::Bool(false) => reader.invalid(node, format!("expected {EXPECTED}, found false")),
            Value::Text(text) => Some(HeaderTest::Equals(text.clone())),
            _ => reader.wrong_type(node, EXPECTED),
        }
    }
}

/// The value of `body`: the name of a format, or a table with a template.
#[derive(Clone, PartialEq, Debug)]
pub enum BodyEntry {
    /// A format with a name.
    Named(BodyName),
    /// A template, which is not checked yet.
    Template(TemplateTable),
    /// A format that was set in code.
    InCode(BodyInCode),
}

/// A format of crate `tidegate`, perhaps with a function. Two of them are equal if they are clones of one.
#[derive(Clone)]
pub struct BodyInCode {
    format: Arc<dyn Any + Send + Sync>,
    text: String,
}

impl BodyInCode {
    /// Keeps a format. `Debug` output is that of `format`.
    pub fn new<F: Any + fmt::Debug + Send + Sync>(format: F) -> BodyInCode {
        BodyInCode { text: format!("{format:?}"), format: Arc::new(format) }
    }

    /// Returns the format, or `None` if it does not have the type `F`.
    pub fn format<F: Any>(&self) -> Option<&F> {
        self.format.downcast_ref()
    }
}

impl PartialEq for BodyInCode {
    fn eq(&self, other: &BodyInCode) -> bool {
        Arc::ptr_eq(&self.format, &other.format)
    }
}

impl fmt::Debug for BodyInCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FieldValue for BodyEntry {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<BodyEntry> {
        match node.value {
            Value::Text(_) => BodyName::from_node(node, reader).map(BodyEntry::Named),
            Value::Table(_) => TemplateTable::from_node(node, reader).map(BodyEntry::Template),
            _ => reader.wrong_type(node, &format!("one of {}, or a table with a template", BodyName::names())),
        }
    }
}

/// The value of `anonymize`: `true`, `false`, or a table with the settings of pseudonyms.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum AnonymizeEntry {
    /// Addresses, keys and other values of callers are stored as they are.
    #[default]
    Off,
    /// Addresses, keys and other values of callers, but not paths, are stored as pseudonyms.
    On(Box<Anonymize>),
}

impl FieldValue for AnonymizeEntry {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<AnonymizeEntry> {
        reader.show(node);
        match node.value {
            Value::Bool(true) => Some(AnonymizeEntry::On(Box::default())),
            Value::Bool(false) => Some(AnonymizeEntry::Off),
            Value::Table(_) => Anonymize::from_node(node, reader).map(Box::new).map(AnonymizeEntry::On),
            _ => reader.wrong_type(node, "true, false, or a table with a secret"),
        }
    }

    fn absent() -> Option<AnonymizeEntry> {
        Some(AnonymizeEntry::Off)
    }

    fn name_values(&mut self, name: &str, names: &mut ValueNames) {
        if let AnonymizeEntry::On(table) = self {
            table.name_values(name, names);
        }
    }
}
