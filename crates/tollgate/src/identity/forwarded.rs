//! The `Forwarded` header (RFC 7239), read from the right.
//!
//! ```text
//!   Forwarded: for=192.0.2.43;proto=http, for="[2001:db8::1]:4711";host="a,b"
//!              └─────── element ───────┘  └──────────── element ────────────┘
//! ```
//!
//! Elements are separated by commas, and a comma inside quotes separates nothing. Reading from the left would
//! let a client open a quote that swallows what our proxies append: `for="` + `, for=198.51.100.7`.
//! Read from the right, whether a comma separates depends only on what stands to its right, and
//! that was written by the proxy: a quote that ends a value is open until its partner on the left.
//!
//! An element that is not exactly `name=value` pairs, or does not say `for` exactly once, is refused whole.

use std::borrow::Cow;

/// The last comma of `line` that separates two elements.
pub(crate) fn last_comma(line: &[u8]) -> Option<usize> {
    let mut is_quoted = false;
    for (at, &byte) in line.iter().enumerate().rev() {
        match byte {
            b',' if !is_quoted => return Some(at),
            // Inside quotes a quote is either escaped or the one that opens them, which stands after a `=`.
            b'"' if !is_quoted || !line[..at].ends_with(b"\\") => is_quoted = !is_quoted,
            _ => {}
        }
    }
    None
}

/// The value of the element's one `for` parameter, without its quotes.
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

/// A value and what follows it. Quotes are required around brackets and colons, and often left out.
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
    fn the_for_parameter_is_found_in_any_place_and_case() {
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
    fn an_element_with_anything_odd_is_refused_whole() {
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
    fn a_comma_separates_unless_it_is_quoted_by_what_stands_right_of_it() {
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
