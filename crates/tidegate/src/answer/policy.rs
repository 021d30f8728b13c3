//! A policy: a limit with everything that responses report about it and that is the same for all requests.

use std::fmt;
use std::sync::Arc;

use http::HeaderValue;
use tidegate_config::Styles;
use tidegate_core::Limit;

use super::body::BodyFormat;

/// A limit and how responses report it: its name for clients, its plan, its header styles, the format of its refusals.
///
/// The constant parts of its headers and messages are rendered once, when it is created.
///
/// ```
/// use tidegate::answer::{BodyFormat, Policy, Style, Styles};
///
/// let policy = Policy::new("free-per-day", "10000/day".parse()?)?
///     .with_plan("free")
///     .with_upgrade_url("https://example.com/plans")
///     .with_styles(Styles::new([Style::Ietf])?)
///     .with_format(BodyFormat::Problem);
/// assert_eq!(policy.name(), "free-per-day");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Policy {
    /// The name that clients see.
    name: Box<str>,
    /// The name of the limit within its rule, which is part of the counter's key.
    limit_name: Box<str>,
    rule: Option<Arc<str>>,
    limit: Limit,
    plan: Option<Box<str>>,
    upgrade_url: Option<Box<str>>,
    styles: Styles,
    format: BodyFormat,
    pub(super) rendered: Rendered,
}

/// The parts of a policy's headers and messages that are the same for all requests.
#[derive(Clone)]
pub(super) struct Rendered {
    /// `100`
    pub(super) quota: HeaderValue,
    /// `"per-minute";q=100;w=60`, without `w` if the window is not a whole number of seconds.
    pub(super) ietf_policy: Box<str>,
    /// `"per-minute";r=`, to be followed by the remaining units.
    pub(super) ietf_open: Box<str>,
    /// `100;w=60`. `None` if the window is not a whole number of seconds, since this style requires `w`.
    pub(super) draft_6_policy: Option<Box<str>>,
    /// `100 per minute`
    pub(super) in_words: Box<str>,
}

/// The error for a policy name that is empty, or has characters other than `a-z`, `0-9` and `-`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("invalid policy name {found:?}: expected one or more of a-z, 0-9 and -, for example per-minute")]
pub struct PolicyNameError {
    /// The rejected name.
    pub found: String,
}

/// The error for the name of a rule that is empty, has more than 64 bytes, or has characters other than letters, digits
/// and `-`, `_` and `.`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("invalid rule name {found:?}: expected 1 to 64 letters, digits or - _ . characters, for example api")]
pub struct RuleNameError {
    /// The rejected name.
    pub found: String,
}

/// Returns whether a rule or a plan may have this name: 1 to 64 ASCII letters, digits or `-`, `_` and `.`.
///
/// None of these characters is escaped in a header, in JSON or in a key.
pub(crate) fn is_rule_name(name: &str) -> bool {
    let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(is_name_byte)
}

impl Policy {
    /// Creates a policy with a name that clients see in headers and in the bodies of refusals.
    ///
    /// # Errors
    /// If the name does not match `[a-z0-9-]+`.
    pub fn new(name: &str, limit: Limit) -> Result<Policy, PolicyNameError> {
        let accepted = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        if name.is_empty() || !name.bytes().all(accepted) {
            return Err(PolicyNameError { found: name.to_owned() });
        }
        Ok(Policy::named(name, limit))
    }

    /// Creates a policy named after its limit's window: `per-minute`, `per-10-seconds`, `per-500-ms`.
    pub fn of(limit: Limit) -> Policy {
        Policy::named(&Period(limit.window_us()).to_string().replace(' ', "-"), limit)
    }

    fn named(name: &str, limit: Limit) -> Policy {
        Policy {
            name: name.into(),
            limit_name: name.into(),
            rule: None,
            limit,
            plan: None,
            upgrade_url: None,
            styles: Styles::default(),
            format: BodyFormat::default(),
            rendered: Rendered::new(name, &limit),
        }
    }

    /// Sets the name of the rule that the limit belongs to. Defaults to none.
    ///
    /// It appears in the bodies of refusals, and as a prefix of the policy's name in headers if another policy of the
    /// check has the same name.
    ///
    /// # Errors
    /// If the name is not that of a rule in a configuration: 1 to 64 letters, digits or `-`, `_` and `.`.
    pub fn with_rule(self, rule: impl Into<Arc<str>>) -> Result<Policy, RuleNameError> {
        let rule = rule.into();
        if is_rule_name(&rule) {
            Ok(Policy { rule: Some(rule), ..self })
        } else {
            Err(RuleNameError { found: rule.as_ref().into() })
        }
    }

