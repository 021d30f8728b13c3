//! How a path is read, so that no spelling of it escapes a rule.
//!
//! **Problem.** `/login`, `//login`, `/log%69n`, `/x/../login`, `/login/`, `/login;v=1` and `/login%3Fx` are different strings, and
//! whether they reach the same handler depends on the servers behind us: axum compares what was sent, nginx decodes and
//! cleans, servlet containers drop `;…`, chains of proxies decode twice, and a proxy that forwards a decoded `?` makes a query of it. A
//! limiter that knows one spelling guards one spelling. But cleaning first and comparing then is no answer either: `/files/a%2Fb`
//! is *one* segment for a server that splits before it decodes, and would slip out of `/files/{name}` if we had decoded first.
//!
//! **Idea.** A server does a few [`Step`]s, in an order of its own, and the next server does them again:
//!
//! ```text
//!   decode      %69 → i; an escaped slash stays, as %2F           /log%69n        → login
//!   split       %2F and \ separate like /                         /a%2Fb          → a │ b
//!   parameters  drop ;… from each segment                         /login;v=1      → login
//!   cut         end at a decoded ? # NUL, space or control        /login%3Fx      → login
//!   trim        drop dots and spaces from the end of each segment /login./x       → login │ x
//!   tidy        drop empty segments, resolve . and ..             //a/./b/../c    → a │ c
//!   authority   read //host/path as a URL without a scheme        //x/login       → login
//! ```
//!
//! The *readings* of a path are all texts that these steps can lead to, in any order and number, once it was decoded. A rule applies
//! if it matches *any* of them. `..` after an empty segment takes back that one or the one before, depending on the server; both are
//! readings.
//!
//! An exemption is the opposite of a rule, so it holds only if *all* readings are exempt: `/health/../admin` is not `/health`. The
//! rule may apply to a request that an exotic server would have understood otherwise; the error is on the side of refusal.
//!
//! A trailing slash never matters. Case does: `/Login` is another path on every server that we stand in front of, except
//! those that fold case, for which a rule should list both. A query and a fragment are no part of a path.
//!
//! The corpus test asks real servers which paths reach a handler, and fails if a rule for that handler would not have applied.
//!
//! **Cost.** One look over the bytes finds out that an ordinary path has a single reading, which is borrowed. For others the number of
//! readings and their bytes are bounded; a path beyond the bound may be anything, so it meets every rule and no exemption.

use std::borrow::Cow;
use std::cell::OnceCell;

use smallvec::{SmallVec, smallvec};

/// More texts than this are not worked out. Paths with one or two oddities have fewer than ten.
const TEXTS_MAX: usize = 64;
/// More bytes of texts than this are not worked out: as many as eight paths of 8 KiB have.
const TEXT_BYTES_MAX: usize = 64 * 1024;
/// More rounds are not tried to find the plainest form of a reading; each takes away at least one byte.
const PLAINEST_ROUNDS_MAX: usize = 64;

/// One reading: segments with a `/` between them, and none before or behind.
pub(crate) type Text<'p> = Cow<'p, [u8]>;

/// Every way in which a path may be understood.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Readings<'p> {
    /// These; at least one, without repetition.
    Each(SmallVec<[Text<'p>; 1]>),
    /// More than are worked out.
    Any,
}

/// The readings of a request's path, worked out when a rule first looks at them.
pub(crate) struct LazyReadings<'p> {
    path: &'p str,
    readings: OnceCell<Readings<'p>>,
}

impl<'p> LazyReadings<'p> {
    pub(crate) fn of(path: &'p str) -> LazyReadings<'p> {
        LazyReadings { path, readings: OnceCell::new() }
    }

    pub(crate) fn get(&self) -> &Readings<'p> {
        self.readings.get_or_init(|| readings(self.path))
    }

    /// Returns the path split and decoded once: the reading that every path has, without working out the others.
    pub(crate) fn written(&self) -> Text<'p> {
        decode(bare(self.path))
    }
}

/// Returns the segments of a reading.
pub(crate) fn segments(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&byte| byte == b'/').take(if text.is_empty() { 0 } else { usize::MAX })
}

