//! The secrets that clients of a listener must send: bearer tokens, and the password of Redis clients.

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

/// A secret that the clients of a listener must send. `Debug` does not show it.
#[derive(Clone)]
pub struct ListenerSecret(String);

/// The form of a [`ListenerSecret`], which decides how a client sends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SecretForm {
    /// A bearer token, which HTTP clients send as `Authorization: Bearer`.
    Token,
    /// A password, which Redis clients send with `AUTH` or `HELLO`.
    Password,
}

/// The reason why a text cannot be the secret of a listener, or none can be generated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SecretError {
    /// The token is too short; the field is its length.
    #[error("a token must be at least {CHARACTERS_MIN} characters long; this one has {0}")]
    Short(usize),
    /// The token contains a character that a bearer token cannot contain.
    #[error("a token must consist of visible ASCII characters, without spaces")]
    Characters,
    /// The password is empty.
    #[error("a password must not be empty")]
    Empty,
    /// No token can be generated, because the system provides no random bytes.
    #[error("cannot generate a token: the system provides no random bytes")]
    Random,
}

impl SecretForm {
    /// Returns what a secret of this form is called in messages: `token` or `password`.
    pub fn as_str(self) -> &'static str {
        match self {
            SecretForm::Token => "token",
            SecretForm::Password => "password",
        }
    }

    /// Creates a secret of this form from text that the operator chose.
    ///
    /// Line breaks at the end are removed, so that a file may end in a newline. From a token, all surrounding white
    /// space is removed.
    ///
    /// # Errors
    /// If a token has fewer than 16 characters, or characters other than visible ASCII. If a password is empty.
    pub fn parse(self, text: &str) -> Result<ListenerSecret, SecretError> {
        match self {
            SecretForm::Token => {
                let token = text.trim();
                if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                    return Err(SecretError::Characters);
                }
                if token.len() < CHARACTERS_MIN {
                    return Err(SecretError::Short(token.len()));
                }
                Ok(ListenerSecret(token.to_owned()))
            }
            // A password was wanted, so an empty one must not turn authentication off.
            SecretForm::Password => match text.trim_end_matches(['\r', '\n']) {
                "" => Err(SecretError::Empty),
                password => Ok(ListenerSecret(password.to_owned())),
            },
        }
    }
}

impl ListenerSecret {
    /// Generates a random token of 48 hexadecimal digits.
    ///
    /// # Errors
    /// If the system provides no random bytes.
    pub fn generate() -> Result<ListenerSecret, SecretError> {
        let mut bytes = [0; GENERATED_BYTES];
        getrandom::fill(&mut bytes).map_err(|_| SecretError::Random)?;
        Ok(ListenerSecret(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Returns the secret as text. Must not be logged.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Returns whether `given` equals this secret. Takes the same time for all values of the same length.
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
    token: Option<&ListenerSecret>,
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
pub(crate) fn is_accepted_at_once(
    secret: &ListenerSecret,
    authorization: &[u8],
    peer: IpAddr,
    guard: &AuthGuard,
) -> bool {
    bearer(authorization).is_some_and(|given| secret.matches(given)) && guard.is_immediate(peer)
}

/// Returns the bearer token in a value of `Authorization`, or `None` if it has another scheme.
fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    let (scheme, given) = authorization.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(given)
}

impl std::fmt::Debug for ListenerSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ListenerSecret(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_sixteen_characters_fits_into_a_header_and_is_not_shown_by_debug() {
        let parse = |text: &str| SecretForm::Token.parse(text);
        assert_eq!(parse("short").unwrap_err(), SecretError::Short(5));
        assert_eq!(parse("has a space in its middle").unwrap_err(), SecretError::Characters);
        let given = parse("sixteen-or-more-characters\n").unwrap();
        assert!(given.matches(b"sixteen-or-more-characters"));
        assert!(!given.matches(b"sixteen-or-more-character") && !given.matches(b"sixteen-or-more-characterz"));
        assert_eq!(format!("{given:?}"), "ListenerSecret(***)");
        let (one, other) = (ListenerSecret::generate().unwrap(), ListenerSecret::generate().unwrap());
        assert!(one.reveal().len() == 48 && one.reveal() != other.reveal());
    }

    #[test]
    fn a_password_has_at_least_one_character_and_keeps_its_spaces() {
        let parse = |text: &str| SecretForm::Password.parse(text);
        assert_eq!(parse("\r\n").unwrap_err(), SecretError::Empty);
        assert_eq!(parse(" open sesame \n").unwrap().reveal(), " open sesame ");
    }
}
