//! The example of the documentation, and the JSON schema.

use crate::config::{Config, Finding, Format, Loader, Severity};

const EXAMPLE: &str = include_str!("../../../../../docs/configuration.toml");

fn assert_no_warnings(loader: &Loader, text: &str) {
    let loaded =
        loader.load_text("configuration.toml", text, Format::Toml).unwrap_or_else(|report| panic!("{report:?}"));
    let warnings: Vec<&Finding> =
        loaded.findings.iter().filter(|finding| finding.severity() > Severity::Advice).collect();
    assert!(warnings.is_empty(), "{warnings:?}");
}

#[test]
fn the_example_is_valid_as_it_stands_and_has_no_warnings() {
    assert_no_warnings(&Loader::new().environment(|_| None), EXAMPLE);
}

/// The environment variables that the sections need which are commented out in the example.
pub(crate) const EXAMPLE_VARIABLES: [&str; 3] = ["TIDEGATE_SALT", "TIDEGATE_JWT_KEY", "TIDEGATE_RECEIPT_SECRET"];

/// Returns the example with the sections that are commented out in it. They need the [`EXAMPLE_VARIABLES`].
pub(crate) fn complete_example() -> String {
    let is_setting = |line: &str| {
        let first = line.split(' ').next().unwrap_or_default();
        let is_field = !first.is_empty() && first.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        line.starts_with('[') || (is_field && line[first.len()..].starts_with(" = "))
    };
    let uncomment = |line: &str| match line.strip_prefix("# ") {
        // There are no such files.
        Some(setting)
            if is_setting(setting) && !setting.starts_with("keys_file") && !setting.starts_with("ca_file") =>
        {
            setting.to_owned()
        }
        _ => line.to_owned(),
    };
    let text = EXAMPLE.lines().map(uncomment).collect::<Vec<_>>().join("\n") + "\n";
    assert!(text.contains("\n[jwt]\nalgorithm = ") && text.contains("\n[anonymize]\nsecret_env = "), "{text}");
    text
}

#[test]
fn the_example_is_valid_with_the_sections_that_are_commented_out() {
    let variable = |name: &str| EXAMPLE_VARIABLES.contains(&name).then(|| "0123456789abcdef".repeat(2));
    assert_no_warnings(&Loader::new().environment(variable), &complete_example());
}

#[test]
fn the_example_has_every_field() {
    let schema = serde_json::to_value(Config::schema()).unwrap();
    let mut fields = Vec::new();
    collect_fields(&schema, &mut fields);
    assert!(fields.len() > 50, "{fields:?}");
    for field in fields {
        let is_there = EXAMPLE.lines().any(|line| {
            let line = line.trim_start_matches("# ").trim_start_matches("#   or: ");
            line.starts_with(&format!("{field} "))
                || line.starts_with(&format!("[{field}"))
                || line.starts_with(&format!("[[{field}"))
                || line.contains(&format!("{field} = "))
        });
        assert!(is_there, "`{field}` is not in docs/configuration.toml");
    }
}

fn collect_fields(schema: &serde_json::Value, fields: &mut Vec<String>) {
    if let Some(properties) = schema.get("properties").and_then(|properties| properties.as_object()) {
        fields.extend(properties.keys().cloned());
    }
    match schema {
        serde_json::Value::Object(map) => map.values().for_each(|value| collect_fields(value, fields)),
        serde_json::Value::Array(list) => list.iter().for_each(|value| collect_fields(value, fields)),
        _ => {}
    }
}

#[test]
fn the_schema_refuses_unknown_fields() {
    let schema = serde_json::to_value(Config::schema()).unwrap();
    assert_eq!(schema["additionalProperties"], false);
    assert_eq!(schema["title"], "Tidegate configuration");
    for table in ["RuleTable", "MatchTable", "LimitTable", "PlanTable", "ApiKeyTable", "Jwt", "UpstreamTable"] {
        assert_eq!(schema["$defs"][table]["additionalProperties"], false, "{table}");
    }
    let text = schema.to_string();
    assert!(!text.contains("Spanned") && !text.contains("tidegate::"), "{text}");
}
