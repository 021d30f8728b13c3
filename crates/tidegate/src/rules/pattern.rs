//! Parses path patterns: `/shorten`, `/users/{id}`, `/api/*`.

use std::ops::Range;

use super::path::{decode, escape};

/// A parsed path pattern of a rule or an exemption: its segments, and whether it also matches the paths below.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Pattern {
    pub(crate) segments: Vec<Segment>,
    /// Whether the pattern ends in `/*`: `/api/*` matches `/api` and every path below it.
    pub(crate) is_prefix: bool,
}

/// One segment of a pattern: a literal, or a variable such as `{id}`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Segment {
    /// Matches a segment with exactly these bytes. Percent escapes of the pattern are decoded.
    Exact(Box<[u8]>),
    /// `{name}`: matches any segment that is not empty.
    Any,
}

/// The error for a text that is not a path pattern: what is wrong, where, and what to write instead.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PatternError {
    /// The bytes of the text that are wrong.
    pub(crate) span: Range<usize>,
    /// What is wrong.
    pub(crate) message: String,
    /// What to write instead.
    pub(crate) help: String,
}

impl Pattern {
    /// Parses a pattern such as `/shorten`, `/users/{id}` or `/api/*`.
    ///
    /// A trailing slash is ignored. The names of variables are not kept: `/users/{id}` equals `/users/{name}`.
    ///
    /// # Errors
    /// If the text does not begin with `/`; has a query, a fragment, an escaped slash, an empty segment or a dot
    /// segment; has a `*` that is not the whole last segment; or has a variable that is not a whole segment, has no
    /// name, has one of `{}*:` in its name, or is written `:id`.
    pub(crate) fn parse(text: &str) -> Result<Pattern, PatternError> {
        let whole = 0..text.len();
        let Some(rest) = text.strip_prefix('/') else {
            let help = match text {
                "" | "*" => "write `/*` for every path".to_owned(),
                _ => format!("write `/{text}`"),
            };
            return Err(error(whole, "a path must begin with /", help));
        };
        if let Some(at) = text.find(['?', '#']) {
            let help = "a rule matches only the path; remove the query or fragment";
            return Err(error(at..text.len(), "a path pattern cannot have a query or a fragment", help));
        }
        let (rest, is_prefix) = match rest.strip_suffix('*') {
            Some(before) if before.is_empty() || before.ends_with('/') => (before, true),
            _ => (rest, false),
        };
        let mut segments = Vec::new();
        let mut start = 1;
        for segment in rest.strip_suffix('/').unwrap_or(rest).split('/') {
            if !rest.is_empty() {
                segments.push(parse_segment(segment, start)?);
            }
            start += segment.len() + 1;
        }
        Ok(Pattern { segments, is_prefix })
    }

    /// Returns a path that the pattern matches: `/users/0` for `/users/{id}`, `/api/` for `/api/*`.
    pub(crate) fn example(&self) -> String {
        let mut path = String::new();
        for segment in &self.segments {
            path.push('/');
            match segment {
                Segment::Exact(bytes) => escape(bytes, &mut path),
                Segment::Any => path.push('0'),
            }
        }
        if path.is_empty() || self.is_prefix {
            path.push('/');
        }
        path
    }

    /// Returns the pattern that matches the paths that both patterns match, or `None` if no path matches both.
    pub(crate) fn intersection(&self, other: &Pattern) -> Option<Pattern> {
        let (long, short) = if self.segments.len() >= other.segments.len() { (self, other) } else { (other, self) };
        if long.segments.len() > short.segments.len() && !short.is_prefix {
            return None;
        }
        let mut segments = long.segments.clone();
        for (mine, theirs) in segments.iter_mut().zip(&short.segments) {
            match (&mine, theirs) {
                (_, Segment::Any) => {}
                (Segment::Any, _) => *mine = theirs.clone(),
                (Segment::Exact(one), Segment::Exact(another)) if one == another => {}
                _ => return None,
            }
        }
        Some(Pattern { segments, is_prefix: long.is_prefix && short.is_prefix })
    }

    /// Returns whether this pattern matches every path that `other` matches.
    pub(crate) fn covers(&self, other: &Pattern) -> bool {
        let is_long_enough = if self.is_prefix {
            other.segments.len() >= self.segments.len()
        } else {
            other.segments.len() == self.segments.len() && !other.is_prefix
        };
        let covers = |(mine, theirs): (&Segment, &Segment)| mine == theirs || *mine == Segment::Any;
        is_long_enough && self.segments.iter().zip(&other.segments).all(covers)
    }
}

