//! From a tree of values to typed configuration, by serde, with the place of whatever is wrong.
//!
//! The first error ends the reading; it takes the place of the innermost value that was being read. A field that is
//! not known is shown with the nearest one that is. Messages name kinds ("a text"), never values:
//! a value may be a secret.

use std::fmt;

use serde::de::value::U64Deserializer;
use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, EnumAccess, Expected, IntoDeserializer, MapAccess, SeqAccess,
    Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::finding::Code;
use super::forms::LIST;
use super::mask::may_tell_field;
use super::span::{SPANNED, Span};
use super::tree::{Entry, Node, Value};
use crate::identity::suggest::nearest;

/// Reads a `T` from a tree.
pub(crate) fn read<'de, T: Deserialize<'de>>(root: &'de Node) -> Result<T, ReadError> {
    T::deserialize(Reader(root))
}

/// What could not be read, and where.
#[derive(Clone, Debug)]
pub(crate) struct ReadError {
    pub(crate) code: Code,
    pub(crate) message: String,
    pub(crate) help: Option<String>,
    pub(crate) span: Option<Span>,
}

impl ReadError {
    fn new(code: Code, message: String) -> ReadError {
        ReadError { code, message, help: None, span: None }
    }

    /// The innermost place is told first and stays.
    fn at(mut self, span: Span) -> ReadError {
        self.span.get_or_insert(span);
        self
    }

    fn suggest(mut self, found: &str, known: &[&str]) -> ReadError {
        self.help = Some(match nearest(found, known.iter().copied()) {
            Some(name) => format!("did you mean `{name}`?"),
            None => format!("accepted here: {}", known.join(", ")),
        });
        self
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ReadError {}

impl de::Error for ReadError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        ReadError::new(Code::InvalidValue, message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let expected = expected.to_string().replace("a string", "a text");
        let mut error = ReadError::new(Code::WrongType, format!("expected {expected}, found {}", kind(&found)));
        if expected.contains("text")
            && matches!(found, Unexpected::Signed(_) | Unexpected::Float(_) | Unexpected::Bool(_))
        {
            error.help = Some("put it in quotes".to_owned());
        }
        error
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let found = match found {
            // Only where a number is expected is a number out of range, and no number is a secret there.
            Unexpected::Unsigned(number) => number.to_string(),
            Unexpected::Signed(number) => number.to_string(),
            other => kind(&other).to_owned(),
        };
        ReadError::new(Code::InvalidValue, format!("expected {expected}, found {found}"))
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        let message = match may_tell_field(field, known) {
            true => format!("unknown field `{field}`"),
            false => "unknown field, which may be a secret".to_owned(),
        };
        ReadError::new(Code::UnknownField, message).suggest(field, known)
    }

    fn unknown_variant(variant: &str, known: &'static [&'static str]) -> Self {
        let message = format!("expected one of {}", known.join(", "));
        let mut error = ReadError::new(Code::InvalidValue, message);
        error.help = nearest(variant, known.iter().copied()).map(|name| format!("did you mean `{name}`?"));
        error
    }

    fn missing_field(field: &'static str) -> Self {
        let mut error = ReadError::new(Code::MissingField, format!("missing field `{field}`"));
        error.help = Some(format!("add `{field}` to this table"));
        error
    }
}

fn kind(found: &Unexpected<'_>) -> &'static str {
    match found {
        Unexpected::Bool(_) => "true or false",
        Unexpected::Unsigned(_) | Unexpected::Signed(_) | Unexpected::Float(_) => "a number",
        Unexpected::Str(_) => "a text",
        Unexpected::Seq => "a list",
        Unexpected::Map => "a table",
        Unexpected::Unit | Unexpected::Option => "nothing",
        _ => "something else",
    }
}

#[derive(Clone, Copy)]
struct Reader<'de>(&'de Node);

impl<'de> Reader<'de> {
    fn visit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.0.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Int(value) => visitor.visit_i64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(value) => visitor.visit_borrowed_str(value),
            Value::List(items) => visitor.visit_seq(Items(items.iter())),
            Value::Table(entries) => visitor.visit_map(Entries { entries: entries.iter(), current: None }),
        }
    }
}

