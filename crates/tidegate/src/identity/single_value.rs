//! Reads the single value of a header or cookie.
//!
//! A request may contain a header or a cookie several times. Servers differ in which of them they use: the first, the
//! last, or all joined. If the limiter counted by one value and the upstream used another, a client could evade its
//! limit. So a name with several different values is treated as absent.

use http::{HeaderMap, HeaderName};

/// Maximum total length of all `Cookie` headers. If they are longer, the request is treated as one without cookies.
const COOKIE_BYTES_MAX: usize = 16 * 1024;

/// The result of reading a header or cookie that may occur several times in a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SingleValue<'h> {
    /// No value, or only empty ones.
    Nothing,
    /// One value, which may occur several times.
    One(&'h [u8]),
    /// Several different values.
    Contradiction,
}

impl<'h> SingleValue<'h> {
    /// Returns the value of [`One`](SingleValue::One), or `None` if there is no value or if values differ.
    pub(crate) fn one(self) -> Option<&'h [u8]> {
        match self {
            SingleValue::One(value) => Some(value),
            SingleValue::Nothing | SingleValue::Contradiction => None,
        }
    }

    /// Returns `One` if all values are equal, `Contradiction` if two differ, and `Nothing` if there is none.
    ///
    /// White space around values and empty values are ignored.
    fn among(values: impl Iterator<Item = &'h [u8]>) -> SingleValue<'h> {
        let mut single = SingleValue::Nothing;
        for value in values.map(<[u8]>::trim_ascii).filter(|value| !value.is_empty()) {
            match single {
                SingleValue::Nothing => single = SingleValue::One(value),
                SingleValue::One(first) if first == value => {}
                SingleValue::One(_) | SingleValue::Contradiction => return SingleValue::Contradiction,
            }
        }
        single
    }
}

/// Returns the value of the header `name`, without white space around it. Lines are compared; commas separate nothing.
pub(crate) fn header<'h>(headers: &'h HeaderMap, name: &HeaderName) -> SingleValue<'h> {
    SingleValue::among(headers.get_all(name).into_iter().map(|value| value.as_bytes()))
}

/// Returns the value of the cookie `name`, which is case-sensitive.
///
/// Returns [`SingleValue::Nothing`] if the `Cookie` headers have more than 16 KiB together.
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
    fn repeated_header_counts_only_if_all_values_are_equal() {
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
    fn cookie_is_found_by_its_whole_name_on_any_line() {
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