/// Parses one segment of a pattern. `start` is the offset of the segment in the pattern, for the span of an error.
///
/// # Errors
/// If the segment is not valid; see [`Pattern::parse`].
fn parse_segment(text: &str, start: usize) -> Result<Segment, PatternError> {
    let span = start..start + text.len();
    let refuse = |message: &str, help: &str| Err(error(span.clone(), message, help));
    if let Some(name) = text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
        return match name {
            "" => refuse("a variable needs a name", "write for example `{id}`"),
            _ if name.starts_with('*') => refuse("the wildcard at the end cannot have a name", "write `*`"),
            _ if name.contains(['{', '}', '*', ':']) => refuse("a variable must be a name in braces", "write `{id}`"),
            _ => Ok(Segment::Any),
        };
    }
    match text {
        "" => refuse("a segment is empty", "write one / between segments"),
        "." | ".." => refuse("a pattern cannot contain dot segments", "write the path without dot segments"),
        "**" => refuse("** is not supported", "a single `*` at the end matches everything below"),
        _ if text.contains('*') => {
            refuse("a * must be the whole last segment", "write `/api/*` for everything below, `{id}` for one segment")
        }
        _ if text.contains(['{', '}']) => refuse("a variable must be a whole segment", "write `/{id}/`, not `/v{id}/`"),
        _ if text.starts_with(':') => refuse("a variable must be written in braces", "write `{id}`, not `:id`"),
        _ => {
            if text.to_ascii_lowercase().contains("%2f") {
                refuse("a segment cannot contain an escaped slash", "use `{id}` for a segment that contains one")
            } else {
                Ok(Segment::Exact(decode(text.as_bytes()).into()))
            }
        }
    }
}

fn error(span: Range<usize>, message: impl Into<String>, help: impl Into<String>) -> PatternError {
    PatternError { span, message: message.into(), help: help.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Pattern {
        Pattern::parse(text).unwrap_or_else(|error| panic!("{text}: {error:?}"))
    }

    #[test]
    fn equivalent_patterns_are_equal() {
        for (one, other) in
            [("/a/b", "/a/b/"), ("/users/{id}", "/users/{name}"), ("/log%69n", "/login"), ("/*", "/*"), ("/", "/")]
        {
            assert_eq!(pattern(one), pattern(other), "{one} {other}");
        }
        assert_ne!(pattern("/a"), pattern("/a/*"));
        assert_eq!(pattern("/").segments, []);
    }

    #[test]
    fn error_says_where_the_problem_is_and_what_to_write() {
        for (text, span, help) in [
            ("shorten", 0..7, "write `/shorten`"),
            ("", 0..0, "write `/*`"),
            ("*", 0..1, "write `/*`"),
            ("/a?x=1", 2..6, "only the path"),
            ("/a//b", 3..3, "one /"),
            ("/a/../b", 3..5, "without dot segments"),
            ("/a*/b", 1..3, "`/api/*`"),
            ("/a/*/b", 3..4, "`/api/*`"),
            ("/a*", 1..3, "`/api/*`"),
            ("/a/**", 3..5, "a single `*`"),
            ("/v{n}/x", 1..5, "`/{id}/`"),
            ("/{}", 1..3, "`{id}`"),
            ("/{*rest}", 1..8, "write `*`"),
            ("/users/:id", 7..10, "not `:id`"),
            ("/a%2Fb", 1..6, "`{id}`"),
        ] {
            let error = Pattern::parse(text).expect_err(text);
            assert_eq!(error.span, span, "{text}: {error:?}");
            assert!(error.help.contains(help), "{text}: {error:?}");
        }
    }

    #[test]
    fn pattern_covers_narrower_patterns() {
        for (wide, narrow, expected) in [
            ("/*", "/a/b", true),
            ("/a/*", "/a", true),
            ("/a/*", "/a/b/*", true),
            ("/a/b/*", "/a/*", false),
            ("/a", "/a/*", false),
            ("/users/{id}", "/users/me", true),
            ("/users/me", "/users/{id}", false),
            ("/{x}/*", "/a/b/c", true),
            ("/{x}", "/a/b", false),
        ] {
            assert_eq!(pattern(wide).covers(&pattern(narrow)), expected, "{wide} over {narrow}");
        }
    }

    #[test]
    fn intersection_matches_what_both_patterns_match() {
        for (one, other, expected) in [
            ("/{x}/b", "/a/{y}", Some("/a/b")),
            ("/*", "/a/{y}", Some("/a/{y}")),
            ("/a/*", "/{x}/b/*", Some("/a/b/*")),
            ("/a/*", "/a", Some("/a")),
            ("/a/*", "/b/*", None),
            ("/a", "/a/b", None),
            ("/a/b", "/{x}", None),
        ] {
            let expected = expected.map(pattern);
            assert_eq!(pattern(one).intersection(&pattern(other)), expected, "{one} {other}");
            assert_eq!(pattern(other).intersection(&pattern(one)), expected, "{other} {one}");
        }
    }
}
