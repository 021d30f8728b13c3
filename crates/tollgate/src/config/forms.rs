//! The small forms in which values are written: one or many, text or table, true or table, secrets.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::span::Spanned;
use super::types::{Anonymize, LimitTable};

/// The newtype name by which a [`OneOrMany`] asks to be given a list even if there is a single value.
pub(crate) const LIST: &str = "$tollgate::List";

/// A list, which may be written as a single value.
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

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct(LIST, ListVisitor(PhantomData))
    }
}

/// A list that may be absent, which differs from an empty one: `rules = []` says that there are none. It reads as a slice.
#[derive(Clone, PartialEq, Debug)]
pub struct OptionalList<T>(pub Option<Vec<T>>);

impl<T> OptionalList<T> {
    /// Returns whether the file does not have the list, not even an empty one.
    pub const fn is_absent(&self) -> bool {
        self.0.is_none()
    }

    /// Appends an entry.
    pub fn push(&mut self, entry: T) {
        self.0.get_or_insert_default().push(entry);
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

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OptionalList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(|list| OptionalList(Some(list)))
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
    type Value = OneOrMany<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        Vec::deserialize(deserializer).map(OneOrMany)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::with_capacity(items.size_hint().unwrap_or(0).min(1024));
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(OneOrMany(list))
    }
}

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    /// A secret text.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The text itself. Not for messages.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Secret)
    }
}

/// A limit, as a text or as a table.
#[derive(Clone, PartialEq, Debug)]
pub enum LimitEntry {
    /// `"10/min"`
    Text(String),
    /// `{ name = "burst", limit = "10/s" }` or `{ quota = 10, window = "1min" }`
    Table(Box<LimitTable>),
}

impl<'de> Deserialize<'de> for LimitEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LimitVisitor)
    }
}

struct LimitVisitor;

impl<'de> Visitor<'de> for LimitVisitor {
    type Value = LimitEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a limit: a text such as \"10/min\", or a table with quota and window")
    }

    fn visit_str<E>(self, text: &str) -> Result<LimitEntry, E> {
        Ok(LimitEntry::Text(text.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LimitEntry, A::Error> {
        let table = LimitTable::deserialize(MapAccessDeserializer::new(map))?;
        Ok(LimitEntry::Table(Box::new(table)))
    }
}

/// Where a rule's limits come from.
#[derive(Clone, PartialEq, Debug)]
pub enum Limits {
    /// `"plan"`: from the caller's plan.
    Plan,
    /// One limit, or a list of them.
    Own(OneOrMany<Spanned<LimitEntry>>),
}

impl Default for Limits {
    fn default() -> Self {
        Limits::Own(OneOrMany::default())
    }
}

impl<'de> Deserialize<'de> for Limits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let list: OneOrMany<Spanned<LimitEntry>> = OneOrMany::deserialize(deserializer)?;
        Ok(match list.0.as_slice() {
            [only] if matches!(&**only, LimitEntry::Text(text) if text == "plan") => Limits::Plan,
            _ => Limits::Own(list),
        })
    }
}

/// What a header must be for a rule to match. What it must equal may be a secret, and is never printed.
#[derive(Clone, PartialEq, Eq)]
pub enum HeaderTest {
    /// `true`: it is there, whatever it says.
    Present,
    /// It says exactly this.
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

impl<'de> Deserialize<'de> for HeaderTest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(HeaderTestVisitor)
    }
}

struct HeaderTestVisitor;

impl Visitor<'_> for HeaderTestVisitor {
    type Value = HeaderTest;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("true (the header is there) or the text that it must equal")
    }

    fn visit_bool<E: Error>(self, present: bool) -> Result<HeaderTest, E> {
        match present {
            true => Ok(HeaderTest::Present),
            false => Err(E::invalid_value(serde::de::Unexpected::Bool(false), &self)),
        }
    }

    fn visit_str<E>(self, text: &str) -> Result<HeaderTest, E> {
        Ok(HeaderTest::Equals(text.to_owned()))
    }
}

/// `anonymize = true`, `false`, or a table that says more.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum AnonymizeEntry {
    /// Addresses and keys are stored as they are.
    #[default]
    Off,
    /// They are not.
    On(Box<Anonymize>),
}

impl<'de> Deserialize<'de> for AnonymizeEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnonymizeVisitor)
    }
}

struct AnonymizeVisitor;

impl<'de> Visitor<'de> for AnonymizeVisitor {
    type Value = AnonymizeEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("true, false, or a table with a secret")
    }

    fn visit_bool<E>(self, on: bool) -> Result<AnonymizeEntry, E> {
        Ok(if on { AnonymizeEntry::On(Box::default()) } else { AnonymizeEntry::Off })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<AnonymizeEntry, A::Error> {
        Anonymize::deserialize(MapAccessDeserializer::new(map)).map(|table| AnonymizeEntry::On(Box::new(table)))
    }
}
