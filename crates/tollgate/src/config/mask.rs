//! Which parts of a file are secret.
//!
//! A report shows the line that is wrong and its neighbours, and reports end up in logs. So the text
//! that a report may show is masked first: passwords in store URLs, API keys, JWT keys and salts, header values
//! that a rule compares with. In a file that could be parsed they are found by their place in the tree; in one
//! that could not, by how their line looks, rather too often than too seldom.

mod looks;

pub(crate) use self::looks::by_looks;

use super::span::Span;
use super::tree::{Entry, Node, Value};

/// Fields whose value is secret wherever they stand.
const SECRET_FIELDS: [&str; 6] = ["key", "keys", "secret", "password", "token", "sha256"];
/// Tables of which every value is secret: what headers are compared with.
const SECRET_TABLES: [&str; 1] = ["headers"];
/// What may be seen of an entry for an API key. Whatever else stands there may be a misspelt key.
const KEY_FIELDS_SHOWN: [&str; 4] = ["name", "plan", "limits", "exempt"];

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

fn collect(node: &Node, spans: &mut Vec<Span>) {
    match &node.value {
        Value::List(items) => items.iter().for_each(|item| collect(item, spans)),
        Value::Table(entries) => {
            let is_shown =
                |entry: &Entry| entry.key == "by" && (is_text(&entry.node, "ip") || is_text(&entry.node, "user"));
            let is_ban_shown = entries.iter().any(is_shown);
            for entry in entries {
                match &entry.node.value {
                    _ if entry.key == "keys" => collect_keys(&entry.node, spans),
                    Value::Table(_) if SECRET_TABLES.contains(&entry.key.as_str()) => collect_all(&entry.node, spans),
                    _ if is_secret(&entry.key) => collect_all(&entry.node, spans),
                    // Unless it says otherwise, a ban may be one of a key.
                    _ if !is_ban_shown && is_nearly(&entry.key, "value") => collect_all(&entry.node, spans),
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
fn collect_keys(node: &Node, spans: &mut Vec<Span>) {
    match &node.value {
        Value::List(items) => items.iter().for_each(|item| collect_keys(item, spans)),
        Value::Table(entries) => {
            let is_hidden = |entry: &&Entry| !KEY_FIELDS_SHOWN.contains(&entry.key.as_str());
            entries.iter().filter(is_hidden).for_each(|entry| collect_all(&entry.node, spans));
        }
        _ => collect_all(node, spans),
    }
}

/// A misspelt `secret` is one too, and so is whatever ends like `api_key`.
fn is_secret(field: &str) -> bool {
    SECRET_FIELDS.iter().any(|secret| is_nearly(field, secret)) || field.to_ascii_lowercase().ends_with("key")
}

fn is_nearly(field: &str, expected: &str) -> bool {
    let slips = if expected.len() > 3 { 2 } else { 1 };
    strsim::osa_distance(&field.to_ascii_lowercase(), expected) <= slips
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
mod tests;
