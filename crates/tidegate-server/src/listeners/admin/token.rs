//! The bearer tokens of the admin API and of the HTTP listener.

use std::net::IpAddr;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use subtle::ConstantTimeEq;

use crate::auth_guard::{Attempt, AuthGuard};
use crate::metrics::ListenerStats;

/// The fewest characters of a token. A shorter one could be guessed.
const CHARACTERS_MIN: usize = 16;
/// The random bytes of a generated token.
const GENERATED_BYTES: usize = 24;

/// The bearer token that requests to the admin API or to the HTTP listener must have. `Debug` does not show it.
#[derive(Clone)]
pub struct Token(String);

/// The reason why a token cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AdminTokenError {
    /// The token is too short; the field is its length.
    #[error("a token must be at least {CHARACTERS_MIN} characters long; this one has {0}")]
    Short(usize),
    /// The token contains a character that a bearer token cannot contain.
    #[error("a token must consist of visible ASCII characters, without spaces")]
    Characters,
    /// No token can be generated, because the system provides no random bytes.
    #[error("cannot generate a token: the system provides no random bytes")]
    Random,
}

impl Token {
    /// Creates a token from text that the operator chose.
    ///
    /// Surrounding white space is removed, so that a file may end in a newline.
    ///
    /// # Errors
    /// If it has fewer than 16 characters, or characters other than visible ASCII.
    pub fn given(text: &str) -> Result<Token, AdminTokenError> {
        let text = text.trim();
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(AdminTokenError::Characters);
        }
        if text.len() < CHARACTERS_MIN {
            return Err(AdminTokenError::Short(text.len()));
        }
        Ok(Token(text.to_owned()))
    }

    /// Generates a random token of 48 hexadecimal digits.
    ///
    /// # Errors
    /// If the system provides no random bytes.
    pub fn made() -> Result<Token, AdminTokenError> {
        let mut bytes = [0; GENERATED_BYTES];
        getrandom::fill(&mut bytes).map_err(|_| AdminTokenError::Random)?;
        Ok(Token(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Returns the token as text. Must not be logged.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Returns whether `given` equals this token. Takes the same time for all values of the same length.
    pub(crate) fn matches(&self, given: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(given).into()
    }
}

/// The reason why a request is rejected before it is handled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AuthError {
    /// The request has no bearer token.
    Missing,
    /// The token is wrong, or the listener has none.
    Wrong,
    /// 16 attempts of the client's address are waiting already. The token was not checked.
    TooManyAttempts,
}

/// Checks the bearer token of a request of the client at `peer`.
///
/// A wrong token and too many attempts are counted, and some are logged; a missing token is not. After five failures of
/// `peer`, the result is delayed by up to 1 s, even for the right token; see [`AuthGuard::attempt`].
///
/// # Errors
/// Returns [`AuthError::Missing`] if the request has no bearer token, [`AuthError::Wrong`] if it has another one or
/// `token` is `None`, and [`AuthError::TooManyAttempts`] if too many attempts of `peer` are waiting.
pub(crate) async fn authenticate(
    token: Option<&Token>,
    headers: &HeaderMap,
    peer: IpAddr,
    guard: &AuthGuard,
    stats: &ListenerStats,
) -> Result<(), AuthError> {
    let given = headers.get(AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
    // A request without a token is not a guess.
    let Some(given) = given else { return Err(AuthError::Missing) };
    let Some(token) = token else { return Err(AuthError::Wrong) };
    match guard.attempt(stats.name, peer, &stats.auth_failures, || token.matches(given)).await {
        Attempt::Right => Ok(()),
        Attempt::Wrong => Err(AuthError::Wrong),
        Attempt::Refused => Err(AuthError::TooManyAttempts),
    }
}

/// Returns whether [`authenticate`] would accept this value of `Authorization` at once, without a delay.
///
/// Neither counts nor logs anything. If it returns false, the request must still be authenticated.
pub(crate) fn is_accepted_at_once(token: &Token, authorization: &[u8], peer: IpAddr, guard: &AuthGuard) -> bool {
    bearer(authorization).is_some_and(|given| token.matches(given)) && guard.is_immediate(peer)
}

/// Returns the bearer token in a value of `Authorization`, or `None` if it has another scheme.
fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    let (scheme, given) = authorization.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(given)
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_sixteen_characters_fits_into_a_header_and_is_not_shown_by_debug() {
        assert_eq!(Token::given("short").unwrap_err(), AdminTokenError::Short(5));
        assert_eq!(Token::given("has a space in its middle").unwrap_err(), AdminTokenError::Characters);
        let given = Token::given("sixteen-or-more-characters\n").unwrap();
        assert!(given.matches(b"sixteen-or-more-characters"));
        assert!(!given.matches(b"sixteen-or-more-character") && !given.matches(b"sixteen-or-more-characterz"));
        assert_eq!(format!("{given:?}"), "Token(***)");
        let (one, other) = (Token::made().unwrap(), Token::made().unwrap());
        assert!(one.reveal().len() == 48 && one.reveal() != other.reveal());
    }
}