/// Reads a path in every way.
pub(crate) fn readings(path: &str) -> Readings<'_> {
    let path = bare(path);
    if is_plain(path) {
        return Readings::Each(smallvec![Cow::Borrowed(path)]);
    }
    normalisations::count();
    // Each text with whether it was decoded: only then it is a reading. Before, it is a step on the way to some.
    let mut found: SmallVec<[(Text<'_>, bool); 8]> = smallvec![(Cow::Borrowed(path), decode(path) == path)];
    let (mut bytes, mut to_do) = (path.len(), smallvec![0]);
    while let Some(place) = SmallVec::<[usize; 8]>::pop(&mut to_do) {
        for step in Step::ALL {
            let (text, is_decoded) = &found[place];
            let Some(further) = step.apply(text) else { continue };
            let is_decoded = *is_decoded || step == Step::Decode || decode(&further) == further;
            match found.iter().position(|(known, _)| *known == further) {
                // What follows from a text that turns out to be a reading are readings, too.
                Some(known) if is_decoded && !found[known].1 => {
                    found[known].1 = true;
                    to_do.push(known);
                }
                Some(_) => {}
                None => {
                    bytes += further.len();
                    if found.len() == TEXTS_MAX || bytes > TEXT_BYTES_MAX {
                        return Readings::Any;
                    }
                    to_do.push(found.len());
                    found.push((Cow::Owned(further), is_decoded));
                }
            }
        }
    }
    Readings::Each(found.into_iter().filter(|(_, is_decoded)| *is_decoded).map(|(text, _)| text).collect())
}

/// Returns the path without query, fragment, the slash that begins it and one that ends it.
fn bare(path: &str) -> &[u8] {
    let path = path.split(['?', '#']).next().unwrap_or_default().as_bytes();
    without_last_slash(path.strip_prefix(b"/").unwrap_or(path))
}

fn without_last_slash(text: &[u8]) -> &[u8] {
    text.strip_suffix(b"/").unwrap_or(text)
}

/// What a server may do to a path.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Step {
    Decode,
    Split,
    Parameters,
    Cut,
    Trim,
    /// Drops empty segments, then resolves dots.
    Tidy,
    /// Resolves dots and keeps empty segments, of which `..` may take one back (RFC 3986, WHATWG).
    Dots,
    Authority,
}

impl Step {
    const ALL: [Step; 8] =
        [Step::Decode, Step::Split, Step::Parameters, Step::Cut, Step::Trim, Step::Tidy, Step::Dots, Step::Authority];

    /// Returns the text after this step, or `None` if the step changes nothing.
    fn apply(self, text: &[u8]) -> Option<Vec<u8>> {
        let changed = match self {
            Step::Decode => match decode(text) {
                Cow::Borrowed(_) => return None,
                Cow::Owned(decoded) => decoded,
            },
            Step::Split => split(text)?,
            Step::Parameters => {
                let is_there = text.contains(&b';');
                is_there.then(|| joined(segments(text).map(|segment| until(segment, |byte| byte == b';'))))?
            }
            Step::Cut => {
                let end = text.iter().position(|&byte| ends_path(byte))?;
                text[..end].to_vec()
            }
            Step::Trim => {
                let is_there = segments(text).any(|segment| trimmed(segment).len() < segment.len());
                is_there.then(|| joined(segments(text).map(trimmed)))?
            }
            Step::Tidy => tidied(text, Empty::Dropped)?,
            Step::Dots => tidied(text, Empty::Kept)?,
            Step::Authority => {
                let is_slash = |byte: &u8| b"/\\".contains(byte);
                let host = text.iter().position(|byte| !is_slash(byte)).filter(|&slashes| slashes > 0)?;
                let path = text[host..].iter().position(is_slash).map_or(text.len(), |length| host + length + 1);
                text.get(path..).unwrap_or_default().to_vec()
            }
        };
        let length = without_last_slash(&changed).len();
        let mut changed = changed;
        changed.truncate(length);
        (changed != text).then_some(changed)
    }
}

fn joined<'t>(segments: impl Iterator<Item = &'t [u8]>) -> Vec<u8> {
    let mut text = Vec::new();
    for (place, segment) in segments.enumerate() {
        if place > 0 {
            text.push(b'/');
        }
        text.extend_from_slice(segment);
    }
    text
}

fn until(text: &[u8], ends: impl Fn(u8) -> bool) -> &[u8] {
    &text[..text.iter().position(|&byte| ends(byte)).unwrap_or(text.len())]
}

/// Whether a server that receives this byte decoded may take it for the end of the path.
fn ends_path(byte: u8) -> bool {
    byte <= b' ' || byte == b'?' || byte == b'#' || byte == 0x7f
}

