//! The JSON schema of a configuration file, for editors that complete and check it.
//!
//! Most of it is derived from the tables. Here are the forms of `forms.rs` and the types with names.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use super::forms::{
    AnonymizeEntry, BodyEntry, HeaderTest, LimitEntry, Limits, OneOrMany, OptionalList, Secret, StoreEntry, StoreUrl,
    TimeText,
};
use super::read::Named;
use super::span::Spanned;
use super::types::{Anonymize, ConfigTable, LimitTable, StoreTable, TemplateTable};
use super::values::BodyName;

impl ConfigTable {
    /// Returns the JSON schema of a configuration file, with which editors can complete and check it.
    pub fn schema() -> Schema {
        schemars::schema_for!(ConfigTable)
    }
}

/// The schema of the value: spans are not part of a file.
impl<T: JsonSchema> JsonSchema for Spanned<T> {
    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn schema_id() -> Cow<'static, str> {
        T::schema_id()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}

impl<T: JsonSchema> JsonSchema for OneOrMany<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("OneOrMany_{}", T::schema_name()).into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let item = generator.subschema_for::<T>();
        json_schema!({ "anyOf": [item, { "type": "array", "items": item }] })
    }
}

impl<T: JsonSchema> JsonSchema for OptionalList<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("OptionalList_{}", T::schema_name()).into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Vec::<T>::json_schema(generator)
    }
}

impl JsonSchema for Secret {
    fn schema_name() -> Cow<'static, str> {
        "Secret".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "writeOnly": true })
    }
}

impl JsonSchema for TimeText {
    fn schema_name() -> Cow<'static, str> {
        "Time".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        String::json_schema(generator)
    }
}

impl JsonSchema for StoreUrl {
    fn schema_name() -> Cow<'static, str> {
        "StoreUrl".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Secret::json_schema(generator)
    }
}

impl JsonSchema for StoreEntry {
    fn schema_name() -> Cow<'static, str> {
        "StoreEntry".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let url = generator.subschema_for::<StoreUrl>();
        let table = generator.subschema_for::<StoreTable>();
        json_schema!({ "anyOf": [url, table] })
    }
}

impl JsonSchema for LimitEntry {
    fn schema_name() -> Cow<'static, str> {
        "Limit".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let table = generator.subschema_for::<LimitTable>();
        json_schema!({
            "description": "At most QUOTA per WINDOW, by an algorithm.",
            "anyOf": [{ "type": "string", "examples": ["10/min", "100/min token-bucket burst=20"] }, table],
        })
    }
}

impl JsonSchema for Limits {
    fn schema_name() -> Cow<'static, str> {
        "Limits".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let limits = generator.subschema_for::<OneOrMany<LimitEntry>>();
        json_schema!({ "anyOf": [{ "const": "plan" }, limits] })
    }
}

impl JsonSchema for HeaderTest {
    fn schema_name() -> Cow<'static, str> {
        "HeaderTest".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "const": true }, { "type": "string" }] })
    }
}

impl JsonSchema for BodyEntry {
    fn schema_name() -> Cow<'static, str> {
        "BodyEntry".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let name = generator.subschema_for::<BodyName>();
        let table = generator.subschema_for::<TemplateTable>();
        json_schema!({ "anyOf": [name, table] })
    }
}

impl JsonSchema for AnonymizeEntry {
    fn schema_name() -> Cow<'static, str> {
        "AnonymizeEntry".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let table = generator.subschema_for::<Anonymize>();
        json_schema!({ "anyOf": [{ "type": "boolean" }, table] })
    }
}

/// Returns the schema of an enum that is written as one of a few names.
pub(crate) fn named<T: Named>(_: &mut SchemaGenerator) -> Schema {
    let names: Vec<&str> = T::NAMES.iter().map(|(name, _)| *name).collect();
    json_schema!({ "type": "string", "enum": names })
}
