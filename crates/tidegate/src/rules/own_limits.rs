//! The limits that an API key has instead of those of its plan, as a key source sets them at run time.

use std::fmt;
use std::sync::Arc;

use tidegate_core::Limit;

use super::builder::LimitText;
use crate::config::{is_limit_name, limit_names};

/// The limits of one API key, which replace those of its plan. There is at least one, unless it is the default value.
///
/// The keys of a configuration have them too; these are for keys that a lookup finds
/// ([`KnownKey::limits`](crate::identity::KnownKey::limits)). Clones share the limits. Displayed as their texts,
/// separated by commas.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct OwnLimits(Arc<[OwnLimit]>);

/// One limit of a key, and its name in counters and headers.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct OwnLimit {
    name: Box<str>,
    /// Whether the name was given, and not derived from the window.
    is_named: bool,
    limit: Limit,
}

/// The error for limits that an API key cannot have.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct OwnLimitsError(pub(crate) String);

impl Default for OwnLimits {
    fn default() -> Self {
        OwnLimits(Arc::new([]))
    }
}

impl OwnLimits {
    /// The maximum number of limits of a key.
    pub const MAX: usize = 8;

    /// Creates the limits from their texts, such as `["100/min", "5000/day"]`.
    ///
    /// Each is named after its window, such as `per-minute`, or `per-minute-2` if that name is taken.
    ///
    /// # Errors
    /// If there is none, there are more than [`MAX`](OwnLimits::MAX), or a text is not a limit.
    pub fn parse<L: Into<LimitText>>(texts: impl IntoIterator<Item = L>) -> Result<OwnLimits, OwnLimitsError> {
        let mut limits = OwnLimits::default();
        for text in texts {
            limits = limits.with(None, &text.into())?;
        }
        if limits.0.is_empty() {
            Err(OwnLimitsError("expected at least one limit, such as 100/min".to_owned()))
        } else {
            Ok(limits)
        }
    }

    /// Reads the limits from JSON, in the forms of a keys file: a text or an object, or a list of them.
    ///
    /// ```
    /// use tidegate::rules::OwnLimits;
    ///
    /// let json = r#"["100/min", { "name": "burst", "quota": 10, "window": "1s" }]"#;
    /// assert_eq!(OwnLimits::from_json(json)?.to_string(), "100/min, 10/s");
    /// # Ok::<(), tidegate::rules::OwnLimitsError>(())
    /// ```
    ///
    /// # Errors
    /// If a keys file with these limits would have an error, or there are more than [`MAX`](OwnLimits::MAX).
    #[cfg(feature = "redis")]
    pub fn from_json(json: &str) -> Result<OwnLimits, OwnLimitsError> {
        let json = serde_json::from_str(json).map_err(|_| OwnLimitsError("expected JSON".to_owned()))?;
        crate::config::limits_from_json(&json)
    }

    /// Returns the limits with one more, which is named after its window if `name` is `None`.
    ///
    /// # Errors
    /// If the text is not a limit, the name is invalid or taken, or there are too many limits.
    pub(crate) fn with(&self, name: Option<String>, text: &LimitText) -> Result<OwnLimits, OwnLimitsError> {
        let limit: Limit =
            text.0.parse().map_err(|error| OwnLimitsError(format!("the limit `{}` is invalid: {error}", text.0)))?;
        let given = self.0.iter().map(|own| (own.is_named.then(|| own.name.to_string()), own.limit));
        OwnLimits::named(given.chain([(name, limit)]).collect())
    }

    /// Creates the limits. Those without a name are named after their windows.
    ///
    /// # Errors
    /// If a name is invalid or taken, or there are too many limits.
    pub(crate) fn named(limits: Vec<(Option<String>, Limit)>) -> Result<OwnLimits, OwnLimitsError> {
        if limits.len() > OwnLimits::MAX {
            return Err(OwnLimitsError(format!("a key can have at most {} limits of its own", OwnLimits::MAX)));
        }
        for (at, (name, _)) in limits.iter().enumerate() {
            let Some(name) = name else { continue };
            if !is_limit_name(name) {
                return Err(OwnLimitsError("the name of a limit must be 1 to 64 of a-z, 0-9 and -".to_owned()));
            }
            if limits[..at].iter().any(|(other, _)| other.as_ref() == Some(name)) {
                return Err(OwnLimitsError(format!("two limits are named `{name}`")));
            }
        }
        let names = limit_names(&limits);
        let own = |((given, limit), name): ((Option<String>, Limit), String)| OwnLimit {
            name: name.into(),
            is_named: given.is_some(),
            limit,
        };
        Ok(OwnLimits(limits.into_iter().zip(names).map(own).collect()))
    }

    /// Iterates over the limits, each with its name, such as `per-minute`.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Limit)> {
        self.0.iter().map(|own| (&*own.name, &own.limit))
    }

    /// Returns whether a limit has this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|own| &*own.name == name)
    }

    /// Returns the limits in the form of a configuration file and of a Redis hash of keys: a text for each limit, or a
    /// table with `name` and `limit` if its name was given.
    #[cfg(feature = "redis")]
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let entry = |own: &OwnLimit| {
            if own.is_named {
                serde_json::json!({ "name": own.name, "limit": own.limit.to_string() })
            } else {
                own.limit.to_string().into()
            }
        };
        self.0.iter().map(entry).collect()
    }
}

impl fmt::Display for OwnLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, own) in self.0.iter().enumerate() {
            write!(f, "{}{}", if at == 0 { "" } else { ", " }, own.limit)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(limits: &OwnLimits) -> Vec<&str> {
        limits.iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn limits_are_named_as_in_a_configuration() {
        let limits = OwnLimits::parse(["10/min", "100/h", "20/min token-bucket"]).unwrap();
        assert_eq!(names(&limits), ["per-minute", "per-hour", "per-minute-2"]);
        assert_eq!(limits.to_string(), "10/min, 100/h, 20/min token-bucket");
        // A name that is given later is not taken by a limit without one.
        let limits = limits.with(Some("per-hour".to_owned()), &"7/s".into()).unwrap();
        assert_eq!(names(&limits), ["per-minute", "per-hour-2", "per-minute-2", "per-hour"]);
    }

    #[test]
    fn limits_that_a_key_cannot_have_are_errors() {
        let error = |texts: &[&str]| OwnLimits::parse(texts.iter().copied()).unwrap_err().to_string();
        assert!(error(&[]).contains("at least one limit"));
        assert!(error(&["10/min", "10/fortnight"]).starts_with("the limit `10/fortnight` is invalid: "));
        assert!(error(&["1/s"; 9]).contains("at most 8"));
        let limits = OwnLimits::parse(["1/s"]).unwrap().with(Some("burst".to_owned()), &"2/s".into()).unwrap();
        for (name, phrase) in [("burst", "two limits are named `burst`"), ("Burst", "a-z, 0-9"), ("", "a-z, 0-9")] {
            let error = limits.with(Some(name.to_owned()), &"3/s".into()).unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
    }
}
