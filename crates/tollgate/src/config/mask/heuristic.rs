//! Secrets in a file that could not be parsed.
//!
//! Nobody knows what stands where in such a file, so its lines are judged by how they look: a line that names a
//! secret field is covered after the name, and so is what seems to belong to it on the lines below. What belongs to it
//! is told by an open bracket, by open quotes, by indentation (YAML), or by the table that it stands in (TOML). And in
//! whichever line there is an @, what stands before it may be a password.

use super::{KEY_FIELDS_SHOWN, SECRET_FIELDS, cover, is_key_field, is_nearly, is_secret, userinfo};

/// What else a line may hold a secret after.
const SUSPECT_FIELDS: [&str; 2] = ["value", "header"];
/// The quotes of texts, those that may span lines first. The others are not meant to, which may be what is wrong.
const QUOTES: [&str; 4] = ["\"\"\"", "'''", "\"", "'"];

/// What the lines above say of a line.
enum Below {
    /// Nothing.
    Nothing,
    /// A list is open.
    List,
    /// A text is open, between such quotes.
    Text(&'static str),
    /// A field at this column is open, and whatever is further in belongs to it. Whether it is a table, of which fields may be shown.
    Field { column: usize, shows_fields: bool },
}

/// The text with whatever looks like a secret masked.
pub(crate) fn by_looks(text: &str) -> String {
    let mut below = Below::Nothing;
    let mut is_in_secret_table = false;
    let lines = text.split_inclusive('\n').map(|line| {
        let mut bytes = line.as_bytes().to_vec();
        if let Below::Field { column, .. } = below
            && !belongs(line, column)
        {
            below = Below::Nothing;
        }
        let from = match below {
            Below::List | Below::Text(_) => Some(0),
            Below::Field { shows_fields, .. } if !(shows_fields && is_shown_field(line)) => Some(0),
            _ if is_table_head(line) => {
                is_in_secret_table = secret_from(line).is_some();
                key_in_head(line)
            }
            _ => secret_from(line).or((is_in_secret_table && !is_shown_field(line)).then(|| value_from(line, 0))),
        };
        // Who writes keys as a table has keys for fields.
        let is_field_hidden = is_in_secret_table && !is_table_head(line) && !is_key_field(field_of(line));
        below = after(line, from, &below);
        // The inner lines of a key that spans several.
        let is_alone = !line.contains(['=', ':', '[', '/', '#', ' ']);
        if let Some(from) = from.or(is_alone.then_some(0)) {
            cover(&mut bytes[if is_field_hidden { 0 } else { from }..]);
        }
        if let Some(part) = userinfo(line, value_from(line, 0)) {
            cover(&mut bytes[part]);
        }
        String::from_utf8(bytes).expect("whole characters were replaced by as many ASCII bytes")
    });
    lines.collect()
}

/// What a line says of the next one, given where it is covered from.
fn after(line: &str, from: Option<usize>, before: &Below) -> Below {
    let value = line[from.unwrap_or(0)..].trim();
    match *before {
        Below::List if value.starts_with(']') || is_closed(value) => Below::Nothing,
        Below::List => Below::List,
        Below::Text(quotes) if value.contains(quotes) => Below::Nothing,
        Below::Text(quotes) => Below::Text(quotes),
        Below::Field { column, shows_fields } if from.is_none_or(|from| from == 0) => {
            Below::Field { column, shows_fields }
        }
        Below::Field { .. } | Below::Nothing => {
            let Some(from) = from else { return Below::Nothing };
            if let Some(quotes) = QUOTES.into_iter().find(|quotes| value.starts_with(quotes))
                && value.matches(quotes).count() % 2 == 1
            {
                return Below::Text(quotes);
            }
            if value.starts_with('[') && !is_closed(value) {
                return Below::List;
            }
            match line[..from].ends_with(':') {
                true => Below::Field { column: column_of_field(line), shows_fields: value.is_empty() },
                false => Below::Nothing,
            }
        }
    }
}

/// Where the secret of a line begins, if it looks as if it held one.
fn secret_from(line: &str) -> Option<usize> {
    let words = line.to_ascii_lowercase();
    let named = SECRET_FIELDS.iter().chain(&SUSPECT_FIELDS).filter_map(|field| words.find(field)).min();
    let misspelt = || (is_secret(field_of(line)) || is_nearly(field_of(line), "value")).then(|| column_of_field(line));
    named.or_else(misspelt).map(|at| value_from(line, at))
}

/// Behind the first separator at or after a place; the place itself if there is none. A URL's colon is none.
pub(super) fn value_from(line: &str, at: usize) -> usize {
    let separator = line[at..].find(['=', ':']).filter(|separator| !line[at + separator..].starts_with("://"));
    separator.map_or(at, |separator| at + separator + 1)
}

/// Where the key begins in `[keys.…]`.
fn key_in_head(line: &str) -> Option<usize> {
    let (table, _) = line.split_once('.')?;
    is_nearly(field_of(table), "keys").then_some(table.len() + 1)
}

/// The field that a line begins with, behind what begins an item of a list and without the tables that it is in.
fn field_of(line: &str) -> &str {
    let rest = line[column_of_field(line)..].trim_start_matches(['"', '\'']);
    let word = rest.split(['=', ':', ' ', '"', '\'', ']', '\n', '\r']).next().unwrap_or_default();
    word.rsplit('.').next().unwrap_or_default()
}

fn column_of_field(line: &str) -> usize {
    line.len() - line.trim_start_matches([' ', '\t', '-', '{', '[']).len()
}

fn is_shown_field(line: &str) -> bool {
    line.contains(['=', ':']) && KEY_FIELDS_SHOWN.contains(&field_of(line)) && secret_from(line).is_none()
}

/// Whether a line begins a table in TOML.
fn is_table_head(line: &str) -> bool {
    let line = line.split('#').next().unwrap_or_default().trim();
    line.starts_with('[') && line.ends_with(']') && !line.contains([',', '"', '\'', '='])
}

/// Whether a list ends on this line. A bracket within a text does not count: it is followed by a quote.
fn is_closed(value: &str) -> bool {
    value.trim_end_matches([',', '}', ' ']).ends_with(']')
}

/// Whether a line is part of the field that begins at this column: further in, an item of its list, or blank.
fn belongs(line: &str, column: usize) -> bool {
    let text = line.trim_start();
    let indentation = line.len() - text.len();
    text.is_empty() || indentation > column || (indentation == column && text.starts_with('-'))
}
