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

/// Implements [`JsonSchema`] for types with these names and schemas. One that is `inline` is written where it is used.
macro_rules! schemas {
    (@is_inline) => { false };
    (@is_inline inline) => { true };
    ($($type:ident $name:literal $($inline:ident)?: |$generator:pat_param| $schema:expr;)*) => {$(
        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                $name.into()
            }

            fn inline_schema() -> bool {
                schemas!(@is_inline $($inline)?)
            }

            fn json_schema($generator: &mut SchemaGenerator) -> Schema {
                $schema
            }
        }
    )*};
}

schemas! {
    Secret "Secret" inline: |_| json_schema!({ "type": "string", "writeOnly": true });
    TimeText "Time" inline: |generator| String::json_schema(generator);
    StoreUrl "StoreUrl" inline: |generator| Secret::json_schema(generator);
    StoreEntry "StoreEntry": |generator| {
        any_of([generator.subschema_for::<StoreUrl>(), generator.subschema_for::<StoreTable>()])
    };
    LimitEntry "Limit": |generator| json_schema!({
        "description": "At most QUOTA per WINDOW, by an algorithm.",
        "anyOf": [
            { "type": "string", "examples": ["10/min", "100/min token-bucket burst=20"] },
            generator.subschema_for::<LimitTable>(),
        ],
    });
    Limits "Limits": |generator| {
        any_of([json_schema!({ "const": "plan" }), generator.subschema_for::<OneOrMany<LimitEntry>>()])
    };
    HeaderTest "HeaderTest": |_| any_of([json_schema!({ "const": true }), json_schema!({ "type": "string" })]);
    BodyEntry "BodyEntry": |generator| {
        any_of([generator.subschema_for::<BodyName>(), generator.subschema_for::<TemplateTable>()])
    };
    AnonymizeEntry "AnonymizeEntry": |generator| {
        any_of([json_schema!({ "type": "boolean" }), generator.subschema_for::<Anonymize>()])
    };
}

fn any_of(schemas: [Schema; 2]) -> Schema {
    json_schema!({ "anyOf": schemas })
}

/// Returns the schema of an enum that is written as one of a few names.
pub(crate) fn named<T: Named>(_: &mut SchemaGenerator) -> Schema {
    let names: Vec<&str> = T::NAMES.iter().map(|(name, _)| *name).collect();
    json_schema!({ "type": "string", "enum": names })
}
