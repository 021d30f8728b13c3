//! How a path is read, so that nobody escapes a rule by writing it differently.
//!
//! **Problem.** `/login`, `//login`, `/log%69n`, `/x/../login`, `/login/` and `/login;v=1` are six different strings, and
//! whether they reach the same handler depends on what stands behind us: axum compares what was sent, nginx decodes and
//! cleans, servlet containers drop `;…`, chains of proxies decode twice. A limiter that knows one spelling
//! guards one spelling. But cleaning first and comparing then is no answer either: `/files/a%2Fb` is *one* segment
//! for a server that splits before it decodes, and would slip out of `/files/{name}` if we had decoded first.
//!
//! **Idea.** A path has several *readings*, and a rule applies if it matches *any* of them:
//!
//! ```text
//!   as written   split at /, decode each segment         /files/a%2Fb    → files │ a/b
//!   tidied       the same without empty and dot segments  //a/./b/../c    → a │ c
//!   decoded      decode once, split, tidy                 /a%2F..%2Fb     → b
//!   decoded out  decode until nothing changes, drop ;…    /%2561;v=1      → a
//! ```
//!
//! In the last two, `\` separates like `/`. An exemption is the opposite of a rule, so it holds only if *all*
//! readings are exempt: `/health/../admin` is not `/health`. The rule may apply to a request that an exotic server would
//! have understood otherwise; the error is on the side of refusal.
//!
//! A trailing slash never matters. Case does: `/Login` is another path on every server that we stand in front of, except
//! those that fold case, for which a rule should list both. A query and a fragment are no part of a path.
//!
//! **Cost.** One look over the bytes finds out that an ordinary path has a single reading, whose segments are borrowed.

use std::borrow::Cow;

use smallvec::SmallVec;

/// More rounds of decoding are not undone: each server in a chain decodes once at most, and without a bound a long
/// enough path would cost the square of its length.
const DECODINGS_MAX: usize = 8;

/// The segments of one reading of a path.
pub(crate) type Segments<'p> = SmallVec<[Cow<'p, [u8]>; 6]>;

/// Every way in which a path may be understood; at least one, without repetition.
pub(crate) type Readings<'p> = SmallVec<[Segments<'p>; 1]>;

/// Reads a path in every way.
pub(crate) fn readings(path: &str) -> Readings<'_> {
    let path = path.split(['?', '#']).next().unwrap_or_default().as_bytes();
    let path = path.strip_prefix(b"/").unwrap_or(path);
    let written = split(path, false);
    if is_plain(path) {
        let mut readings = Readings::new();
        readings.push(written.map(Cow::Borrowed).collect());
        return readings;
    }
    let written: Segments<'_> = written.map(decode).collect();
    let once = decode(path);
    let mut out = once.clone();
    for _ in 1..DECODINGS_MAX {
        match decode(&out) {
            Cow::Borrowed(_) => break,
            Cow::Owned(further) => out = Cow::Owned(further),
        }
    }
    let decoded_out = split(&out, true).map(without_parameters).map(owned);

    let mut readings = Readings::new();
    let mut add = |reading| {
        if !readings.contains(&reading) {
            readings.push(reading);
        }
    };
    add(written.iter().map(|segment| owned(segment)).collect());
    add(tidied(written.iter().map(|segment| owned(segment))));
    add(tidied(split(&once, true).map(owned)));
    add(tidied(decoded_out));
    readings
}

/// The one spelling under which a path is counted: decoded out, tidied, and escaped again where it must be.
///
/// Counting by the path as written would give a client a fresh counter for every spelling.
pub(crate) fn canonical(path: &str) -> Cow<'_, str> {
    let end = path.find(['?', '#']).unwrap_or(path.len());
    let bare = &path[..end];
    let is_written_so = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    if bare.starts_with('/') && bare.bytes().all(is_written_so) && is_plain(&bare.as_bytes()[1..]) {
        return Cow::Borrowed(if bare.len() > 1 { bare.strip_suffix('/').unwrap_or(bare) } else { bare });
    }
    let mut text = String::with_capacity(bare.len() + 1);
    for segment in readings(path).pop().unwrap_or_default() {
        text.push('/');
        escape(&segment, &mut text);
    }
    Cow::Owned(if text.is_empty() { "/".to_owned() } else { text })
}

/// Writes a segment with everything escaped that is not unreserved (RFC 3986).
pub(crate) fn escape(segment: &[u8], text: &mut String) {
    for &byte in segment {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => text.push(byte.into()),
            _ => {
                const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
                let digit = |half: u8| char::from(DIGITS[usize::from(half)]);
                text.extend(['%', digit(byte >> 4), digit(byte & 15)]);
            }
        }
    }
}

/// Whether all readings are the same: no escape, no parameter, no empty or dot segment, no backslash.
fn is_plain(path: &[u8]) -> bool {
    let mut at_start = true;
    for &byte in path {
        match byte {
            b'%' | b';' | b'\\' => return false,
            b'/' | b'.' if at_start => return false,
            _ => at_start = byte == b'/',
        }
    }
    true
}

