//! The secret that opens the admin door.

use subtle::ConstantTimeEq;

/// Fewer characters could be guessed by asking.
const CHARACTERS_MIN: usize = 16;
/// Random bytes of a token that we make.
const MADE_BYTES: usize = 24;

/// The secret that opens the admin door. It is never printed by itself.
#[derive(Clone)]
pub struct Token(String);

/// Why a text is no token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AdminTokenError {
    /// It could be guessed.
    #[error("an admin token has at least {CHARACTERS_MIN} characters, this one has {0}")]
    Short(usize),
    /// It cannot stand in a header.
    #[error("an admin token is made of visible ASCII characters, without spaces")]
    Characters,
    /// There is no randomness to make one of.
    #[error("the system gives no random bytes to make a token of")]
    Random,
}

impl Token {
    /// The token that somebody chose. Space around it is not part of it, so that a file may end in a newline.
    ///
    /// # Errors
    /// When it is too short, or cannot be sent as a bearer token.
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

    /// One that nobody can know.
    ///
    /// # Errors
    /// When the system gives no random bytes.
    pub fn made() -> Result<Token, AdminTokenError> {
        let mut bytes = [0; MADE_BYTES];
        getrandom::fill(&mut bytes).map_err(|_| AdminTokenError::Random)?;
        Ok(Token(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// The token itself. Not for logs.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Whether this is it. Takes the same time wherever they differ.
    pub(crate) fn is(&self, given: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(given).into()
    }
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
    fn a_token_is_long_enough_fits_a_header_and_is_not_printed() {
        assert_eq!(Token::given("short").unwrap_err(), AdminTokenError::Short(5));
        assert_eq!(Token::given("has a space in its middle").unwrap_err(), AdminTokenError::Characters);
        let given = Token::given("sixteen-or-more-characters\n").unwrap();
        assert!(given.is(b"sixteen-or-more-characters"));
        assert!(!given.is(b"sixteen-or-more-character") && !given.is(b"sixteen-or-more-characterz"));
        assert_eq!(format!("{given:?}"), "Token(***)");
        let (one, other) = (Token::made().unwrap(), Token::made().unwrap());
        assert!(one.reveal().len() == 48 && one.reveal() != other.reveal());
    }
}
