//! Verifies JSON web tokens (JWT, RFC 7519), which identify users.
//!
//! **The key decides the algorithm.** A token names its own algorithm. To trust that name is a well-known
//! vulnerability: a token may name `none`, or name HS256 and be signed with the bytes of a *public* RSA key. Here a
//! verifier is created for one algorithm with one key, and a token that names another algorithm is rejected. A public
//! key that is passed as an HS256 secret is refused when the verifier is created.
//!
//! **Order.** Size, structure, algorithm and signature are checked first. Claims are parsed only after that, so
//! unsigned claims are never parsed. `exp` is required: a token that never expires is a password. Times are compared
//! with the `now` argument; no clock is read.
//!
//! **Cryptography.** Signatures are checked by `ring`, which TLS uses too. `key.rs` reads the keys.

mod key;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};
use tidegate_core::Timestamp;

use self::key::SignatureKey;
use super::user::{TOKEN_BYTES_MAX, TokenError, User};

/// Maximum length of a token's subject. A token with a longer one is rejected.
const SUBJECT_BYTES_MAX: usize = 1024;

/// The error for a key that cannot be used to verify tokens. Its message does not contain the key.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem}; {accepted}")]
pub struct TokenKeyError {
    problem: &'static str,
    accepted: &'static str,
}

/// Verifies JSON web tokens (JWT) of one algorithm (HS256, RS256 or ES256) with one key.
///
/// A token must name that algorithm, and have the claims `exp` and `sub`. `nbf` is checked if present. `iss` and `aud`
/// are not checked, unless [`with_issuer`](TokenVerifier::with_issuer) or
/// [`with_audience`](TokenVerifier::with_audience) is called. The `Debug` output does not show the key.
///
/// ```
/// use tidegate::identity::{TokenError, TokenVerifier};
/// use tidegate::Timestamp;
///
/// let verifier = TokenVerifier::hs256(b"a secret of at least thirty-two bytes")?
///     .with_issuer("https://login.example")
///     .with_plan_claim("plan");
/// let now = Timestamp::from_micros(1_770_120_000_000_000);
/// assert_eq!(verifier.verify(b"not a token", now), Err(TokenError::Malformed));
/// # Ok::<(), tidegate::identity::TokenKeyError>(())
/// ```
#[derive(Clone)]
pub struct TokenVerifier {
    key: SignatureKey,
    issuer: Option<String>,
    audience: Option<String>,
    plan_claim: Option<String>,
    leeway_us: u64,
}

impl TokenVerifier {
    /// Creates a verifier for HS256 tokens, with the secret that signs them.
    ///
    /// # Errors
    /// Fails if the secret is shorter than 32 bytes, or if it is a PEM file (use RS256 or ES256 for those).
    pub fn hs256(secret: &[u8]) -> Result<TokenVerifier, TokenKeyError> {
        SignatureKey::hs256(secret).map(TokenVerifier::new)
    }

    /// Creates a verifier for RS256 tokens, with the issuer's public key in PEM form.
    ///
    /// # Errors
    /// Fails if this is not an RSA public key of 2,048 to 8,192 bits. A certificate or a private key is refused.
    pub fn rs256(public_key_pem: &[u8]) -> Result<TokenVerifier, TokenKeyError> {
        SignatureKey::rs256(public_key_pem).map(TokenVerifier::new)
    }

    /// Creates a verifier for ES256 tokens, with the issuer's public key in PEM form.
    ///
    /// # Errors
    /// Fails if this is not a public key on the curve P-256, with an uncompressed point (as OpenSSL writes it by
    /// default). A certificate or a private key is refused.
    pub fn es256(public_key_pem: &[u8]) -> Result<TokenVerifier, TokenKeyError> {
        SignatureKey::es256(public_key_pem).map(TokenVerifier::new)
    }

    fn new(key: SignatureKey) -> TokenVerifier {
        TokenVerifier { key, issuer: None, audience: None, plan_claim: None, leeway_us: 60_000_000 }
    }

    /// Requires that the claim `iss` equals `issuer`. By default `iss` is not checked.
    #[must_use]
    pub fn with_issuer(self, issuer: impl Into<String>) -> TokenVerifier {
        TokenVerifier { issuer: Some(issuer.into()), ..self }
    }

    /// Requires that the claim `aud` is `audience`, or a list that contains it. By default `aud` is not checked.
    #[must_use]
    pub fn with_audience(self, audience: impl Into<String>) -> TokenVerifier {
        TokenVerifier { audience: Some(audience.into()), ..self }
    }

    /// Reads the user's plan from this claim. A claim that is not a string is ignored. By default no plan is read.
    #[must_use]
    pub fn with_plan_claim(self, claim: impl Into<String>) -> TokenVerifier {
        TokenVerifier { plan_claim: Some(claim.into()), ..self }
    }

    /// Sets the tolerated difference between the clocks of the issuer and of this server. Defaults to 60 s.
    ///
    /// A token is accepted from `leeway` before its `nbf` until `leeway` after its `exp`.
    #[must_use]
    pub fn with_leeway(self, leeway: Duration) -> TokenVerifier {
        TokenVerifier { leeway_us: u64::try_from(leeway.as_micros()).unwrap_or(u64::MAX), ..self }
    }