/// The segments between slashes. A trailing slash adds none.
fn split(path: &[u8], at_backslash: bool) -> impl Iterator<Item = &[u8]> {
    let is_separator = move |byte: &u8| *byte == b'/' || (at_backslash && *byte == b'\\');
    let end = path.len() - usize::from(path.last().is_some_and(is_separator));
    let path = &path[..end];
    path.split(is_separator).take(if path.is_empty() { 0 } else { usize::MAX })
}

/// Without empty segments, `.` and `..` (which takes one back, never above the root).
fn tidied<'p>(segments: impl Iterator<Item = Cow<'p, [u8]>>) -> Segments<'p> {
    let mut tidy = Segments::new();
    for segment in segments {
        match &*segment {
            b"" | b"." => {}
            b".." => drop(tidy.pop()),
            _ => tidy.push(segment),
        }
    }
    tidy
}

fn without_parameters(segment: &[u8]) -> &[u8] {
    segment.split(|&byte| byte == b';').next().unwrap_or_default()
}

fn owned<'p>(segment: &[u8]) -> Cow<'p, [u8]> {
    Cow::Owned(segment.to_vec())
}

/// Percent-decoded once. What is no escape stays as it is.
pub(crate) fn decode(text: &[u8]) -> Cow<'_, [u8]> {
    if !text.contains(&b'%') {
        return Cow::Borrowed(text);
    }
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    let mut changed = false;
    while let Some((&byte, after)) = rest.split_first() {
        let escaped = match (byte, after) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)),
            _ => None,
        };
        match escaped {
            Some((high, low)) => {
                decoded.push(high << 4 | low);
                rest = &after[2..];
                changed = true;
            }
            None => {
                decoded.push(byte);
                rest = after;
            }
        }
    }
    if changed { Cow::Owned(decoded) } else { Cow::Borrowed(text) }
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(path: &str) -> Vec<String> {
        let text = |segments: &Segments<'_>| {
            segments.iter().map(|segment| String::from_utf8_lossy(segment).into_owned()).collect::<Vec<_>>().join("│")
        };
        readings(path).iter().map(text).collect()
    }

    #[test]
    fn each_path_is_read_in_every_way_it_may_be_understood() {
        for (path, expected) in [
            ("/", &[""][..]),
            ("", &[""]),
            ("*", &["*"]),
            ("/a/b", &["a│b"]),
            ("/a/b/", &["a│b"]),
            ("/a/b?x=/../c#d", &["a│b"]),
            ("/a.b/c..d", &["a.b│c..d"]),
            ("//a//b", &["│a││b", "a│b"]),
            ("/a/./b/../c", &["a│.│b│..│c", "a│c"]),
            ("/../../a", &["..│..│a", "a"]),
            ("/log%69n", &["login"]),
            ("/files/a%2Fb", &["files│a/b", "files│a│b"]),
            ("//files/a%2Fb", &["│files│a/b", "files│a/b", "files│a│b"]),
            ("/a%2f..%2fb", &["a/../b", "b"]),
            ("/%2561", &["%61", "a"]),
            ("/%252525252561", &["%2525252561", "a"]),
            ("/a;v=1/b", &["a;v=1│b", "a│b"]),
            ("/a\\b", &["a\\b", "a│b"]),
            ("/a%5cb", &["a\\b", "a│b"]),
            ("/100%", &["100%"]),
            ("/%zz%4", &["%zz%4"]),
            ("/%2e%2e/a", &["..│a", "a"]),
        ] {
            assert_eq!(texts(path), expected, "{path}");
        }
    }

    #[test]
    fn all_spellings_of_a_path_are_counted_as_one() {
        for (path, expected) in [
            ("/a/b", "/a/b"),
            ("/a/b/", "/a/b"),
            ("/", "/"),
            ("", "/"),
            ("/?x", "/"),
            ("/a/b?x=1#y", "/a/b"),
            ("//a/./x/../%62;v=1/", "/a/b"),
            ("/%2561%2fb", "/a/b"),
            ("/a\\b", "/a/b"),
            ("/a b/é", "/a%20b/%C3%A9"),
            ("/a%20b/%c3%a9", "/a%20b/%C3%A9"),
            ("*", "/%2A"),
        ] {
            assert_eq!(canonical(path), expected, "{path}");
            assert_eq!(canonical(&canonical(path)), expected, "{path}");
        }
    }

    #[test]
    fn a_path_is_plain_exactly_if_all_its_readings_are_one() {
        for path in ["a", "a/b", "a-b/c.d", "", "a/b/", "x/.y", "x//y", "/", "a%41", "a;b", "."] {
            let full = format!("/{path}");
            if is_plain(path.as_bytes()) {
                assert_eq!(readings(&full).len(), 1, "{path}");
                assert!(readings(&full)[0].iter().all(|segment| matches!(segment, Cow::Borrowed(_))));
            }
        }
        assert!(is_plain(b"users/42/orders") && !is_plain(b"users/.hidden"));
    }

    #[test]
    fn a_hostile_path_is_read_in_bounded_work() {
        let path = format!("/{}", "%25".repeat(20_000));
        assert!(readings(&path).len() <= 4);
        assert!(readings(&"/..".repeat(20_000)).len() <= 2);
    }
}
