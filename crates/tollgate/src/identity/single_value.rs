//! What a request says under a name, if it says one thing.
//!
//! A request may carry a header or a cookie several times. Servers differ in which of them they read: the first,
//! the last, or all joined. A limiter that counts one while the upstream believes another can be
//! walked around. So a name that is said twice, differently, is not said at all.

use http::{HeaderMap, HeaderName};

/// Longer `Cookie` headers are not searched, as if the request had no cookies.
const COOKIE_BYTES_MAX: usize = 16 * 1024;

/// The one value of a header.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SingleValue<'h> {
    /// Not there, or empty.
    Nothing,
    /// There, once or several times the same.
    One(&'h [u8]),
    /// There with values that differ.
    Contradiction,
}

impl<'h> SingleValue<'h> {
    pub(crate) fn one(self) -> Option<&'h [u8]> {
        match self {
            SingleValue::One(value) => Some(value),
            SingleValue::Nothing | SingleValue::Contradiction => None,
        }
    }

    fn among(values: impl Iterator<Item = &'h [u8]>) -> SingleValue<'h> {
        let mut said = SingleValue::Nothing;
        for value in values.map(<[u8]>::trim_ascii).filter(|value| !value.is_empty()) {
            match said {
                SingleValue::Nothing => said = SingleValue::One(value),
                SingleValue::One(first) if first == value => {}
                SingleValue::One(_) | SingleValue::Contradiction => return SingleValue::Contradiction,
            }
        }
        said
    }
}

/// What the request says in the header `name`.
pub(crate) fn header<'h>(headers: &'h HeaderMap, name: &HeaderName) -> SingleValue<'h> {
    SingleValue::among(headers.get_all(name).into_iter().map(|value| value.as_bytes()))
}

/// What the request says in the cookie `name`.
pub(crate) fn cookie<'h>(headers: &'h HeaderMap, name: &str) -> SingleValue<'h> {
    let lines = || headers.get_all(http::header::COOKIE).into_iter().map(|line| line.as_bytes());
    if lines().map(<[u8]>::len).sum::<usize>() > COOKIE_BYTES_MAX {
        return SingleValue::Nothing;
    }
    let pairs = lines().flat_map(|line| line.split(|&byte| byte == b';'));
    SingleValue::among(pairs.filter_map(|pair| {
        let equals = pair.iter().position(|&byte| byte == b'=')?;
        (pair[..equals].trim_ascii() == name.as_bytes()).then_some(&pair[equals + 1..])
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_header_said_twice_counts_only_if_both_agree() {
        let tenant = HeaderName::from_static("x-tenant");
        for (lines, expected) in [
            (&[][..], None),
            (&[("x-tenant", "")], None),
            (&[("x-tenant", " acme ")], Some("acme")),
            (&[("x-tenant", "acme"), ("x-tenant", "acme")], Some("acme")),
            (&[("x-tenant", ""), ("x-tenant", "acme")], Some("acme")),
            (&[("x-tenant", "acme"), ("x-tenant", "evil")], None),
            (&[("x-tenant", "a"), ("x-tenant", "b"), ("x-tenant", "a")], None),
        ] {
            assert_eq!(header(&headers(lines), &tenant).one(), expected.map(str::as_bytes), "{lines:?}");
        }
    }

    #[test]
    fn a_cookie_is_found_by_its_whole_name_on_any_line() {
        for (lines, expected) in [
            (&[("cookie", "device=abc")][..], Some("abc")),
            (&[("cookie", "a=1; device=abc; b=2")], Some("abc")),
            (&[("cookie", "a=1"), ("cookie", "device=a=b==")], Some("a=b==")),
            (&[("cookie", "xdevice=1; devicex=2; Device=3; device")], None),
            (&[("cookie", "device=")], None),
            (&[("cookie", "device=abc; device=abc")], Some("abc")),
            (&[("cookie", "device=abc; device=xyz")], None),
            (&[("x-cookie", "device=abc")], None),
        ] {
            assert_eq!(cookie(&headers(lines), "device").one(), expected.map(str::as_bytes), "{lines:?}");
        }
        let long = format!("device=abc; {}", "x".repeat(COOKIE_BYTES_MAX));
        assert!(cookie(&headers(&[("cookie", &long)]), "device").one().is_none());
    }
}
