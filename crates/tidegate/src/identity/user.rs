//! Users of verified tokens, and the reasons to reject a token. `jwt.rs` verifies tokens.

use std::sync::Arc;

/// Maximum length of a token in bytes. A longer one is rejected without being parsed.
pub const TOKEN_BYTES_MAX: usize = 8 * 1024;

/// A user whose token was verified.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct User {
    /// The token's subject (`sub`).
    pub subject: Arc<str>,
    /// The plan named by the token, or `None` if no plan claim is configured or the token has none that is a string.
    pub plan: Option<Arc<str>>,
}

/// The reason why a token was rejected. Its text contains nothing of the token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The token is longer than [`TOKEN_BYTES_MAX`].
    #[error("the token has more than {TOKEN_BYTES_MAX} bytes")]
    TooLong,
    /// The token is not three base64url parts with JSON objects in the first two, or `exp` or `nbf` is not a date.
    #[error("the token is not a signed JSON web token")]
    Malformed,
    /// The token's algorithm is not the verifier's (`none`, for example), or it uses an extension (`crit`).
    #[error("the token's algorithm is not the configured one")]
    Algorithm,
    /// The signature does not match the token and the configured key.
    #[error("the token's signature does not match")]
    Signature,
    /// The token has expired, or has no `exp`.
    #[error("the token has expired or has no expiration time (exp)")]
    Expired,
    /// The time is before the token's `nbf`.
    #[error("the token is not valid yet")]
    NotYet,
    /// The token's `iss` is not the configured issuer.
    #[error("the token's issuer is not the configured one")]
    Issuer,
    /// The token's `aud` is not the configured audience and does not contain it.
    #[error("the token is for another audience")]
    Audience,
    /// The token's `sub` is missing, not a string, empty, or longer than 1,024 bytes.
    #[error("the token has no valid subject (sub)")]
    Subject,
}

/// Returns whether a bearer token may be a JWT: it contains exactly two dots. Nothing else is checked.
pub(crate) fn looks_like_token(text: &[u8]) -> bool {
    text.iter().filter(|&&byte| byte == b'.').count() == 2
}

/// The type of the verifier in builds without the feature `jwt`. It has no values, so tokens are never verified.
#[cfg(not(feature = "jwt"))]
#[derive(Clone, Debug)]
pub(crate) enum TokenVerifier {}

#[cfg(not(feature = "jwt"))]
impl TokenVerifier {
    pub(crate) fn verify(&self, _token: &[u8], _now: tidegate_core::Timestamp) -> Result<User, TokenError> {
        match *self {}
    }
}
