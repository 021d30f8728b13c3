//! What is known of a user, and why a token is not believed. How tokens are verified is told in `jwt.rs`.

use std::sync::Arc;

/// A longer token is refused unread.
pub const TOKEN_BYTES_MAX: usize = 8 * 1024;

/// A user whose token was verified.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct User {
    /// The token's subject (`sub`).
    pub subject: Arc<str>,
    /// What the plan claim says, if the verifier has one and the token too.
    pub plan: Option<Arc<str>>,
}

/// Why a token is not believed. None of them repeats anything of the token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// Longer than [`TOKEN_BYTES_MAX`].
    #[error("a token has at most {TOKEN_BYTES_MAX} bytes")]
    TooLong,
    /// Not three base64url parts with JSON objects in the first two, or a claim of the wrong type.
    #[error("expected a signed JSON web token")]
    Malformed,
    /// Another algorithm than the verifier's, `none` included, or an extension we do not know (`crit`).
    #[error("the token's algorithm is not the configured one")]
    Algorithm,
    /// Signed by somebody else, or changed.
    #[error("the token's signature does not match")]
    Signature,
    /// Without an `exp`, or past it.
    #[error("the token has expired or does not say when it does")]
    Expired,
    /// Before its `nbf`.
    #[error("the token is not valid yet")]
    NotYet,
    /// From another issuer.
    #[error("the token's issuer is not the configured one")]
    Issuer,
    /// For another audience.
    #[error("the token is for another audience")]
    Audience,
    /// Without a `sub`, or with an empty or endless one.
    #[error("the token names no subject")]
    Subject,
}

/// Whether a bearer token could be a JWT: three parts, with dots between them.
pub(crate) fn looks_like_token(text: &[u8]) -> bool {
    text.iter().filter(|&&byte| byte == b'.').count() == 2
}

/// Nobody, in a program that verifies no tokens: it was built without the feature `jwt`.
#[cfg(not(feature = "jwt"))]
#[derive(Clone, Debug)]
pub(crate) enum TokenVerifier {}

#[cfg(not(feature = "jwt"))]
impl TokenVerifier {
    pub(crate) fn verify(&self, _token: &[u8], _now: tollgate_core::Timestamp) -> Result<User, TokenError> {
        match *self {}
    }
}
