//! Styles of rate-limit headers.
//!
//! | style | headers | shows |
//! |---|---|---|
//! | `x` | `X-RateLimit-Limit`, `-Remaining`, `-Reset` (Unix seconds) | the most restrictive limit |
//! | `ietf` | `RateLimit-Policy`, `RateLimit` (structured fields) | every limit, by name |
//! | `draft-6` | `RateLimit-Limit`, `-Remaining`, `-Reset` (seconds from now), `RateLimit-Policy` | the most restrictive limit, every policy |
//!
//! `ietf` follows draft-ietf-httpapi-ratelimit-headers-11, `draft-6` the sixth version of it, which many clients still
//! read. Both define `RateLimit-Policy`, in different forms, so a response can use only one of them. [`Styles`] cannot
//! hold both.

use crate::values::Style;

/// The error for header styles that cannot be combined: `ietf` and `draft-6`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StyleError {
    /// Both `ietf` and `draft-6` were given.
    #[error(
        "ietf and draft-6 cannot be combined: both define the header RateLimit-Policy, in different forms; choose one"
    )]
    Exclusive,
}

/// The version of the IETF draft by which the `RateLimit*` headers are written. A response uses at most one.
#[doc(hidden)] // for crate tidegate
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IetfDraft {
    /// [`Style::Ietf`].
    Latest,
    /// [`Style::Draft6`].
    Sixth,
}

/// A set of header styles, which has at most one of `ietf` and `draft-6`. Defaults to `x` and `ietf`.
///
/// ```
/// use tidegate_config::{Style, Styles};
///
/// assert!(Styles::new([Style::X, Style::Draft6]).is_ok());
/// assert!(Styles::new([Style::Ietf, Style::Draft6]).is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Styles {
    x: bool,
    draft: Option<IetfDraft>,
}

impl Styles {
    /// The empty set: a policy with it appears in no rate-limit header.
    pub const NONE: Styles = Styles { x: false, draft: None };

    /// Creates a set of styles. Their order does not matter, and repetitions are ignored.
    ///
    /// # Errors
    /// If both `ietf` and `draft-6` are given.
    pub fn new(styles: impl IntoIterator<Item = Style>) -> Result<Styles, StyleError> {
        let mut set = Styles::NONE;
        for style in styles {
            let draft = match style {
                Style::X => {
                    set.x = true;
                    continue;
                }
                Style::Ietf => IetfDraft::Latest,
                Style::Draft6 => IetfDraft::Sixth,
            };
            if set.draft.is_some_and(|other| other != draft) {
                return Err(StyleError::Exclusive);
            }
            set.draft = Some(draft);
        }
        Ok(set)
    }

    /// Returns whether the set contains this style.
    pub fn contains(self, style: Style) -> bool {
        match style {
            Style::X => self.x,
            Style::Ietf => self.draft == Some(IetfDraft::Latest),
            Style::Draft6 => self.draft == Some(IetfDraft::Sixth),
        }
    }

    /// Returns the draft that the set selects, or `None` if it has neither `ietf` nor `draft-6`.
    #[doc(hidden)] // for crate tidegate
    pub fn draft(self) -> Option<IetfDraft> {
        self.draft
    }
}

impl Default for Styles {
    fn default() -> Styles {
        Styles { x: true, draft: Some(IetfDraft::Latest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use Style::{Draft6, Ietf, X};

    #[test]
    fn ietf_and_draft_6_exclude_each_other_and_the_error_says_why() {
        for styles in [&[Ietf, Draft6][..], &[Draft6, X, Ietf]] {
            let error = Styles::new(styles.iter().copied()).unwrap_err();
            assert_eq!(error, StyleError::Exclusive);
            assert!(error.to_string().contains("RateLimit-Policy"), "{error}");
        }
    }

    #[test]
    fn the_default_is_x_and_ietf() {
        assert_eq!(Styles::new([Ietf, X, X]).unwrap(), Styles::default());
        assert_eq!(Styles::new([]).unwrap(), Styles::NONE);
        let held = |styles: Styles| Style::ALL.map(|style| styles.contains(style));
        assert_eq!(held(Styles::default()), [true, true, false]);
        assert_eq!(held(Styles::new([Draft6]).unwrap()), [false, false, true]);
    }
}