    /// Sets the name of the plan that the limit belongs to. It appears in the bodies of refusals. Defaults to none.
    #[must_use]
    pub fn with_plan(self, plan: impl Into<Box<str>>) -> Policy {
        Policy { plan: Some(plan.into()), ..self }
    }

    /// Sets the URL where a client can upgrade its plan. It appears in the bodies of refusals. Defaults to none.
    #[must_use]
    pub fn with_upgrade_url(self, url: impl Into<Box<str>>) -> Policy {
        Policy { upgrade_url: Some(url.into()), ..self }
    }

    /// Sets the styles of the headers that show the limit. Defaults to `x` and `ietf`.
    #[must_use]
    pub fn with_styles(self, styles: Styles) -> Policy {
        Policy { styles, ..self }
    }

    /// Sets the format of the body of a response if this limit denies the request. Defaults to [`BodyFormat::Json`].
    ///
    /// The first policy of a check also determines the body if the store does not answer
    /// ([`Policies::unavailable`](super::Policies::unavailable)).
    #[must_use]
    pub fn with_format(self, format: BodyFormat) -> Policy {
        Policy { format, ..self }
    }

    /// Returns a policy for another limit, whose name is that of the limit within its rule. Everything else is as in this
    /// policy.
    ///
    /// The name must match `[a-z0-9-]+`.
    pub(crate) fn with_limit(&self, name: &str, limit: Limit) -> Policy {
        let Policy { rule, plan, upgrade_url, styles, format, .. } = self.clone();
        Policy { rule, plan, upgrade_url, styles, format, ..Policy::named(name, limit) }
    }

    /// Returns a copy with another name for clients. The name must not contain characters that a header has to escape.
    pub(super) fn renamed(&self, name: &str) -> Policy {
        Policy { name: name.into(), rendered: Rendered::new(name, &self.limit), ..self.clone() }
    }

    /// Returns a copy whose name for clients is qualified by its rule: `search.per-minute`. Without a rule, the name
    /// stays.
    ///
    /// A limit's own name has no dot, so limits of different rules never have the same qualified name.
    pub(crate) fn qualified(&self) -> Policy {
        match &self.rule {
            Some(rule) => self.renamed(&format!("{rule}.{}", self.limit_name)),
            None => self.clone(),
        }
    }

    /// Returns the name of the policy in headers, bodies, explanations and counters.
    ///
    /// It is the name of the limit (`per-minute`). If another rule that may apply to the same requests has a limit of
    /// this name, it is the names of the rule and the limit (`search.per-minute`).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name of the limit within its rule, without the name of the rule.
    ///
    /// It is part of the key of the rule's counter: see [`Scope::Rule`](tidegate_core::Scope::Rule).
    pub fn limit_name(&self) -> &str {
        &self.limit_name
    }

    /// Returns the name of the rule that the limit belongs to, or `None` if none was set.
    pub fn rule(&self) -> Option<&str> {
        self.rule.as_deref()
    }

    /// Returns the limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// Returns the name of the plan that the limit belongs to, or `None` if none was set.
    pub fn plan(&self) -> Option<&str> {
        self.plan.as_deref()
    }

    /// Returns the URL where a client can upgrade its plan, or `None` if none was set.
    pub fn upgrade_url(&self) -> Option<&str> {
        self.upgrade_url.as_deref()
    }

    /// Returns the styles of the headers that show the limit.
    pub fn styles(&self) -> Styles {
        self.styles
    }

    /// Returns the format of the body of a response if this limit denies the request; see
    /// [`with_format`](Policy::with_format).
    pub fn format(&self) -> &BodyFormat {
        &self.format
    }

    /// Returns the quota and the window in English, for messages: `60 per minute`, `600 per 10 seconds`.
    pub(super) fn in_words(&self) -> &str {
        &self.rendered.in_words
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy")
            .field("name", &self.name)
            .field("rule", &self.rule)
            .field("limit", &format_args!("{}", self.limit))
            .field("plan", &self.plan)
            .field("upgrade_url", &self.upgrade_url)
            .field("styles", &self.styles)
            .field("format", &self.format)
            .finish()
    }
}