/// Returns the text with every separator written as `/`, or `None` if there is no other.
fn split(text: &[u8]) -> Option<Vec<u8>> {
    let is_escaped = |rest: &[u8]| matches!(rest, [b'%', b'2', b'f' | b'F', ..]);
    if !text.contains(&b'\\') && !text.windows(3).any(is_escaped) {
        return None;
    }
    let mut separated = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        let is_escaped = is_escaped(rest);
        separated.push(if is_escaped || byte == b'\\' { b'/' } else { byte });
        rest = if is_escaped { &after[2..] } else { after };
    }
    Some(separated)
}

/// Returns a segment without dots and spaces at its end. Dots alone are left: they may be a dot segment.
fn trimmed(segment: &[u8]) -> &[u8] {
    let spaceless = segment.trim_ascii_end();
    match spaceless.iter().rposition(|&byte| byte != b'.' && !byte.is_ascii_whitespace()) {
        Some(last) => &segment[..=last],
        None => spaceless,
    }
}

/// What happens to empty segments.
#[derive(Clone, Copy, PartialEq)]
enum Empty {
    Dropped,
    Kept,
}

/// Returns the text without `.` and `..` (which takes one segment back, never above the root) and perhaps without empty segments. `None`
/// if there is nothing of that, or if it makes no difference whether empty segments are kept and they are to be.
fn tidied(text: &[u8], empty: Empty) -> Option<Vec<u8>> {
    let (has_empty, has_dots) = segments(text).fold((false, false), |(has_empty, has_dots), segment| {
        (has_empty || segment.is_empty(), has_dots || segment == b"." || segment == b"..")
    });
    let is_there = if empty == Empty::Kept { has_empty && has_dots } else { has_empty || has_dots };
    if !is_there {
        return None;
    }
    let mut tidy: SmallVec<[&[u8]; 16]> = SmallVec::new();
    for segment in segments(text) {
        match segment {
            b"." => {}
            b"" if empty == Empty::Dropped => {}
            b".." => drop(tidy.pop()),
            segment => tidy.push(segment),
        }
    }
    Some(joined(tidy.into_iter()))
}

/// Returns the one spelling under which a path is counted: its plainest reading, escaped where it must be. `None` if the
/// readings are different paths, so that it is unknown which one is served.
///
/// Counting by the path as written would give a client a fresh counter for every spelling. Counting by one of the
/// readings would, too: a rule for `/login` applies to `/1%2Fx/../login`, `/2%2Fx/../login` and so on.
pub(crate) fn canonical(path: &str) -> Option<Cow<'_, str>> {
    let end = path.find(['?', '#']).unwrap_or(path.len());
    let without_query = &path[..end];
    let is_written_so = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    if without_query.starts_with('/') && without_query.bytes().all(is_written_so) && is_plain(bare(path)) {
        let is_root = without_query.len() == 1;
        let counted = if is_root { without_query } else { without_query.strip_suffix('/').unwrap_or(without_query) };
        return Some(Cow::Borrowed(counted));
    }
    let Readings::Each(readings) = readings(path) else { return None };
    let mut counted = readings.iter().map(|reading| plainest(reading));
    let first = counted.next()??;
    if !counted.all(|other| other.as_ref() == Some(&first)) {
        return None;
    }
    let mut text = String::with_capacity(path.len() + 1);
    for segment in segments(&first) {
        text.push('/');
        escape(segment, &mut text);
    }
    Some(Cow::Owned(if text.is_empty() { "/".to_owned() } else { text }))
}

