//! Validates JSON by the schemas of a document, and remembers which fields of the schemas occurred.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::patterns::regex;

/// How a field occurred in objects that match its schema.
#[derive(Default, Debug)]
struct Occurrence {
    is_present: bool,
    is_absent: bool,
}

/// The fields of schemas whose objects were validated, by the address of the schema in the document and the name.
#[derive(Default, Debug)]
pub(super) struct Fields(BTreeMap<(usize, String), Occurrence>);

impl Fields {
    /// Adds the fields of an object that matches this schema.
    fn add(&mut self, schema: &Value, value: &Value) {
        let (Some(properties), Some(object)) = (schema["properties"].as_object(), value.as_object()) else { return };
        for name in properties.keys() {
            let occurrence = self.0.entry((address(schema), name.clone())).or_default();
            match object.get(name) {
                Some(Value::Null) => {}
                Some(_) => occurrence.is_present = true,
                None => occurrence.is_absent = true,
            }
        }
    }

    /// Adds the fields of other values.
    pub(super) fn extend(&mut self, other: Fields) {
        for (field, Occurrence { is_present, is_absent }) in other.0 {
            let occurrence = self.0.entry(field).or_default();
            occurrence.is_present |= is_present;
            occurrence.is_absent |= is_absent;
        }
    }

    /// Asserts that each field of each schema that a value has matched occurred with a value other than null, and that a
    /// field that is not required was once absent. So the document describes no field that does not exist.
    pub(super) fn assert_complete(&self, document: &Value) {
        let mut wrong = Vec::new();
        self.add_wrong(document, "", &mut wrong);
        assert!(wrong.is_empty(), "fields that did not occur as documented:\n{}", wrong.join("\n"));
    }

    fn add_wrong(&self, schema: &Value, place: &str, wrong: &mut Vec<String>) {
        let members = schema.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value));
        let items = schema.as_array().into_iter().flatten().enumerate().map(|(index, item)| (index.to_string(), item));
        for (name, value) in members.chain(items) {
            self.add_wrong(value, &format!("{place}/{name}"), wrong);
        }
        for name in schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name) {
            let Some(occurrence) = self.0.get(&(address(schema), name.clone())) else { return };
            let is_required = schema["required"].as_array().is_some_and(|required| required.contains(&json!(name)));
            if !occurrence.is_present {
                wrong.push(format!("{place}: {name} has no value"));
            }
            if !is_required && !occurrence.is_absent {
                wrong.push(format!("{place}: {name} is never absent"));
            }
        }
    }
}

/// Returns the address of a schema within its document, which identifies it.
fn address(schema: &Value) -> usize {
    std::ptr::from_ref(schema).addr()
}

/// Validates a value against a schema of the document.
///
/// Returns the fields of the schemas that the value has matched, or the first mismatch.
///
/// # Panics
/// On a keyword that it does not know, so that no part of a schema is ignored.
pub(super) fn validate(document: &Value, schema: &Value, value: &Value) -> Result<Fields, String> {
    let mut fields = Fields::default();
    let mut valid = |schema: &Value, value: &Value| validate(document, schema, value).map(|found| fields.extend(found));
    let wrong = |what: &str| Err(format!("{what}: {value} against {schema}"));
    for (keyword, expected) in schema.as_object().expect("a schema is an object") {
        let number = || expected.as_u64().expect("a bound is a number");
        let list = || expected.as_array().expect("a list");
        let is_met = match keyword.as_str() {
            "$ref" => {
                let pointer = expected.as_str().and_then(|text| text.strip_prefix('#')).expect("a local reference");
                valid(document.pointer(pointer).unwrap_or_else(|| panic!("{pointer} does not exist")), value)?;
                true
            }
            "type" => match expected {
                Value::Array(types) => types.iter().any(|kind| has_type(value, kind)),
                kind => has_type(value, kind),
            },
            "const" => value == expected,
            "enum" => list().contains(value),
            "properties" => {
                for (name, schema) in expected.as_object().unwrap() {
                    value.get(name).map_or(Ok(()), |value| valid(schema, value))?;
                }
                true
            }
            "required" => list().iter().all(|name| value.get(name.as_str().unwrap()).is_some()),
            "additionalProperties" => {
                let known = |name: &str| schema["properties"].get(name).is_some();
                let mut others = value.as_object().into_iter().flatten().filter(|(name, _)| !known(name));
                match expected {
                    Value::Bool(false) => others.next().is_none(),
                    schema => others.try_for_each(|(_, value)| valid(schema, value)).map(|()| true)?,
                }
            }
            "propertyNames" => {
                let mut names = value.as_object().into_iter().flatten().map(|(name, _)| json!(name));
                names.try_for_each(|name| valid(expected, &name)).map(|()| true)?
            }
            "maxProperties" => value.as_object().is_none_or(|map| map.len() as u64 <= number()),
            "items" => {
                let mut items = value.as_array().into_iter().flatten();
                items.try_for_each(|item| valid(expected, item)).map(|()| true)?
            }
            "prefixItems" => {
                let mut items = value.as_array().into_iter().flatten().zip(list());
                items.try_for_each(|(item, schema)| valid(schema, item)).map(|()| true)?
            }
            "minItems" => value.as_array().is_none_or(|items| items.len() as u64 >= number()),
            "maxItems" => value.as_array().is_none_or(|items| items.len() as u64 <= number()),
            "minimum" => value.as_f64().is_none_or(|value| value >= number() as f64),
            "maximum" => value.as_f64().is_none_or(|value| value <= number() as f64),
            "minLength" => value.as_str().is_none_or(|text| text.chars().count() as u64 >= number()),
            "maxLength" => value.as_str().is_none_or(|text| text.chars().count() as u64 <= number()),
            "pattern" => value.as_str().is_none_or(|text| regex(expected.as_str().unwrap()).is_match(text)),
            "format" => match (expected.as_str().unwrap(), value.as_str()) {
                ("ipv4", Some(text)) => text.parse::<std::net::Ipv4Addr>().is_ok(),
                ("ipv6", Some(text)) => text.parse::<std::net::Ipv6Addr>().is_ok(),
                ("uint16", None) => value.as_u64().is_some_and(|value| u16::try_from(value).is_ok()),
                ("uint", None) => value.is_null() || value.is_u64(),
                ("uint32", None) => value.is_null() || value.as_u64().is_some_and(|value| u32::try_from(value).is_ok()),
                ("uint64", None) => value.is_null() || value.is_u64(),
                (format, _) => panic!("unknown format {format} of {value}"),
            },
            "oneOf" => list().iter().filter(|schema| valid(schema, value).is_ok()).count() == 1,
            "anyOf" => list().iter().any(|schema| valid(schema, value).is_ok()),
            "not" => valid(expected, value).is_err(),
            "description" | "examples" | "default" | "title" => true,
            other => panic!("unknown keyword {other}"),
        };
        if !is_met {
            return wrong(keyword);
        }
    }
    fields.add(schema, value);
    Ok(fields)
}

fn has_type(value: &Value, kind: &Value) -> bool {
    match kind.as_str().expect("the name of a type") {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "integer" => value.as_f64().is_some_and(|value| value.fract() == 0.0),
        other => panic!("unknown type {other}"),
    }
}
