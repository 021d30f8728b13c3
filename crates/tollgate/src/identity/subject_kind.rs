//! Whom a limit counts: the words of `by = [...]`.

use std::fmt;
use std::str::FromStr;

use http::HeaderName;
use smallvec::{SmallVec, smallvec};

use super::suggest;

/// More kinds than this in one subject are refused.
const KINDS_MAX: usize = 8;
/// A longer text is refused unread.
const TEXT_BYTES_MAX: usize = 256;

/// By what a request is counted.
///
/// ```
/// use tollgate::identity::Subject;
///
/// let kind: Subject = "header:X-Tenant".parse()?;
/// assert_eq!(kind.to_string(), "header:x-tenant");
/// let error = "api-key".parse::<Subject>().unwrap_err();
/// assert!(error.to_string().contains("did you mean api_key?"));
/// # Ok::<(), tollgate::identity::SubjectError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Subject {
    /// The known API key, else the verified user, else the address.
    Caller,
    /// The client's address.
    Ip,
    /// The known API key.
    ApiKey,
    /// The verified user.
    User,
    /// What the request says in a header. The client chooses it, unless a proxy sets it: where proxies are trusted, only they are
    /// believed, and who comes by another way is counted by address.
    Header(HeaderName),
    /// What the request says in a cookie. The client chooses it.
    Cookie(String),
    /// The path of the request.
    Path,
    /// Everybody together.
    Global,
}

/// A text that names no [`Subject`], or a list of them that makes no sense.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem}; accepted are caller, ip, api_key, user, header:NAME, cookie:NAME, path, global")]
pub struct SubjectError {
    problem: String,
}

impl Subject {
    /// Whether the client can choose the value freely, so that a rule by this alone holds nobody.
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
                "a kind of subject has at most {TEXT_BYTES_MAX} bytes, this one has {}",
                text.len()
            )));
        }
        match text.split_once(':') {
            None => parse_word(text),
            Some(("header", name)) => HeaderName::from_str(name)
                .map(Subject::Header)
                .map_err(|_| error(format!("expected a header's name after header:, found {name:?}"))),
            Some(("cookie", name)) if is_cookie_name(name) => Ok(Subject::Cookie(name.to_owned())),
            Some(("cookie", name)) => Err(error(format!("expected a cookie's name after cookie:, found {name:?}"))),
            Some((word, name)) => Err(error(match suggest::nearest(word, ["header", "cookie"]) {
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
            return Err(error(match suggest::nearest(word, words) {
                Some(meant) => format!("unknown kind of subject {word:?}; did you mean {meant}?"),
                None => format!("unknown kind of subject {word:?}"),
            }));
        }
    })
}

fn error(problem: String) -> SubjectError {
    SubjectError { problem }
}

/// A token of RFC 9110, which is what RFC 6265 allows as a cookie's name.
fn is_cookie_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

/// By what a request is counted: one kind, or several at once.
///
/// ```
/// use tollgate::identity::Subjects;
///
/// let login = Subjects::parse(["ip", "user", "cookie:device"])?;
/// assert_eq!(login.iter().count(), 3);
/// assert!(Subjects::parse([]).is_err());
/// # Ok::<(), tollgate::identity::SubjectError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Subjects(SmallVec<[Subject; 1]>);

impl Subjects {
    /// Counts by all of these at once: two requests share a counter only if all of them agree.
    ///
    /// # Errors
    /// When there are none or too many, one stands there twice, or `global` stands beside others.
    pub fn new(kinds: Vec<Subject>) -> Result<Subjects, SubjectError> {
        if kinds.is_empty() {
            return Err(error("expected at least one kind of subject".to_owned()));
        }
        if kinds.len() > KINDS_MAX {
            return Err(error(format!("a subject has at most {KINDS_MAX} kinds, this one has {}", kinds.len())));
        }
        for (at, kind) in kinds.iter().enumerate() {
            if kinds[..at].contains(kind) {
                return Err(error(format!("{kind} stands there twice")));
            }
        }
        if kinds.len() > 1 && kinds.contains(&Subject::Global) {
            return Err(error("global is everybody together and stands alone".to_owned()));
        }
        Ok(Subjects(kinds.into_iter().collect()))
    }

    /// The kinds with these texts.
    ///
    /// # Errors
    /// As [`Subjects::new`], or when a text names no kind.
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Subjects, SubjectError> {
        Subjects::new(texts.into_iter().map(str::parse).collect::<Result<_, _>>()?)
    }

    /// The kinds, in the order given.
    pub fn iter(&self) -> impl Iterator<Item = &Subject> {
        self.0.iter()
    }

    /// Whether the client can choose every part freely, so that it is held by nothing.
    pub fn is_chosen_by_client(&self) -> bool {
        self.0.iter().all(Subject::is_chosen_by_client)
    }
}

impl Default for Subjects {
    /// `caller`.
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
    fn a_slip_is_told_what_was_meant() {
        for (text, said) in [
            ("Caller", "did you mean caller?"),
            ("api-key", "did you mean api_key?"),
            ("apikey", "did you mean api_key?"),
            ("usr", "did you mean user?"),
            ("haeder:x-tenant", "did you mean header:x-tenant?"),
            ("headers:x-tenant", "did you mean header:x-tenant?"),
            ("header", "header:NAME"),
            ("cookie", "cookie:NAME"),
            ("header:", "a header's name"),
            ("header:x tenant", "a header's name"),
            ("cookie:", "a cookie's name"),
            ("cookie:a=b", "a cookie's name"),
            ("ip:v6", "only header and cookie take a name"),
            ("tenant", "unknown kind of subject \"tenant\""),
            ("", "unknown kind of subject \"\""),
        ] {
            let message = text.parse::<Subject>().unwrap_err().to_string();
            assert!(message.contains(said), "{text:?}: {message}");
            assert!(message.contains("accepted are caller, ip"), "{message}");
        }
        let message = "x".repeat(10_000).parse::<Subject>().unwrap_err().to_string();
        assert!(message.len() < 200, "{message}");
    }

    #[test]
    fn a_list_that_makes_no_sense_is_refused() {
        for (texts, said) in [
            (&[][..], "at least one"),
            (&["ip", "ip"], "ip stands there twice"),
            (&["header:X-A", "header:x-a"], "header:x-a stands there twice"),
            (&["global", "ip"], "stands alone"),
            (
                &["header:a", "header:b", "header:c", "header:d", "header:e", "header:f", "header:g", "header:h", "ip"],
                "at most 8",
            ),
        ] {
            let message = Subjects::parse(texts.iter().copied()).unwrap_err().to_string();
            assert!(message.contains(said), "{texts:?}: {message}");
        }
    }

    #[test]
    fn kinds_that_a_client_chooses_are_told_apart() {
        let is_chosen = |texts: &[&str]| Subjects::parse(texts.iter().copied()).unwrap().is_chosen_by_client();
        assert!(is_chosen(&["header:x-tenant"]) && is_chosen(&["cookie:device", "path"]));
        assert!(!is_chosen(&["cookie:device", "ip"]) && !is_chosen(&["caller"]) && !is_chosen(&["global"]));
    }
}
