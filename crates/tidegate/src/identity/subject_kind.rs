//! Kinds of subjects: the values of `by = [...]`.

use std::fmt;
use std::str::FromStr;

use http::HeaderName;
use smallvec::{SmallVec, smallvec};
use tidegate_config::nearest;

/// Maximum number of kinds in one subject.
const KINDS_MAX: usize = 8;
/// Maximum length of the text of one kind.
const TEXT_BYTES_MAX: usize = 256;

/// A kind of subject: a property of a request by which it is counted, such as `ip`. An entry of `by = [...]` in rules.
///
/// ```
/// use tidegate::identity::Subject;
///
/// let kind: Subject = "header:X-Tenant".parse()?;
/// assert_eq!(kind.to_string(), "header:x-tenant");
/// let error = "api-key".parse::<Subject>().unwrap_err();
/// assert!(error.to_string().contains("did you mean api_key?"));
/// # Ok::<(), tidegate::identity::SubjectError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Subject {
    /// The caller that the application has set, else the known API key, the verified user or the client's address.
    Caller,
    /// The client's address, truncated to the counted network.
    Ip,
    /// The known API key. Without one, the request is counted by address.
    ApiKey,
    /// The verified user. Without one, the request is counted by address.
    User,
    /// The value of a header, which clients can choose unless a proxy sets it.
    ///
    /// If trusted proxies are configured, only their requests are counted by it, all others by address. A request
    /// without the header is counted by address too.
    Header(HeaderName),
    /// The value of a cookie, which clients can choose. Without it, the request is counted by address.
    Cookie(String),
    /// The canonical path of the request. If it is ambiguous, the request is counted by address.
    Path,
    /// All requests together, in one counter.
    Global,
}

/// The error for a text that is not a [`Subject`], or for an invalid list of them.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem} (valid kinds: caller, ip, api_key, user, header:NAME, cookie:NAME, path, global)")]
pub struct SubjectError {
    problem: String,
}

impl Subject {
    /// Returns whether the client can choose the value freely, so that a rule by this kind alone limits no client:
    /// headers, cookies and paths.
    ///
    /// `true` for every header, even for one that a trusted proxy sets.
    pub const fn is_chosen_by_client(&self) -> bool {
        matches!(self, Subject::Header(_) | Subject::Cookie(_) | Subject::Path)
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Subject::Caller => f.write_str("caller"),
            Subject::Ip => f.write_str("ip"),
            Subject::ApiKey => f.write_str("api_key"),
            Subject::User => f.write_str("user"),
            Subject::Header(name) => write!(f, "header:{name}"),
            Subject::Cookie(name) => write!(f, "cookie:{name}"),
            Subject::Path => f.write_str("path"),
            Subject::Global => f.write_str("global"),
        }
    }
}

impl FromStr for Subject {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Subject, SubjectError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(error(format!(
                "a kind of subject can have at most {TEXT_BYTES_MAX} bytes; this one has {}",
                text.len()
            )));
        }
        match text.split_once(':') {
            None => parse_word(text),
            Some(("header", name)) => HeaderName::from_str(name)
                .map(Subject::Header)
                .map_err(|_| error(format!("expected a header name after header:, found {name:?}"))),
            Some(("cookie", name)) if is_cookie_name(name) => Ok(Subject::Cookie(name.to_owned())),
            Some(("cookie", name)) => Err(error(format!("expected a cookie name after cookie:, found {name:?}"))),
            Some((word, name)) => Err(error(match nearest(word, ["header", "cookie"]) {
                Some(meant) => format!("unknown kind of subject {text:?}; did you mean {meant}:{name}?"),
                None => format!("unknown kind of subject {text:?}; only header and cookie take a name"),
            })),
        }
    }
}

fn parse_word(word: &str) -> Result<Subject, SubjectError> {
    Ok(match word {
        "caller" => Subject::Caller,
        "ip" => Subject::Ip,
        "api_key" => Subject::ApiKey,
        "user" => Subject::User,
        "path" => Subject::Path,
        "global" => Subject::Global,
        "header" | "cookie" => return Err(error(format!("expected a name: {word}:NAME"))),
        _ => {
            let words = ["caller", "ip", "api_key", "user", "header:NAME", "cookie:NAME", "path", "global"];
            return Err(error(match nearest(word, words) {
                Some(meant) => format!("unknown kind of subject {word:?}; did you mean {meant}?"),
                None => format!("unknown kind of subject {word:?}"),
            }));
        }
    })
}

fn error(problem: String) -> SubjectError {
    SubjectError { problem }
}

/// Returns whether `name` is a token of RFC 9110, as RFC 6265 requires of a cookie name.
fn is_cookie_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

/// The kinds of subject by which a rule counts requests: one kind, or a combination. Defaults to `caller`.
///
/// ```
/// use tidegate::identity::Subjects;
///
/// let login = Subjects::parse(["ip", "user", "cookie:device"])?;
/// assert_eq!(login.iter().count(), 3);
/// assert!(Subjects::parse([]).is_err());
/// # Ok::<(), tidegate::identity::SubjectError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Subjects(SmallVec<[Subject; 1]>);

