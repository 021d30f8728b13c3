//! Which parts of a file are secret.
//!
//! A report shows the line that is wrong and its neighbours, and reports end up in logs. So the text
//! that a report may show is masked first: passwords in store URLs, API keys, JWT keys and salts, header values
//! that a rule compares with. In a file that could be parsed they are found by their place in the tree; in one
//! that could not, by how their line looks, rather too often than too seldom.

mod heuristic;

pub(crate) use self::heuristic::by_looks;

use std::ops::Range;

use super::span::Span;
use super::tree::{Entry, Node, Value};

/// Fields whose value is secret wherever they stand.
const SECRET_FIELDS: [&str; 6] = ["key", "keys", "secret", "password", "token", "sha256"];
/// Tables of which every value is secret: what headers are compared with.
const SECRET_TABLES: [&str; 1] = ["headers"];
/// What may be seen of an entry for an API key. Whatever else stands there may be a misspelt key.
const KEY_FIELDS_SHOWN: [&str; 4] = ["name", "plan", "limits", "exempt"];
/// A longer name of an environment variable is not shown.
const VARIABLE_BYTES_MAX: usize = 64;

/// The text with the secrets of its tree masked.
pub(crate) fn by_tree(text: &str, root: &Node) -> String {
    let mut secrets = Secrets { text, spans: Vec::new() };
    secrets.collect(root);
    secrets.collect_comments();
    let mut bytes = text.as_bytes().to_vec();
    for span in secrets.spans {
        let end = span.end.min(bytes.len());
        cover(&mut bytes[span.start.min(end)..end]);
    }
    String::from_utf8(bytes).expect("whole characters were replaced by as many ASCII bytes")
}

/// What is secret in a text.
struct Secrets<'t> {
    text: &'t str,
    spans: Vec<Span>,
}

impl Secrets<'_> {
    fn collect(&mut self, node: &Node) {
        match &node.value {
            Value::List(items) => items.iter().for_each(|item| self.collect(item)),
            Value::Table(entries) => {
                let is_shown =
                    |entry: &Entry| entry.key == "by" && (is_text(&entry.node, "ip") || is_text(&entry.node, "user"));
                let is_ban_shown = entries.iter().any(is_shown);
                entries.iter().for_each(|entry| self.collect_entry(entry, is_ban_shown));
            }
            // A user and a password, wherever they stand.
            Value::Text(value) if value.rsplit_once('@').is_some_and(|(before, _)| before.contains(':')) => {
                self.collect_userinfo(node);
            }
            _ => {}
        }
    }

    fn collect_entry(&mut self, entry: &Entry, is_ban_shown: bool) {
        let Entry { key, key_span, node } = entry;
        if key.contains('@') {
            self.spans.push(*key_span);
        }
        match &node.value {
            _ if is_nearly(key, "keys") => self.collect_keys(node),
            Value::Table(_) if SECRET_TABLES.contains(&key.as_str()) => self.collect_all(node),
            _ if is_secret(key) => self.collect_all(node),
            // Unless it says otherwise, a ban may be one of a key.
            _ if !is_ban_shown && is_nearly(key, "value") => self.collect_all(node),
            Value::Text(value) if is_nearly(key, "store") && value.contains('@') => self.collect_userinfo(node),
            // The secret itself, where the name of its variable should be.
            Value::Text(value) if key.ends_with("_env") && !is_variable(value) => self.spans.push(node.span),
            _ => self.collect(node),
        }
    }

    /// Everything under a node, whatever it should have been.
    fn collect_all(&mut self, node: &Node) {
        match &node.value {
            Value::List(items) => items.iter().for_each(|item| self.collect_all(item)),
            Value::Table(entries) => entries.iter().for_each(|entry| self.collect_all(&entry.node)),
            _ => self.spans.push(node.span),
        }
    }

    /// `keys` is a list of tables, or in `exempt` a list of the keys themselves. Who writes it as a table writes keys for fields.
    fn collect_keys(&mut self, node: &Node) {
        match &node.value {
            Value::List(items) => items.iter().for_each(|item| self.collect_keys(item)),
            Value::Table(entries) => {
                for entry in entries.iter().filter(|entry| !KEY_FIELDS_SHOWN.contains(&entry.key.as_str())) {
                    if !is_key_field(&entry.key) {
                        self.spans.push(entry.key_span);
                    }
                    self.collect_keys(&entry.node);
                }
            }
            _ => self.spans.push(node.span),
        }
    }

    /// What stands before the host in a text that names one.
    fn collect_userinfo(&mut self, node: &Node) {
        let Span { start, end, .. } = node.span;
        // Without an @ it is written with escapes, which nobody undoes here.
        let part = self.text.get(start..end).and_then(|written| userinfo(written, 0));
        self.spans.push(part.map_or(node.span, |part| Span::new(start + part.start, start + part.end)));
    }

    /// A URL that was commented out. What is no comment behind a # is covered once more.
    fn collect_comments(&mut self) {
        let mut line_start = 0;
        for line in self.text.split_inclusive('\n') {
            if let Some(at) = line.find('#')
                && let Some(part) = userinfo(line, heuristic::value_from(line, at))
                && line[at..part.end].contains(':')
            {
                self.spans.push(Span::new(line_start + part.start, line_start + part.end));
            }
            line_start += line.len();
        }
    }
}

/// In `scheme://user:password@host`, which begins at `from` if it does, all that stands before the last @. A password may hold
/// whatever ends a text elsewhere.
fn userinfo(text: &str, from: usize) -> Option<Range<usize>> {
    let end = text.rfind('@').filter(|end| *end > from)?;
    let value = text[from..end].trim_start_matches([' ', '\t', '"', '\'', '#', '-']);
    let is_scheme = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let hidden = match value.split_once("://") {
        Some((scheme, rest)) if is_scheme(scheme) => rest,
        _ => value,
    };
    Some(end - hidden.len()..end)
}

/// Whether a text is the name of an environment variable as they are usually written, and so no secret.
pub(crate) fn is_variable(name: &str) -> bool {
    let is_name_byte = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    name.len() <= VARIABLE_BYTES_MAX
        && !name.starts_with(|first: char| first.is_ascii_digit())
        && name.bytes().all(is_name_byte)
}

/// Whether a field's name may be told, among these that are known: it may be a URL, and in an entry for an API key it may be the key.
pub(crate) fn may_tell_field(name: &str, known: &[&str]) -> bool {
    !name.contains('@') && (!known.contains(&"sha256") || is_key_field(name))
}

/// Whether a word is a field of an entry for an API key, or nearly one; else it may be a key.
fn is_key_field(word: &str) -> bool {
    KEY_FIELDS_SHOWN.iter().chain(&["key", "sha256"]).any(|field| is_nearly(word, field)) || is_secret(word)
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

#[cfg(test)]
mod tests;
