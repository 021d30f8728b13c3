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
//! In the last two, `\` separates like `/`. Where there are parameters, the last three are read once more with `;…` dropped
//! *before* each decoding, as servlet containers do: `/login;a%2Fb` → login. And where `..` follows an empty segment,
//! each of them is tidied in both ways that there are: `/a//../b` is `/b` for who drops empty segments first, and
//! `/a/b` for who resolves `..` first (RFC 3986, WHATWG).
//!
//! An exemption is the opposite of a rule, so it holds only if *all*
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
    let mut readings = Readings::new();
    if is_plain(path) {
        readings.push(written.map(Cow::Borrowed).collect());
        return readings;
    }
    readings.push(written.map(decode).collect());
    if add_tidied(path, Parameters::Kept, &mut readings) {
        add_tidied(path, Parameters::Dropped, &mut readings);
    }
    readings
}

/// What happens to `;…` before a path is decoded.
#[derive(Clone, Copy, PartialEq)]
enum Parameters {
    Kept,
    Dropped,
}

/// Adds the readings without empty and dot segments. Returns whether parameters were found.
fn add_tidied(path: &[u8], parameters: Parameters, readings: &mut Readings<'_>) -> bool {
    let path = parameters.before_decoding(Cow::Borrowed(path));
    let once = decode(&path);
    let out = decoded_out(Cow::Borrowed(&once), parameters);
    let mut add = |segments: Segments<'_>| {
        let is_empty = |segment: &Cow<'_, [u8]>| segment.is_empty();
        let is_upward = |segment: &Cow<'_, [u8]>| **segment == *b"..";
        let can_differ = segments.iter().any(is_empty) && segments.iter().any(is_upward);
        for order in if can_differ { &[Tidying::EmptyFirst, Tidying::DotsFirst][..] } else { &[Tidying::EmptyFirst] } {
            let reading = tidied(&segments, *order);
            if !readings.contains(&reading) {
                readings.push(reading);
            }
        }
    };
    add(split(&path, false).map(decode).collect());
    add(split(&once, true).map(Cow::Borrowed).collect());
    add(split(&out, true).map(segment_alone).map(Cow::Borrowed).collect());
    // Decoding takes no semicolon away, so whoever would find one on the way finds it here.
    out.contains(&b';')
}

/// Decoded until nothing changes.
fn decoded_out(text: Cow<'_, [u8]>, parameters: Parameters) -> Cow<'_, [u8]> {
    let mut out = parameters.before_decoding(text);
    for _ in 1..DECODINGS_MAX {
        match decode(&out) {
            Cow::Borrowed(_) => break,
            Cow::Owned(further) => out = parameters.before_decoding(Cow::Owned(further)),
        }
    }
    out
}

/// The one spelling under which a path is counted: decoded out, tidied, and escaped again where it must be. `None` if the
/// readings are different paths, of which nobody can say which one is served.
///
/// Counting by the path as written would give a client a fresh counter for every spelling. Counting by one of the
/// readings would, too: a rule for `/login` applies to `/1%2Fx/../login`, `/2%2Fx/../login` and so on.
pub(crate) fn canonical(path: &str) -> Option<Cow<'_, str>> {
    let end = path.find(['?', '#']).unwrap_or(path.len());
    let bare = &path[..end];
    let is_written_so = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    if bare.starts_with('/') && bare.bytes().all(is_written_so) && is_plain(&bare.as_bytes()[1..]) {
        return Some(Cow::Borrowed(if bare.len() > 1 { bare.strip_suffix('/').unwrap_or(bare) } else { bare }));
    }
    let readings = readings(path);
    let mut counted = readings.iter().map(plainest);
    let first = counted.next().unwrap_or_default();
    if !counted.all(|other| other == first) {
        return None;
    }
    let mut text = String::with_capacity(bare.len() + 1);
    for segment in &first {
        text.push('/');
        escape(segment, &mut text);
    }
    Some(Cow::Owned(if text.is_empty() { "/".to_owned() } else { text }))
}

/// A reading without whatever else a server might take away from it.
fn plainest(reading: &Segments<'_>) -> Segments<'static> {
    let out = decoded_out(Cow::Owned(reading.join(&b'/')), Parameters::Kept);
    let segments: Segments<'_> = split(&out, true).map(segment_alone).map(Cow::Borrowed).collect();
    tidied(&segments, Tidying::EmptyFirst)
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

/// What `..` takes back when an empty segment stands before it.
#[derive(Clone, Copy)]
enum Tidying {
    /// The segment before the empty one, which is as if it were not there.
    EmptyFirst,
    /// The empty segment.
    DotsFirst,
}

/// Without empty segments, `.` and `..` (which takes one back, never above the root).
fn tidied<'o>(segments: &[Cow<'_, [u8]>], order: Tidying) -> Segments<'o> {
    let mut tidy: SmallVec<[&[u8]; 6]> = SmallVec::new();
    for segment in segments {
        match (&**segment, order) {
            (b".", _) | (b"", Tidying::EmptyFirst) => {}
            (b"..", _) => drop(tidy.pop()),
            (segment, _) => tidy.push(segment),
        }
    }
    tidy.into_iter().filter(|segment| !segment.is_empty()).map(|segment| Cow::Owned(segment.to_vec())).collect()
}

impl Parameters {
    /// The text that is decoded: itself, or without `;…` up to each next slash.
    fn before_decoding(self, text: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
        if self == Parameters::Kept || !text.contains(&b';') {
            return text;
        }
        let segments: Vec<&[u8]> = text.split(|&byte| byte == b'/').map(segment_alone).collect();
        Cow::Owned(segments.join(&b'/'))
    }
}

/// A segment without its parameters.
fn segment_alone(segment: &[u8]) -> &[u8] {
    segment.split(|&byte| byte == b';').next().unwrap_or_default()
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
            ("/login;a%2Fb", &["login;a/b", "login;a│b", "login│b", "login"]),
            ("/login%3Ba%252Fb", &["login;a%2Fb", "login│b", "login"]),
            ("/files;v=1/a%2Fb", &["files;v=1│a/b", "files;v=1│a│b", "files│a│b", "files│a/b"]),
            ("/a//../b", &["a││..│b", "b", "a│b"]),
            ("/a//%2e%2e/b", &["a││..│b", "b", "a│b"]),
            ("/a/.//../../b", &["a│.││..│..│b", "b"]),
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
            assert_eq!(canonical(path).as_deref(), Some(expected), "{path}");
            assert_eq!(canonical(expected).as_deref(), Some(expected), "{path}");
        }
    }

    #[test]
    fn a_path_that_may_be_several_is_counted_as_none_of_them() {
        for path in ["/1%2Fx/../api/login", "/api//../login", "/login;a%2Fb", "/static/..;%2Fstatic/login"] {
            assert_eq!(canonical(path), None, "{path}");
        }
        // One path, whether or not the slash in it separates.
        assert_eq!(canonical("/files/a%2Fb").as_deref(), Some("/files/a/b"));
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
        // As written, and three ways to decode, with and without parameters, tidied in two orders.
        let path = "/a%2Fb;c%252Fd//../e\\f%252F%252F..%3Bg%252Fh".repeat(1_000);
        assert!(readings(&path).len() <= 13);
        assert_eq!(canonical(&path), None);
    }
}