impl Rendered {
    fn new(name: &str, limit: &Limit) -> Rendered {
        let quota = limit.quota();
        let window_secs = limit.window_us().is_multiple_of(1_000_000).then_some(limit.window_us() / 1_000_000);
        let window = window_secs.map(|secs| format!(";w={secs}"));
        Rendered {
            quota: HeaderValue::from(quota),
            ietf_policy: format!("\"{name}\";q={quota}{}", window.as_deref().unwrap_or_default()).into(),
            ietf_open: format!("\"{name}\";r=").into(),
            draft_6_policy: window.map(|window| format!("{quota}{window}").into()),
            in_words: format!("{quota} {}", Period(limit.window_us())).into(),
        }
    }
}

/// A window in microseconds. Displayed in the largest unit that divides it: `per minute`, `per 10 seconds`, `per 500
/// ms`.
struct Period(u64);

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str, &str); 7] = [
            (604_800_000_000, "week", "weeks"),
            (86_400_000_000, "day", "days"),
            (3_600_000_000, "hour", "hours"),
            (60_000_000, "minute", "minutes"),
            (1_000_000, "second", "seconds"),
            (1_000, "ms", "ms"),
            (1, "us", "us"),
        ];
        let fits = |(unit_us, ..): &(u64, &str, &str)| self.0.is_multiple_of(*unit_us);
        let (unit_us, one, many) = UNITS.into_iter().find(fits).unwrap_or((1, "us", "us"));
        match self.0 / unit_us {
            1 => write!(f, "per {one}"),
            count => write!(f, "per {count} {many}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(text: &str) -> Limit {
        text.parse().unwrap()
    }

    #[test]
    fn names_that_would_need_escaping_are_rejected_with_what_is_accepted() {
        for name in ["", "Per-Minute", "per_minute", "a b", "a\"b", "a\\b", "a\n", "é", "per-minute;q=9", "\0"] {
            let error = Policy::new(name, limit("1/s")).unwrap_err();
            assert_eq!(error.found, name);
            assert!(error.to_string().contains("a-z, 0-9 and -"), "{error}");
        }
        for name in ["a", "-", "0", "per-minute", "x-2"] {
            assert_eq!(Policy::new(name, limit("1/s")).unwrap().name(), name);
        }
    }

    #[test]
    fn rule_names_that_would_need_escaping_are_rejected_with_what_is_accepted() {
        let long = "a".repeat(65);
        for name in ["", "two words", "a\"b", "a\\b", "a\n", "é", "\0", &long] {
            let error = Policy::of(limit("1/s")).with_rule(name).unwrap_err();
            assert_eq!(error.found, name);
            assert!(error.to_string().contains("1 to 64 letters"), "{error}");
        }
        for name in ["a", "API_v2.search-1", &long[1..]] {
            assert_eq!(Policy::of(limit("1/s")).with_rule(name).unwrap().rule(), Some(name));
        }
    }

    #[test]
    fn a_policy_is_named_after_its_window() {
        for (text, name, words) in [
            ("60/min", "per-minute", "60 per minute"),
            ("10000/day", "per-day", "10000 per day"),
            ("5/7day", "per-week", "5 per week"),
            ("600/10s", "per-10-seconds", "600 per 10 seconds"),
            ("250/500ms", "per-500-ms", "250 per 500 ms"),
            ("3/1500us", "per-1500-us", "3 per 1500 us"),
            ("7/90s", "per-90-seconds", "7 per 90 seconds"),
        ] {
            let policy = Policy::of(limit(text));
            assert_eq!((policy.name(), policy.in_words()), (name, words));
            assert!(Policy::new(policy.name(), limit(text)).is_ok());
        }
    }

    #[test]
    fn the_window_is_shown_in_whole_seconds_or_not_at_all() {
        let rendered = |text: &str| Policy::new("p", limit(text)).unwrap().rendered;
        assert_eq!(&*rendered("10/90s").ietf_policy, r#""p";q=10;w=90"#);
        for text in ["10/500ms", "10/1500ms", "10/1000001us"] {
            assert_eq!(&*rendered(text).ietf_policy, r#""p";q=10"#, "{text}");
            assert_eq!(rendered(text).draft_6_policy, None, "{text}");
        }
    }
}
