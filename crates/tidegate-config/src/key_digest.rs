//! Digests of API keys, so that neither a file nor the store has to contain keys.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

/// The SHA-256 digest of an API key.
///
/// Parsed from 64 hexadecimal digits, optionally after `sha256:`. `printf %s KEY | sha256sum` prints these digits, so a
/// keys file does not have to contain keys.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyDigest([u8; 32]);

/// The error for a text that is not a key digest. It does not contain the text, which may be a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "expected the SHA-256 digest of a key: 64 hexadecimal digits, optionally after sha256:, but found {bytes} bytes in another form"
)]
pub struct KeyDigestError {
    bytes: usize,
}

impl KeyDigest {
    /// Computes the digest of `key`.
    pub fn of(key: &str) -> KeyDigest {
        KeyDigest(Sha256::digest(key.as_bytes()).into())
    }

    /// Returns the 32 bytes of the digest.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the field of the key in a Redis hash of keys or plans: `api_key:` and 64 lowercase hexadecimal digits.
    pub fn field(&self) -> String {
        let hex = |byte: &u8| [byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)]));
        "api_key:".chars().chain(self.0.iter().flat_map(hex)).collect()
    }

    /// Returns a pattern for the field of the key in a Redis hash, such as `api_key:4e738ca5*`, for messages.
    ///
    /// `HSCAN … MATCH` finds the field by it. It has too few digits to recover the key.
    pub fn field_pattern(&self) -> String {
        format!("{}*", &self.field()[..16])
    }

    /// Returns the digest in the field of a Redis hash, or `None` if it is not the field of a key.
    pub fn from_field(field: &str) -> Option<KeyDigest> {
        field.strip_prefix("api_key:")?.parse().ok()
    }
}

impl FromStr for KeyDigest {
    type Err = KeyDigestError;

    fn from_str(text: &str) -> Result<KeyDigest, KeyDigestError> {
        let error = KeyDigestError { bytes: text.len() };
        let digits = text.strip_prefix("sha256:").unwrap_or(text).as_bytes();
        let mut digest = [0; 32];
        if digits.len() != 64 {
            return Err(error);
        }
        for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |at: usize| char::from(pair[at]).to_digit(16).ok_or(error);
            *byte = (digit(0)? << 4 | digit(1)?) as u8;
        }
        Ok(KeyDigest(digest))
    }
}

/// Shows the first eight digits: enough to recognise a key, too few to recover it.
impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "KeyDigest({a:02x}{b:02x}{c:02x}{d:02x}…)")
    }
}
