//! Readings of a path: all paths that servers may take it for, so that no spelling evades a rule.
//!
//! **Problem.** `/login`, `//login`, `/log%69n`, `/x/../login`, `/login/`, `/login;v=1` and `/login%3Fx` are different
//! strings. Whether they reach the same handler depends on the upstream servers: axum compares the path as sent, nginx
//! decodes and normalizes it, servlet containers drop `;…`, chains of proxies decode twice, and a proxy that forwards a
//! decoded `?` turns the rest into a query. A limiter that knows one spelling limits one spelling. To normalize first
//! and compare then is wrong too: `/files/a%2Fb` is *one* segment for a server that splits before it decodes, and would
//! not match `/files/{name}` after decoding.
//!
//! **Idea.** A server applies some of these [`PathStep`]s in some order, and the next server applies them again:
//!
//! ```text
//!   decode      %69 → i; an escaped slash stays, as %2F           /log%69n        → login
//!   split       %2F and \ separate like /                         /a%2Fb          → a │ b
//!   parameters  drop ;… from each segment                         /login;v=1      → login
//!   cut         end at a decoded ? # NUL, space or control        /login%3Fx      → login
//!   trim        drop dots and spaces from the end of each segment /login./x       → login │ x
//!   tidy        drop empty segments, resolve . and ..             //a/./b/../c    → a │ c
//!   dots        resolve . and .., keep empty segments             /a//../b        → a │ b
//!   authority   read //host/path as a URL without a scheme        //x/login       → login
//! ```
//!
//! The *readings* of a path are all texts that any sequence of these steps can produce and that were decoded at least
//! once or have nothing to decode. A rule applies if it matches *any* reading. In `/a//../b`, `..` removes the empty
//! segment (dots) or `a` (tidy), depending on the server. Both results are readings.
//!
//! An exemption is the opposite of a rule, so it applies only if *all* readings are exempt: `/health/../admin` is not
//! `/health`. Errors are on the side of refusal: a rule may apply to a request that the upstream understands
//! differently.
//!
//! A trailing slash is ignored. Case matters: `/Login` is another path than `/login` on most servers. For servers that
//! ignore case, a rule has to list both. Query and fragment are not part of a path.
//!
//! The corpus test replays paths that reached a handler on real servers, and fails if the rule for that handler would
//! not have applied.
//!
//! **Cost.** One pass over the bytes shows that an ordinary path has a single reading, which is borrowed. For other
//! paths the number of readings and their total size are bounded. A path beyond these bounds is subject to all rules
//! and no exemption.

use std::borrow::Cow;
use std::cell::OnceCell;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use smallvec::{SmallVec, smallvec};

/// Maximum number of texts that are computed for a path. Paths with one or two unusual characters have fewer than ten.
const TEXTS_MAX: usize = 64;
/// Maximum total size of these texts: eight paths of 8 KiB.
const TEXT_BYTES_MAX: usize = 64 * 1024;
/// Maximum number of steps to find the canonical form of a reading.
const CANONICAL_STEPS_MAX: usize = 64;

/// The bytes of a path after one leading slash and one trailing slash were removed: segments separated by `/`.
pub(crate) type PathText<'p> = Cow<'p, [u8]>;

/// The readings of a path: all paths that servers may take it for, such as `a/b` and `a%2Fb` for `/a%2Fb`.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Readings<'p> {
    /// The readings: at least one, no two of them equal.
    Each(SmallVec<[PathText<'p>; 1]>),
    /// There are too many readings to compute. The path may be any path: every rule matches it, and no exemption.
    Any,
}

/// The readings of a path, computed on first use and then kept.
pub(crate) struct LazyReadings<'p> {
    path: &'p str,
    readings: OnceCell<Readings<'p>>,
}

impl<'p> LazyReadings<'p> {
    /// Wraps a path, with or without its query. Computes nothing yet.
    pub(crate) fn of(path: &'p str) -> LazyReadings<'p> {
        LazyReadings { path, readings: OnceCell::new() }
    }

    /// Returns the readings of the path. The first call computes them.
    pub(crate) fn get(&self) -> &Readings<'p> {
        self.readings.get_or_init(|| readings(self.path))
    }

    /// Returns the path with its percent escapes decoded once, without computing its readings.
    ///
    /// Query, fragment, the leading slash and one trailing slash are removed. See [`decode`] for escapes that are kept.
    pub(crate) fn decoded_once(&self) -> PathText<'p> {
        decode(bare(self.path))
    }
}

/// Returns the segments of a path without its leading slash. The empty text, which is the path `/`, has none.
pub(crate) fn segments(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&byte| byte == b'/').take(if text.is_empty() { 0 } else { usize::MAX })
}