impl Subjects {
    /// Creates a combination of kinds. Two requests share a counter only if all of their values are equal.
    ///
    /// # Errors
    /// Fails if there are no kinds or more than 8, if one is listed twice, or if `global` is combined with others.
    pub fn new(kinds: Vec<Subject>) -> Result<Subjects, SubjectError> {
        if kinds.is_empty() {
            return Err(error("expected at least one kind of subject".to_owned()));
        }
        if kinds.len() > KINDS_MAX {
            return Err(error(format!("a subject can have at most {KINDS_MAX} kinds; this one has {}", kinds.len())));
        }
        for (at, kind) in kinds.iter().enumerate() {
            if kinds[..at].contains(kind) {
                return Err(error(format!("{kind} is listed twice")));
            }
        }
        if kinds.len() > 1 && kinds.contains(&Subject::Global) {
            return Err(error("global cannot be combined with other kinds of subject".to_owned()));
        }
        Ok(Subjects(kinds.into_iter().collect()))
    }

    /// Parses the kinds in these texts, such as `["ip", "header:x-tenant"]`.
    ///
    /// # Errors
    /// Fails if a text is not a kind, and where [`Subjects::new`] fails.
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Subjects, SubjectError> {
        Subjects::new(texts.into_iter().map(str::parse).collect::<Result<_, _>>()?)
    }

    /// Returns the kinds in the order given.
    pub fn iter(&self) -> impl Iterator<Item = &Subject> {
        self.0.iter()
    }

    /// Returns whether the client can choose the values of all kinds freely, so that a rule by these kinds limits no
    /// client: all of them are headers, cookies or paths.
    ///
    /// Every header counts, even one that a trusted proxy sets.
    pub fn is_chosen_by_client(&self) -> bool {
        self.0.iter().all(Subject::is_chosen_by_client)
    }

    /// Returns whether the values identify a caller, alone or together with others: one of the kinds is the caller, its
    /// address, API key or user.
    pub(crate) fn identify_caller(&self) -> bool {
        let identifies = |kind: &Subject| match kind {
            Subject::Caller | Subject::Ip | Subject::ApiKey | Subject::User => true,
            Subject::Header(_) | Subject::Cookie(_) | Subject::Path | Subject::Global => false,
        };
        self.0.iter().any(identifies)
    }
}

impl Default for Subjects {
    /// Returns the kind `caller` alone.
    fn default() -> Self {
        Subjects(smallvec![Subject::Caller])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_printed_as_it_is_read() {
        for text in
            ["caller", "ip", "api_key", "user", "header:x-tenant", "cookie:device", "cookie:A.b", "path", "global"]
        {
            assert_eq!(text.parse::<Subject>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn error_suggests_the_nearest_kind() {
        for (text, expected) in [
            ("Caller", "did you mean caller?"),
            ("api-key", "did you mean api_key?"),
            ("apikey", "did you mean api_key?"),
            ("usr", "did you mean user?"),
            ("haeder:x-tenant", "did you mean header:x-tenant?"),
            ("headers:x-tenant", "did you mean header:x-tenant?"),
            ("header", "header:NAME"),
            ("cookie", "cookie:NAME"),
            ("header:", "a header name"),
            ("header:x tenant", "a header name"),
            ("cookie:", "a cookie name"),
            ("cookie:a=b", "a cookie name"),
            ("ip:v6", "only header and cookie take a name"),
            ("tenant", "unknown kind of subject \"tenant\""),
            ("", "unknown kind of subject \"\""),
        ] {
            let message = text.parse::<Subject>().unwrap_err().to_string();
            assert!(message.contains(expected), "{text:?}: {message}");
            assert!(message.contains("valid kinds: caller, ip"), "{message}");
        }
        let message = "x".repeat(10_000).parse::<Subject>().unwrap_err().to_string();
        assert!(message.len() < 200, "{message}");
    }

    #[test]
    fn invalid_list_of_kinds_is_refused() {
        for (texts, expected) in [
            (&[][..], "at least one"),
            (&["ip", "ip"], "ip is listed twice"),
            (&["header:X-A", "header:x-a"], "header:x-a is listed twice"),
            (&["global", "ip"], "cannot be combined"),
            (
                &["header:a", "header:b", "header:c", "header:d", "header:e", "header:f", "header:g", "header:h", "ip"],
                "at most 8",
            ),
        ] {
            let message = Subjects::parse(texts.iter().copied()).unwrap_err().to_string();
            assert!(message.contains(expected), "{texts:?}: {message}");
        }
    }

    #[test]
    fn kinds_that_a_client_can_choose_are_recognised() {
        let is_chosen = |texts: &[&str]| Subjects::parse(texts.iter().copied()).unwrap().is_chosen_by_client();
        assert!(is_chosen(&["header:x-tenant"]) && is_chosen(&["cookie:device", "path"]));
        assert!(!is_chosen(&["cookie:device", "ip"]) && !is_chosen(&["caller"]) && !is_chosen(&["global"]));
        let identify = |texts: &[&str]| Subjects::parse(texts.iter().copied()).unwrap().identify_caller();
        assert!(identify(&["cookie:device", "ip"]) && identify(&["caller"]) && identify(&["user"]));
        assert!(!identify(&["global"]) && !identify(&["header:x-tenant", "path"]) && !identify(&["cookie:device"]));
    }
}