impl<'de> Reader<'de> {
    fn visit_as_list<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.0.value {
            Value::List(items) => visitor.visit_seq(Items(items.iter())),
            _ => visitor.visit_seq(Items(std::slice::from_ref(self.0).iter())),
        }
    }
}

impl<'de> Deserializer<'de> for Reader<'de> {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.visit(visitor).map_err(|error| error.at(self.0.span))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self.0.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        match name {
            SPANNED => visitor.visit_seq(PlaceAndValue { node: self.0, next: 0 }),
            LIST => self.visit_as_list(visitor),
            _ => visitor.visit_newtype_struct(self),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        let result = match &self.0.value {
            Value::Text(name) => visitor.visit_enum(Word(name)),
            other => {
                let message = format!("expected one of {}, found {}", variants.join(", "), other.kind());
                Err(ReadError::new(Code::WrongType, message))
            }
        };
        result.map_err(|error| error.at(self.0.span))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
        unit unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

struct Items<'de>(std::slice::Iter<'de, Node>);

impl<'de> SeqAccess<'de> for Items<'de> {
    type Error = ReadError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, ReadError> {
        self.0.next().map(|node| seed.deserialize(Reader(node))).transpose()
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

struct Entries<'de> {
    entries: std::slice::Iter<'de, Entry>,
    current: Option<&'de Entry>,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        self.current = self.entries.next();
        let Some(entry) = self.current else { return Ok(None) };
        seed.deserialize(FieldName(entry)).map(Some).map_err(|error| error.at(entry.key_span))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ReadError> {
        let entry = self.current.take().expect("serde asks for a value after its key");
        seed.deserialize(Reader(&entry.node))
    }
}

/// A key is a text with a place too.
struct FieldName<'de>(&'de Entry);

impl<'de> Deserializer<'de> for FieldName<'de> {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_borrowed_str(&self.0.key)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        match name {
            SPANNED => visitor.visit_seq(PlaceAndName { entry: self.0, next: 0 }),
            _ => visitor.visit_newtype_struct(self),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

/// Start, end, value: what a [`Spanned`](super::span::Spanned) is told.
struct PlaceAndValue<'de> {
    node: &'de Node,
    next: u8,
}

impl<'de> SeqAccess<'de> for PlaceAndValue<'de> {
    type Error = ReadError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, ReadError> {
        self.next += 1;
        match self.next {
            1 | 2 => seed.deserialize(edge(self.node.span, self.next)).map(Some),
            _ => seed.deserialize(Reader(self.node)).map(Some),
        }
    }
}

/// The same for the key of a table.
struct PlaceAndName<'de> {
    entry: &'de Entry,
    next: u8,
}

impl<'de> SeqAccess<'de> for PlaceAndName<'de> {
    type Error = ReadError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, ReadError> {
        self.next += 1;
        match self.next {
            1 | 2 => seed.deserialize(edge(self.entry.key_span, self.next)).map(Some),
            _ => seed.deserialize(FieldName(self.entry)).map(Some),
        }
    }
}

fn edge(span: Span, which: u8) -> U64Deserializer<ReadError> {
    let at = if which == 1 { span.start } else { span.end };
    (at as u64).into_deserializer()
}

/// An enum written as one word.
struct Word<'de>(&'de str);

impl<'de> EnumAccess<'de> for Word<'de> {
    type Error = ReadError;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), ReadError> {
        let name = de::value::BorrowedStrDeserializer::new(self.0);
        seed.deserialize(name).map(|variant| (variant, self))
    }
}

impl<'de> VariantAccess<'de> for Word<'de> {
    type Error = ReadError;

    fn unit_variant(self) -> Result<(), ReadError> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, _seed: T) -> Result<T::Value, ReadError> {
        Err(self.no_content())
    }

    fn tuple_variant<V: Visitor<'de>>(self, _len: usize, _visitor: V) -> Result<V::Value, ReadError> {
        Err(self.no_content())
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, ReadError> {
        Err(self.no_content())
    }
}

impl Word<'_> {
    fn no_content(&self) -> ReadError {
        ReadError::new(Code::WrongType, "expected a word".to_owned())
    }
}
