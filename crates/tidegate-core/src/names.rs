//! Enums whose variants have names, which configuration, metrics, logs and replies use.

/// The error for a text that is not a name of an enum's variant.
///
/// ```
/// use tidegate_core::Algorithm;
///
/// assert_eq!("sliding".parse(), Ok(Algorithm::Sliding));
/// let error = "sliding_log".parse::<Algorithm>().unwrap_err();
/// assert!(error.to_string().starts_with("unknown algorithm \"sliding_log\"; expected one of sliding, sliding-log, "));
/// ```
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown {what} {found:?}; expected one of {}", .accepted.join(", "))]
pub struct NameError {
    what: &'static str,
    /// At most [`FOUND_CHARS_MAX`] characters of the text.
    found: String,
    accepted: &'static [&'static str],
}

/// The most characters of a text that an error repeats.
const FOUND_CHARS_MAX: usize = 64;

impl NameError {
    #[doc(hidden)]
    pub fn new(what: &'static str, found: &str, accepted: &'static [&'static str]) -> NameError {
        NameError { what, found: found.chars().take(FOUND_CHARS_MAX).collect(), accepted }
    }
}

/// Gives each variant of an enum a name: `as_str`, `Display` and `FromStr`.
#[doc(hidden)]
#[macro_export]
macro_rules! __names {
    ($what:literal $type:ident { $($variant:ident = $name:literal,)* }) => {
        impl $type {
            #[doc(hidden)] // for the crates that read configuration files
            pub const NAMES: &'static [(&'static str, $type)] = &[$(($name, $type::$variant)),*];

            #[doc = concat!("Returns the name of the ", $what, ", which [`FromStr`](std::str::FromStr) accepts.")]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $($type::$variant => $name,)*
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::NameError;

            fn from_str(text: &str) -> Result<$type, $crate::NameError> {
                match text {
                    $($name => Ok($type::$variant),)*
                    _ => Err($crate::NameError::new($what, text, &[$($name),*])),
                }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use crate::{Algorithm, Source, StoreErrorKind};

    #[test]
    fn every_name_is_parsed_back() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        for name in ["store", "deny_cache", "local", "none"] {
            assert_eq!(name.parse::<Source>().unwrap().as_str(), name);
        }
        assert_eq!("timed_out".parse(), Ok(StoreErrorKind::TimedOut));
    }

    #[test]
    fn unknown_name_is_an_error_of_bounded_length_that_lists_the_accepted_names() {
        for text in ["", "Store", "store ", &"x".repeat(10_000)] {
            let message = text.parse::<Source>().unwrap_err().to_string();
            assert!(message.starts_with("unknown source \"") && message.len() < 200, "{message}");
            assert!(message.ends_with("; expected one of store, deny_cache, local, none"), "{message}");
        }
    }
}
