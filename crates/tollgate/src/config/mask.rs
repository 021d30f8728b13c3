//! Which parts of a file are secret.
//!
//! A report shows the line that is wrong and its neighbours, and reports end up in logs. So the text
//! that a report may show is masked first: passwords in store URLs, API keys, JWT keys and salts, header values
//! that a rule compares with. In a file that could be parsed they are found by their place in the tree; in one
//! that could not, by how their line looks, rather too often than too seldom.

use super::span::Span;
use super::tree::{Entry, Node, Value};

/// Fields whose value is secret wherever they stand.
const SECRET_FIELDS: [&str; 5] = ["key", "secret", "password", "token", "sha256"];
/// Tables of which every value is secret: what headers are compared with.
const SECRET_TABLES: [&str; 1] = ["headers"];
/// What else a line of a broken file may hold a secret after.
const SUSPECT_FIELDS: [&str; 2] = ["value", "header"];

/// The text with the secrets of its tree masked.
pub(crate) fn by_tree(text: &str, root: &Node) -> String {
    let mut spans = Vec::new();
    collect(root, &mut spans);
    let mut bytes = text.as_bytes().to_vec();
    for span in spans {
        let end = span.end.min(bytes.len());
        cover(&mut bytes[span.start.min(end)..end]);
    }
    let text = String::from_utf8(bytes).expect("whole characters were replaced by as many ASCII bytes");
    mask_urls(&text)
}

/// The text with whatever looks like a secret masked.
pub(crate) fn by_looks(text: &str) -> String {
    let lines = text.split_inclusive('\n').map(|line| {
        let mut bytes = line.as_bytes().to_vec();
        let words = line.to_ascii_lowercase();
        let secret_at = SECRET_FIELDS.iter().chain(&SUSPECT_FIELDS).filter_map(|field| words.find(field)).min();
        match secret_at {
            Some(at) => {
                let value_at = line[at..].find(['=', ':']).map_or(at, |separator| at + separator + 1);
                cover(&mut bytes[value_at..]);
            }
            // The inner lines of a key that spans several.
            None if !line.contains(['=', ':', '[', '/', '#', ' ']) => cover(&mut bytes),
            None => {}
        }
        String::from_utf8(bytes).expect("whole characters were replaced by as many ASCII bytes")
    });
    mask_urls(&lines.collect::<String>())
}

fn collect(node: &Node, spans: &mut Vec<Span>) {
    match &node.value {
        Value::List(items) => items.iter().for_each(|item| collect(item, spans)),
        Value::Table(entries) => {
            let is_key_ban = entries.iter().any(|entry| entry.key == "by" && is_text(&entry.node, "api_key"));
            for entry in entries {
                match &entry.node.value {
                    Value::List(_) if entry.key == "keys" => collect_keys(&entry.node, spans),
                    Value::Table(_) if SECRET_TABLES.contains(&entry.key.as_str()) => collect_all(&entry.node, spans),
                    _ if is_secret(entry, is_key_ban) => collect_all(&entry.node, spans),
                    _ => collect(&entry.node, spans),
                }
            }
        }
        _ => {}
    }
}

/// Everything under a node, whatever it should have been.
fn collect_all(node: &Node, spans: &mut Vec<Span>) {
    match &node.value {
        Value::List(items) => items.iter().for_each(|item| collect_all(item, spans)),
        Value::Table(entries) => entries.iter().for_each(|entry| collect_all(&entry.node, spans)),
        _ => spans.push(node.span),
    }
}

/// `keys` is a list of tables, or in `exempt` a list of the keys themselves.
fn collect_keys(list: &Node, spans: &mut Vec<Span>) {
    let Value::List(items) = &list.value else { return };
    for item in items {
        match item.value {
            Value::Table(_) => collect(item, spans),
            _ => collect_all(item, spans),
        }
    }
}

/// A misspelt `secret` is one too.
fn is_secret(entry: &Entry, is_key_ban: bool) -> bool {
    let looks_secret = SECRET_FIELDS.iter().any(|field| {
        entry.key == *field || (field.len() > 3 && strsim::osa_distance(&entry.key.to_ascii_lowercase(), field) <= 2)
    });
    looks_secret || (is_key_ban && entry.key == "value")
}

fn is_text(node: &Node, expected: &str) -> bool {
    matches!(&node.value, Value::Text(text) if text == expected)
}

/// Letters and digits become stars; quotes, dashes and line ends stay, so the shape is still to be seen.
fn cover(bytes: &mut [u8]) {
    for byte in bytes {
        if !matches!(byte, b'"' | b'\'' | b'\n' | b'\r' | b' ' | b',' | b'{' | b'}' | b'[' | b']') {
            *byte = b'*';
        }
    }
}

/// In `scheme://user:password@host` all that stands before the last @.
fn mask_urls(text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    let mut from = 0;
    while let Some(at) = text[from..].find("://") {
        let start = from + at + 3;
        let end = text[start..].find(['"', '\'', '\n', ' ']).map_or(text.len(), |length| start + length);
        if let Some(host) = text[start..end].rfind('@') {
            cover(&mut bytes[start..start + host]);
        }
        from = start;
    }
    String::from_utf8(bytes).expect("whole characters were replaced by as many ASCII bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{toml, yaml};

    const TOML: &str = r#"
store = "redis://user:hunter2/@@db.example/0"
[exempt]
keys = ["planted-a", 'sha256:planted']
[anonymize]
secret = "plänted-b"
[jwt]
key = """
-----BEGIN PUBLIC KEY-----
plantedc
-----END PUBLIC KEY-----"""
[[keys]]
key = "planted-d"
plan = "free"
[[bans]]
by = "api_key"
value = "planted-e"
[[rules]]
match = { path = "/x", headers = { x-internal = "planted-f" } }
"#;

    #[test]
    fn no_secret_of_a_parsed_file_is_shown_and_no_byte_moves() {
        let masked = by_tree(TOML, &toml::parse(TOML).unwrap());
        assert!(!masked.contains("lanted") && !masked.contains("hunter2"), "{masked}");
        assert_eq!(masked.len(), TOML.len());
        assert!(
            masked.contains("redis://**************@db.example/0") && masked.contains(r#"plan = "free""#),
            "{masked}"
        );
        let yaml =
            "jwt:\n  key: |\n    -----BEGIN\n    planted\nkeys:\n  - { key: planted, plan: free }\nsecrte: planted\n";
        let masked = by_tree(yaml, &yaml::parse(yaml).unwrap());
        assert!(!masked.contains("planted") && masked.contains("plan: free"), "{masked}");
    }

    #[test]
    fn a_broken_file_shows_no_line_that_looks_like_a_secret() {
        let broken = format!("{TOML}\nlimits = [10/min]\nsecret: planted-g\n");
        let masked = by_looks(&broken);
        assert!(!masked.contains("lanted") && !masked.contains("hunter2"), "{masked}");
        assert!(masked.contains("limits = [10/min]") && masked.contains("plan = \"free\""), "{masked}");
        assert_eq!(masked.len(), broken.len());
    }
}
