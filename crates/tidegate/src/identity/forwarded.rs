//! Parses the `Forwarded` header (RFC 7239) from the right.
//!
//! ```text
//!   Forwarded: for=192.0.2.43;proto=http, for="[2001:db8::1]:4711";host="a,b"
//!              └─────── element ───────┘  └──────────── element ────────────┘
//! ```
//!
//! Elements are separated by commas, but a comma inside quotes is not a separator. If the header were read from the
//! left, a client could open a quote that includes the element a proxy appends: `for="` + `, for=198.51.100.7`. Read
//! from the right, whether a comma is a separator depends only on the text to its right, which the proxy wrote. A quote
//! at the end of a value then extends to its partner on the left.
//!
//! An element is rejected as a whole if it is not a list of `name=value` pairs, or has not exactly one `for`.

use std::borrow::Cow;

/// Returns the index of the last comma in `line` that separates two elements, or `None` if there is only one element.
///
/// A comma inside quotes separates nothing. Quotes are paired from the right.
pub(crate) fn last_comma(line: &[u8]) -> Option<usize> {
    let mut is_quoted = false;
    for (at, &byte) in line.iter().enumerate().rev() {
        match byte {
            b',' if !is_quoted => return Some(at),
            // Inside quotes, a quote is either escaped or the opening one, which follows a `=`.
            b'"' if !is_quoted || !line[..at].ends_with(b"\\") => is_quoted = !is_quoted,
            _ => {}
        }
    }
    None
}

/// Returns the value of the `for` parameter of one element, without quotes and escapes: `192.0.2.43` for
/// `for="192.0.2.43";proto=http`.
///
/// Returns `None` if the element is malformed, or has no `for` or more than one.
pub(crate) fn parse_for(element: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut rest = element.trim_ascii();
    let mut node = None;
    loop {
        let equals = rest.iter().position(|&byte| byte == b'=')?;
        let (name, value) = (&rest[..equals], &rest[equals + 1..]);
        if !is_token(name) {
            return None;
        }
        let (value, after) = split_value(value)?;
        if name.eq_ignore_ascii_case(b"for") && node.replace(value).is_some() {
            return None;
        }
        match after.trim_ascii_start() {
            [] => return node,
            [b';', next @ ..] => rest = next.trim_ascii_start(),
            _ => return None,
        }
    }
}

/// Splits text into the value at its beginning, without quotes and escapes, and the text after it.
///
/// Returns `None` if the value is malformed.
///
/// RFC 7239 requires quotes around values with brackets and colons. They are optional here, because many proxies omit
/// them.
fn split_value(text: &[u8]) -> Option<(Cow<'_, [u8]>, &[u8])> {
    let Some(quoted) = text.strip_prefix(b"\"") else {
        let end = text.iter().position(|byte| b"; \t".contains(byte)).unwrap_or(text.len());
        let value = &text[..end];
        let is_plain = !value.is_empty() && !value.iter().any(|byte| b"\"\\=".contains(byte));
        return is_plain.then_some((Cow::Borrowed(value), &text[end..]));
    };
    let mut value = Vec::new();
    let mut bytes = quoted.iter().enumerate();
    while let Some((at, &byte)) = bytes.next() {
        match byte {
            b'"' => return Some((Cow::Owned(value), &quoted[at + 1..])),
            b'\\' => value.push(*bytes.next()?.1),
            _ => value.push(byte),
        }
    }
    None
}

fn is_token(name: &[u8]) -> bool {
    !name.is_empty() && name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(element: &str) -> Option<String> {
        parse_for(element.as_bytes()).map(|node| String::from_utf8(node.into_owned()).unwrap())
    }

    #[test]
    fn for_parameter_is_found_in_any_position_and_case() {
        for (element, expected) in [
            ("for=192.0.2.43", Some("192.0.2.43")),
            (" FOR=192.0.2.43 ", Some("192.0.2.43")),
            ("proto=http;For=192.0.2.43;by=10.0.0.1", Some("192.0.2.43")),
            ("proto=http; for=192.0.2.43 ;by=10.0.0.1", Some("192.0.2.43")),
            (r#"for="[2001:db8::1]:4711""#, Some("[2001:db8::1]:4711")),
            ("for=[2001:db8::1]:4711", Some("[2001:db8::1]:4711")),
            (r#"for="192\.0.2.43""#, Some("192.0.2.43")),
            (r#"host="a,b;for=6.6.6.6";for=192.0.2.43"#, Some("192.0.2.43")),
            (r#"for="""#, Some("")),
        ] {
            assert_eq!(node(element).as_deref(), expected, "{element}");
        }
    }

    #[test]
    fn malformed_element_is_rejected_as_a_whole() {
        for element in [
            "",
            "for",
            "for=",
            "=192.0.2.43",
            "192.0.2.43",
            "proto=http",
            "for=1.1.1.1;for=2.2.2.2",
            "for=1.1.1.1;FOR=1.1.1.1",
            r#"for="1.1.1.1"#,
            r#"for=1.1.1.1""#,
            r#"for="1.1.1.1"x"#,
            r#"for="1.1.1.1\"#,
            "for =1.1.1.1",
            "for= 1.1.1.1",
            "for=1.1.1.1;",
            "for=1.1.1.1;;proto=http",
            "for=1.1.1.1 proto=http",
            "f,or=1.1.1.1",
            "for=1.1.1.1;x=y=z",
        ] {
            assert_eq!(node(element), None, "{element}");
        }
    }

    #[test]
    fn comma_separates_unless_the_text_to_its_right_quotes_it() {
        for (line, left) in [
            ("for=a, for=b", Some("for=a")),
            ("for=a", None),
            (r#"for=a, for=b;host="x,y""#, Some("for=a")),
            (r#"for=a, for=b;host="x\",y""#, Some("for=a")),
            (r#"for=a, for=b;host="x,y\\""#, Some("for=a")),
            (r#"for=", for=b"#, Some(r#"for=""#)),
            (r#"for=a, for=b""#, None),
        ] {
            let found = last_comma(line.as_bytes()).map(|at| &line[..at]);
            assert_eq!(found, left, "{line}");
        }
    }
}