    /// Verifies a token (`HEADER.CLAIMS.SIGNATURE` in base64url) at time `now`, and returns its user.
    ///
    /// # Errors
    /// Returns the first problem found: size, structure, algorithm, signature, times, issuer, audience, or subject. The
    /// header `crit` is a problem of the algorithm. The subject `sub` must be a text of 1 to 1,024 bytes.
    pub fn verify(&self, token: &[u8], now: Timestamp) -> Result<User, TokenError> {
        let claims = self.verified_claims(token)?;
        self.check_times(&claims, now)?;
        self.check_parties(&claims)?;
        let subject = match claims.get("sub") {
            Some(Value::String(subject)) if (1..=SUBJECT_BYTES_MAX).contains(&subject.len()) => subject.as_str().into(),
            _ => return Err(TokenError::Subject),
        };
        let plan = self.plan_claim.as_ref().and_then(|claim| claims.get(claim)?.as_str()).map(Arc::from);
        Ok(User { subject, plan })
    }

    /// Verifies the signature of a token and returns its claims, whose values are not checked yet.
    ///
    /// # Errors
    /// If the token is too long or malformed, names another algorithm, has the header `crit`, or has a wrong signature.
    fn verified_claims(&self, token: &[u8]) -> Result<Map<String, Value>, TokenError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenError::TooLong);
        }
        let parts: Vec<&[u8]> = token.splitn(4, |&byte| byte == b'.').collect();
        let [header, claims, signature] = parts[..] else { return Err(TokenError::Malformed) };
        let object = decode_object(header)?;
        if object.get("alg").and_then(Value::as_str) != Some(self.key.algorithm()) || object.contains_key("crit") {
            return Err(TokenError::Algorithm);
        }
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| TokenError::Malformed)?;
        let signed = &token[..header.len() + 1 + claims.len()];
        if !self.key.is_signed(signed, &signature) {
            return Err(TokenError::Signature);
        }
        decode_object(claims)
    }

    /// Checks that `now` is before `exp`, which is required, and not before `nbf`, which is optional; both with the
    /// leeway.
    ///
    /// # Errors
    /// `Expired` is also returned if `exp` is absent, `NotYet` before `nbf`, and `Malformed` if one of them is not a date.
    fn check_times(&self, claims: &Map<String, Value>, now: Timestamp) -> Result<(), TokenError> {
        let now_us = now.as_micros();
        let expires_us = numeric_date_us(claims, "exp")?.ok_or(TokenError::Expired)?;
        if now_us >= expires_us.saturating_add(self.leeway_us) {
            return Err(TokenError::Expired);
        }
        match numeric_date_us(claims, "nbf")? {
            Some(begins_us) if now_us.saturating_add(self.leeway_us) < begins_us => Err(TokenError::NotYet),
            _ => Ok(()),
        }
    }

    /// Checks `iss` and `aud` against the configured issuer and audience. Without them, nothing is checked.
    ///
    /// # Errors
    /// Returns [`TokenError::Issuer`] or [`TokenError::Audience`] if the claim is missing or another one. An `aud` may be
    /// a list that has the audience.
    fn check_parties(&self, claims: &Map<String, Value>) -> Result<(), TokenError> {
        if let Some(issuer) = &self.issuer
            && claims.get("iss").and_then(Value::as_str) != Some(issuer)
        {
            return Err(TokenError::Issuer);
        }
        let Some(audience) = &self.audience else { return Ok(()) };
        let is_for_us = match claims.get("aud") {
            Some(Value::String(one)) => one == audience,
            Some(Value::Array(many)) => many.iter().any(|one| one.as_str() == Some(audience)),
            _ => false,
        };
        if is_for_us { Ok(()) } else { Err(TokenError::Audience) }
    }
}

impl fmt::Debug for TokenVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenVerifier")
            .field("algorithm", &self.key.algorithm())
            .field("issuer", &self.issuer)
            .field("audience", &self.audience)
            .field("plan_claim", &self.plan_claim)
            .finish_non_exhaustive()
    }
}

/// Decodes a part of a token: base64url without padding, which contains a JSON object. Another content is
/// [`TokenError::Malformed`].
fn decode_object(part: &[u8]) -> Result<Map<String, Value>, TokenError> {
    let json = URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenError::Malformed)?;
    serde_json::from_slice(&json).map_err(|_| TokenError::Malformed)
}

/// Returns the date in a claim (seconds since the epoch, possibly with a fraction) in microseconds, rounded down.
///
/// Returns `None` if the claim is absent, and an error if it is not a number or negative. Dates that are too large
/// saturate.
fn numeric_date_us(claims: &Map<String, Value>, name: &str) -> Result<Option<u64>, TokenError> {
    let Some(value) = claims.get(name) else { return Ok(None) };
    if let Some(seconds) = value.as_u64() {
        return Ok(Some(seconds.saturating_mul(1_000_000)));
    }
    match value.as_f64() {
        // `as` saturates, so a date that is too large becomes the latest one.
        Some(seconds) if seconds >= 0.0 => Ok(Some((seconds * 1e6) as u64)),
        _ => Err(TokenError::Malformed),
    }
}

#[cfg(test)]
mod tests;