/// Computes all readings of a path, with or without its query.
///
/// These are the texts that any sequence of [`PathStep`]s produces and that were decoded at least once or have nothing
/// to decode. A plain path is its own and only reading, which is borrowed.
///
/// Returns [`Readings::Any`] for more than [`TEXTS_MAX`] texts, intermediate ones included, or more than
/// [`TEXT_BYTES_MAX`] bytes.
pub(crate) fn readings(path: &str) -> Readings<'_> {
    let path = bare(path);
    if is_plain(path) {
        return Readings::Each(smallvec![Cow::Borrowed(path)]);
    }
    normalisations::count();
    // Each text, and whether it was decoded. Only decoded texts are readings; the others are intermediate results.
    let mut found: SmallVec<[(PathText<'_>, bool); 8]> = smallvec![(Cow::Borrowed(path), decode(path) == path)];
    let (mut bytes, mut to_do) = (path.len(), smallvec![0]);
    while let Some(index) = SmallVec::<[usize; 8]>::pop(&mut to_do) {
        for step in PathStep::ALL {
            let (text, is_decoded) = &found[index];
            let Some(further) = step.apply(text) else { continue };
            let is_decoded = *is_decoded || step == PathStep::Decode || decode(&further) == further;
            match found.iter().position(|(known, _)| *known == further) {
                // The text is a reading after all. So are the texts that follow from it.
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

/// Returns the path without query, fragment, the leading slash and one trailing slash.
fn bare(path: &str) -> &[u8] {
    let path = path.split(['?', '#']).next().unwrap_or_default().as_bytes();
    without_last_slash(path.strip_prefix(b"/").unwrap_or(path))
}

fn without_last_slash(text: &[u8]) -> &[u8] {
    text.strip_suffix(b"/").unwrap_or(text)
}

/// A transformation that a server may apply to a path, such as decoding escapes or resolving `..`.
///
/// The table at the top of this file has an example of each variant.
#[derive(Clone, Copy, PartialEq, Debug)]
enum PathStep {
    /// Decodes escapes once, except an escaped slash.
    Decode,
    /// Treats `%2F` and `\` as separators.
    Split,
    /// Drops `;…` from each segment.
    Parameters,
    /// Ends the path at the first decoded `?`, `#`, space or control character.
    Cut,
    /// Drops dots and white space from the end of each segment. A segment of nothing else keeps its dots.
    Trim,
    /// Drops empty segments, then resolves `.` and `..`.
    Tidy,
    /// Resolves `.` and `..` and keeps empty segments, so that `..` may remove one (RFC 3986, WHATWG).
    ///
    /// Applies only to a path that has both dot segments and empty segments. [`Tidy`](PathStep::Tidy) covers the
    /// others.
    Dots,
    /// Drops the host of `//host/path`: the leading slashes and backslashes, and the text up to the next one.
    Authority,
}

impl PathStep {
    const ALL: [PathStep; 8] = [
        PathStep::Decode,
        PathStep::Split,
        PathStep::Parameters,
        PathStep::Cut,
        PathStep::Trim,
        PathStep::Tidy,
        PathStep::Dots,
        PathStep::Authority,
    ];

    /// Returns the text after this step, without one trailing slash. `None` if the step does not apply or changes
    /// nothing.
    ///
    /// `text` is a path without its leading slash.
    fn apply(self, text: &[u8]) -> Option<Vec<u8>> {
        let changed = match self {
            PathStep::Decode => match decode(text) {
                Cow::Borrowed(_) => return None,
                Cow::Owned(decoded) => decoded,
            },
            PathStep::Split => split(text)?,
            PathStep::Parameters => {
                let has_parameters = text.contains(&b';');
                has_parameters.then(|| joined(segments(text).map(|segment| until(segment, |byte| byte == b';'))))?
            }
            PathStep::Cut => {
                let end = text.iter().position(|&byte| ends_path(byte))?;
                text[..end].to_vec()
            }
            PathStep::Trim => {
                let is_trimmed = segments(text).any(|segment| trimmed(segment).len() < segment.len());
                is_trimmed.then(|| joined(segments(text).map(trimmed)))?
            }
            PathStep::Tidy => tidied(text, EmptySegments::Dropped)?,
            PathStep::Dots => tidied(text, EmptySegments::Kept)?,
            PathStep::Authority => {
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

/// Joins segments with `/`.
fn joined<'t>(segments: impl Iterator<Item = &'t [u8]>) -> Vec<u8> {
    let mut text = Vec::new();
    for (index, segment) in segments.enumerate() {
        if index > 0 {
            text.push(b'/');
        }
        text.extend_from_slice(segment);
    }
    text
}

/// Returns the text before the first byte for which `ends` is true.
fn until(text: &[u8], ends: impl Fn(u8) -> bool) -> &[u8] {
    &text[..text.iter().position(|&byte| ends(byte)).unwrap_or(text.len())]
}

/// Returns whether a server may end the path at this decoded byte: `?`, `#`, space or a control character.
fn ends_path(byte: u8) -> bool {
    byte <= b' ' || byte == b'?' || byte == b'#' || byte == 0x7f
}

/// Returns the text with `%2F` and `\` replaced by `/`, or `None` if it contains neither.
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

/// Returns a segment without the dots and white space at its end.
///
/// A segment of nothing but dots and white space keeps its dots, because it may be a dot segment.
fn trimmed(segment: &[u8]) -> &[u8] {
    let spaceless = segment.trim_ascii_end();
    match spaceless.iter().rposition(|&byte| byte != b'.' && !byte.is_ascii_whitespace()) {
        Some(last) => &segment[..=last],
        None => spaceless,
    }
}

/// Whether [`tidied`] drops or keeps empty segments.
#[derive(Clone, Copy, PartialEq)]
enum EmptySegments {
    Dropped,
    Kept,
}

/// Resolves the segments `.` and `..`, and drops or keeps empty segments.
///
/// `..` removes the segment before it, if there is one. Returns `None` if the text has neither dot segments nor empty
/// segments. With [`EmptySegments::Kept`], also returns `None` if it has only one of the two, because then the result is
/// the text itself or that of [`EmptySegments::Dropped`].
fn tidied(text: &[u8], empty: EmptySegments) -> Option<Vec<u8>> {
    let (has_empty, has_dots) = segments(text).fold((false, false), |(has_empty, has_dots), segment| {
        (has_empty || segment.is_empty(), has_dots || segment == b"." || segment == b"..")
    });
    let is_needed = if empty == EmptySegments::Kept { has_empty && has_dots } else { has_empty || has_dots };
    if !is_needed {
        return None;
    }
    let mut tidy: SmallVec<[&[u8]; 16]> = SmallVec::new();
    for segment in segments(text) {
        match segment {
            b"." => {}
            b"" if empty == EmptySegments::Dropped => {}
            b".." => drop(tidy.pop()),
            segment => tidy.push(segment),
        }
    }
    Some(joined(tidy.into_iter()))
}

/// Returns the canonical form of a path, under which it is counted, or `None` if the path is ambiguous.
///
/// `path` may have a query or a fragment; both are dropped. The form begins with a slash and has no trailing slash,
/// except that of the root, `/`. It is the result of applying all steps but [`PathStep::Dots`] and
/// [`PathStep::Authority`] until none changes the path, with everything but unreserved characters percent-encoded. A
/// path is ambiguous if its readings have different canonical forms, or if they cannot be computed within the bounds.
///
/// Without it, a client would get a new counter for every spelling of a path. To choose one of several readings would
/// not help: a rule for `/login` applies to `/1%2Fx/../login`, `/2%2Fx/../login` and so on.
pub(crate) fn canonical(path: &str) -> Option<Cow<'_, str>> {
    let end = path.find(['?', '#']).unwrap_or(path.len());
    let without_query = &path[..end];
    let is_unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    if without_query.starts_with('/') && without_query.bytes().all(is_unreserved) && is_plain(bare(path)) {
        let is_root = without_query.len() == 1;
        let counted = if is_root { without_query } else { without_query.strip_suffix('/').unwrap_or(without_query) };
        return Some(Cow::Borrowed(counted));
    }
    let Readings::Each(readings) = readings(path) else { return None };
    let mut forms = readings.iter().map(|reading| after_all_steps(reading));
    let first = forms.next()??;
    if !forms.all(|other| other.as_ref() == Some(&first)) {
        return None;
    }
    let mut text = String::with_capacity(path.len() + 1);
    for segment in segments(&first) {
        text.push('/');
        escape(segment, &mut text);
    }
    Some(Cow::Owned(if text.is_empty() { "/".to_owned() } else { text }))
}

/// Applies the steps of the canonical form to a reading until none changes it.
///
/// Returns `None` if that takes [`CANONICAL_STEPS_MAX`] steps or more.
fn after_all_steps(reading: &[u8]) -> Option<Vec<u8>> {
    const STEPS: [PathStep; 6] =
        [PathStep::Decode, PathStep::Split, PathStep::Parameters, PathStep::Cut, PathStep::Trim, PathStep::Tidy];
    let mut text = reading.to_vec();
    for _ in 0..CANONICAL_STEPS_MAX {
        match STEPS.into_iter().find_map(|step| step.apply(&text)) {
            Some(further) => text = further,
            None => return Some(text),
        }
    }
    None
}

/// Appends a segment to `text`, with everything but unreserved characters (RFC 3986) percent-encoded.
pub(crate) fn escape(segment: &[u8], text: &mut String) {
    const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    text.extend(percent_encode(segment, RESERVED));
}

/// Returns `true` only if no [`PathStep`] changes the path, so that it is its own and only reading.
///
/// `path` must be without query, leading slash and trailing slash, as [`bare`] returns it. A plain path has no `%`,
/// `;`, backslash, space or control character, no empty segment, and no segment that begins or ends with a dot. The
/// test is conservative: it is `false` for some paths that no step changes, such as `.well-known`.
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

/// Decodes percent escapes once: `%69` becomes `i`, `%2569` becomes `%69`.
///
/// Keeps `%2F`, because it is part of a segment until a server treats it as a separator, and everything that is not a
/// valid escape. The result is borrowed if nothing changed.
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

/// Counts the paths whose readings were computed step by step, in tests only.
///
/// Tests use the count to show that refusing a request early needs no such computation.
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

    /// Returns the number of paths whose readings this thread has computed step by step, and sets it to zero.
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
        // The same path whether or not the escaped slash is a separator.
        assert_eq!(canonical("/files/a%2Fb").as_deref(), Some("/files/a/b"));
    }

    /// Tests all paths of up to five bytes that some step changes or reads, and of one that none does.
    #[test]
    fn a_path_is_plain_exactly_if_no_step_changes_it_and_it_has_no_percent_and_no_leading_dot() {
        const BYTES: &[u8] = b"a2f./%;\\ \x7f";
        let mut plain = 0;
        for length in 0..=5 {
            for number in 0..BYTES.len().pow(length) {
                let byte = |place| char::from(BYTES[number / BYTES.len().pow(place) % BYTES.len()]);
                let path: String = std::iter::once('/').chain((0..length).map(byte)).collect();
                let text = bare(&path);
                let is_unchanged = PathStep::ALL.into_iter().all(|step| step.apply(text).is_none());
                // The conservative cases: a `%` that escapes nothing, and hidden files.
                let is_excluded = text.contains(&b'%') || segments(text).any(|segment| segment.starts_with(b"."));
                assert_eq!(is_plain(text), is_unchanged && !is_excluded, "{path:?}");
                if is_plain(text) {
                    assert_eq!(readings(&path), Readings::Each(smallvec![Cow::Borrowed(text)]), "{path:?}");
                    plain += 1;
                }
            }
        }
        assert!(plain > 300, "{plain} plain paths");
    }

    /// A path with an escape takes the general way to its canonical form.
    #[test]
    fn canonical_form_of_a_plain_path_is_that_of_its_escaped_spelling() {
        const BYTES: &[u8] = b"a2./~";
        for number in 0..BYTES.len().pow(6) {
            let byte = |place| char::from(BYTES[number / BYTES.len().pow(place) % BYTES.len()]);
            let path: String = "/a".chars().chain((0..6).map(byte)).collect();
            let escaped = path.replacen('a', "%61", 1);
            assert_eq!(canonical(&path), canonical(&escaped), "{path}");
            let with_query = format!("{path}?x=/y/");
            assert_eq!(canonical(&with_query), canonical(&escaped), "{with_query}");
        }
    }

    /// Some of these paths, such as hidden files, are not plain: their single reading is computed step by step.
    #[test]
    fn a_path_that_no_step_changes_has_itself_as_its_only_reading() {
        for path in ["users/42/orders", "x/.y", ".well-known/acme", "é/日本", "a%zz", "a-b/c.d"] {
            assert_eq!(texts(&format!("/{path}")), [path]);
        }
    }

    #[test]
    fn readings_of_a_hostile_path_are_bounded() {
        for path in [
            format!("/{}", "%25".repeat(2_700)),
            format!("/{}61", "%25".repeat(2_700)),
            "/a%2Fb;c%252Fd//../e\\f%252F%252F..%3Bg%252Fh".repeat(190),
            format!("/{}", "a%3F".repeat(2_000)),
        ] {
            if let Readings::Each(texts) = readings(&path) {
                let bytes: usize = texts.iter().map(|text| text.len()).sum();
                assert!(texts.len() <= TEXTS_MAX && bytes <= TEXT_BYTES_MAX, "{} {bytes}", texts.len());
            }
        }
        assert_eq!(readings(&"/a%2Fb;c%252Fd//../e\\f%252F%252F..%3Bg%252Fh".repeat(20)), Readings::Any);
        assert_eq!(canonical(&"/a%2Fb;c%252Fd//../e\\f%252F%252F..%3Bg%252Fh".repeat(20)), None);
        assert_eq!(texts(&";/".repeat(4_000)).len(), 3);
    }
}