/// Returns a reading after every step that changes it, or `None` if there are too many.
fn plainest(reading: &[u8]) -> Option<Vec<u8>> {
    const STEPS: [Step; 6] = [Step::Decode, Step::Split, Step::Parameters, Step::Cut, Step::Trim, Step::Tidy];
    let mut text = reading.to_vec();
    for _ in 0..PLAINEST_ROUNDS_MAX {
        match STEPS.into_iter().find_map(|step| step.apply(&text)) {
            Some(further) => text = further,
            None => return Some(text),
        }
    }
    None
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

/// Whether no step changes the path: no escape, parameter, backslash, space or control character, no empty segment, and no segment
/// that begins or ends with a dot.
fn is_plain(path: &[u8]) -> bool {
    let mut before = b'/';
    for &byte in path {
        match byte {
            b'%' | b';' | b'\\' | 0x7f | 0..=b' ' => return false,
            b'/' if before == b'/' || before == b'.' => return false,
            b'.' if before == b'/' => return false,
            _ => before = byte,
        }
    }
    before != b'.' && (before != b'/' || path.is_empty())
}

/// Returns the text percent-decoded once. What is no escape stays as it is, and so does an escaped slash: it is part of a segment, and
/// not a separator, until a server splits there.
pub(crate) fn decode(text: &[u8]) -> Cow<'_, [u8]> {
    let Some(start) = text.iter().position(|&byte| byte == b'%') else { return Cow::Borrowed(text) };
    let mut decoded = Vec::with_capacity(text.len());
    decoded.extend_from_slice(&text[..start]);
    let mut rest = &text[start..];
    let mut changed = false;
    while let Some((&byte, after)) = rest.split_first() {
        let escaped = match (byte, after) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        match escaped {
            Some(escaped) if escaped != b'/' => {
                decoded.push(escaped);
                rest = &after[2..];
                changed = true;
            }
            _ => {
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

/// Counts normalisations, in tests only: that a request refused before has cost none is a promise.
pub(crate) mod normalisations {
    #[cfg(test)]
    thread_local! {
        static COUNT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    }

    #[inline]
    pub(super) fn count() {
        #[cfg(test)]
        COUNT.with(|count| count.set(count.get() + 1));
    }

    /// Returns how many there were since the last call, on this thread.
    #[cfg(test)]
    pub(crate) fn take() -> u64 {
        COUNT.with(|count| count.replace(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(path: &str) -> Vec<String> {
        match readings(path) {
            Readings::Each(texts) => texts.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect(),
            Readings::Any => vec!["any".to_owned()],
        }
    }

    #[test]
    fn path_has_exactly_these_readings() {
        for (path, expected) in [
            ("/", &[""][..]),
            ("", &[""]),
            ("*", &["*"]),
            ("/a/b", &["a/b"]),
            ("/a/b/", &["a/b"]),
            ("/a/b?x=/../c#d", &["a/b"]),
            ("/a.b/c..d", &["a.b/c..d"]),
            ("/a/./b/../c", &["a/./b/../c", "a/c"]),
            ("/../../a", &["../../a", "a"]),
            ("/log%69n", &["login"]),
            ("/files/a%2Fb", &["files/a%2Fb", "files/a/b"]),
            ("/a;v=1/b", &["a;v=1/b", "a/b"]),
            ("/a\\b", &["a\\b", "a/b"]),
            ("/100%", &["100%"]),
            ("/%zz%4", &["%zz%4"]),
            ("/login%3Fx", &["login?x", "login"]),
            ("/login%23x", &["login#x", "login"]),
            ("/login%00x", &["login\0x", "login"]),
            ("/login%20", &["login ", "login"]),
            ("/login%09x", &["login\tx", "login"]),
            ("/login.", &["login.", "login"]),
            ("/login%2e", &["login.", "login"]),
            ("/login. ./x", &["login. ./x", "login.", "login/x", "login"]),
            ("/a//../b", &["a//../b", "b", "a/b"]),
            ("/a/.../b", &["a/.../b"]),
            ("/login%3Ba%252Fb", &["login;a%2Fb", "login;a/b", "login", "login/b"]),
        ] {
            let (mut found, mut expected) = (texts(path), expected.to_vec());
            found.sort_unstable();
            expected.sort_unstable();
            assert_eq!(found, expected, "{path}");
        }
    }

    #[test]
    fn path_has_at_least_these_readings() {
        for (path, expected) in [
            ("//a//b", &["/a//b", "a/b", "b"][..]),
            ("//evil/login", &["login", "evil/login"]),
            ("/\\evil/login", &["login", "evil/login"]),
            ("//evil", &["", "evil"]),
            ("/.//evil/login", &["login", "evil/login"]),
            ("/%2561", &["%61", "a"]),
            ("/%252525252561", &["%2525252561", "a"]),
            ("/a%2f..%2fb", &["a%2f..%2fb", "b"]),
            ("/%2e%2e/a", &["../a", "a"]),
            ("/login;a%2Fb", &["login;a%2Fb", "login;a/b", "login/b", "login"]),
            ("/q%3F/../login%3Fx", &["login", "q"]),
            ("/a/b/%2e%2e/../c", &["c", "a/b/c"]),
            ("/a%3Bx;y", &["a;x", "a"]),
        ] {
            let found = texts(path);
            assert!(expected.iter().all(|text| found.iter().any(|found| found == text)), "{path}: {found:?}");
        }
    }

    #[test]
    fn all_spellings_of_a_path_have_one_canonical_form() {
        for (path, expected) in [
            ("/a/b", "/a/b"),
            ("/a/b/", "/a/b"),
            ("/", "/"),
            ("", "/"),
            ("/?x", "/"),
            ("/a/b?x=1#y", "/a/b"),
            ("/./a/./x/../%62;v=1/", "/a/b"),
            ("/%2561%2fb", "/a/b"),
            ("/a\\b", "/a/b"),
            ("/a-b/é", "/a-b/%C3%A9"),
            ("/a%2db/%c3%a9", "/a-b/%C3%A9"),
            ("/a%20b/%c3%a9", "/a"),
            ("/login%3Fx", "/login"),
            ("/login.", "/login"),
            ("*", "/%2A"),
        ] {
            assert_eq!(canonical(path).as_deref(), Some(expected), "{path}");
            assert_eq!(canonical(expected).as_deref(), Some(expected), "{path}");
        }
    }

    #[test]
    fn ambiguous_path_has_no_canonical_form() {
        for path in [
            "/1%2Fx/../api/login",
            "/api//../login",
            "/login;a%2Fb",
            "/static/..;%2Fstatic/login",
            "//1/login",
            "/1%3F/../login",
        ] {
            assert_eq!(canonical(path), None, "{path}");
        }
        // The readings differ only in whether the slash separates.
        assert_eq!(canonical("/files/a%2Fb").as_deref(), Some("/files/a/b"));
    }

    /// All paths of up to five bytes from those that some step looks at, and one that none does.
    #[test]
    fn a_path_is_plain_exactly_if_no_step_changes_it_and_it_has_no_percent_and_no_leading_dot() {
        const BYTES: &[u8] = b"a2f./%;\\ \x7f";
        let mut plain = 0;
        for length in 0..=5 {
            for number in 0..BYTES.len().pow(length) {
                let byte = |place| char::from(BYTES[number / BYTES.len().pow(place) % BYTES.len()]);
                let path: String = std::iter::once('/').chain((0..length).map(byte)).collect();
                let text = bare(&path);
                let is_unchanged = Step::ALL.into_iter().all(|step| step.apply(text).is_none());
                // Not plain although nothing changes it: `%` that escapes nothing, and hidden files.
                let is_careful = text.contains(&b'%') || segments(text).any(|segment| segment.starts_with(b"."));
                assert_eq!(is_plain(text), is_unchanged && !is_careful, "{path:?}");
                if is_plain(text) {
                    assert_eq!(readings(&path), Readings::Each(smallvec![Cow::Borrowed(text)]), "{path:?}");
                    plain += 1;
                }
            }
        }
        assert!(plain > 300, "{plain} plain paths");
    }

    /// Hidden files are read in one way too, only not by the short cut.
    #[test]
    fn a_path_that_no_step_changes_has_itself_as_its_only_reading() {
        for path in ["users/42/orders", "x/.y", ".well-known/acme", "é/日本", "a%zz", "a-b/c.d"] {
            assert_eq!(texts(&format!("/{path}")), [path]);
        }
    }

    #[test]
    fn hostile_path_has_few_readings_or_may_be_any_path() {
        let mixture = "/a%2Fb;c%252Fd//../e\\f%252F%252F..%3Bg%252Fh";
        // The number of readings; `None` if there are more than are worked out.
        for (path, count) in [
            (format!("/{}", "%25".repeat(2_700)), Some(1)),
            (format!("/{}61", "%25".repeat(2_700)), Some(2)),
            (format!("/{}", "a%3F".repeat(2_000)), Some(2)),
            (";/".repeat(4_000), Some(3)),
            (mixture.repeat(20), None),
            (mixture.repeat(190), None),
        ] {
            let found = match readings(&path) {
                Readings::Each(texts) => {
                    let bytes: usize = texts.iter().map(|text| text.len()).sum();
                    assert!(texts.len() <= TEXTS_MAX && bytes <= TEXT_BYTES_MAX, "{} {bytes}", texts.len());
                    Some(texts.len())
                }
                Readings::Any => None,
            };
            assert_eq!(found, count, "{}", &path[..40]);
            assert!(count.is_some() || canonical(&path).is_none(), "{}", &path[..40]);
        }
    }
}
