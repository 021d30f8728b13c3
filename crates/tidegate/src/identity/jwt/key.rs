//! Keys that verify the signatures of tokens: one secret or public key, for one algorithm.
//!
//! `ring` checks the signatures. It reads a public key anew with each signature and reports only that something failed.
//! Each key is therefore checked here when it is created, so that an unusable one is an error of the configuration and
//! not a reason to reject every token.

use ring::agreement::{self, ECDH_P256, EphemeralPrivateKey};
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};
use spki::der::asn1::UintRef;
use spki::der::{Decode, Reader, SliceReader};
use spki::{ObjectIdentifier, SubjectPublicKeyInfoRef};

use super::TokenKeyError;

/// Minimum length of an HS256 secret. RFC 7518 forbids keys shorter than the digest.
const HS256_SECRET_BYTES_MIN: usize = 32;
/// Minimum size of an RSA modulus for RS256, as RFC 7518 requires.
const RSA_MODULUS_BYTES_MIN: usize = 2048 / 8;
/// Maximum size of an RSA modulus. `ring` verifies no larger ones.
const RSA_MODULUS_BYTES_MAX: usize = 8192 / 8;
/// Maximum RSA exponent. `ring` verifies with no larger ones; 65,537 is the usual one.
const RSA_EXPONENT_MAX: u64 = (1 << 33) - 1;

const RSA_ENCRYPTION: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
const EC_PUBLIC_KEY: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const P256: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.3.1.7");

/// Verifies signatures of one algorithm with one key.
#[derive(Clone)]
pub(super) enum SignatureKey {
    Hs256(hmac::Key),
    Rs256(UnparsedPublicKey<Box<[u8]>>),
    Es256(UnparsedPublicKey<Box<[u8]>>),
}

impl SignatureKey {
    /// Creates a key for HS256 from the secret that signs the tokens.
    ///
    /// # Errors
    /// Fails if the secret is shorter than 32 bytes, or if it is a PEM file.
    pub(super) fn hs256(secret: &[u8]) -> Result<SignatureKey, TokenKeyError> {
        let accepted = "HS256 requires a secret of at least 32 bytes";
        if secret.trim_ascii_start().starts_with(b"-----BEGIN") {
            let problem = "the secret is a PEM file: anyone who knows the public key could sign tokens with it";
            return Err(TokenKeyError { problem, accepted });
        }
        if secret.len() < HS256_SECRET_BYTES_MIN {
            return Err(TokenKeyError { problem: "the secret is too short", accepted });
        }
        Ok(SignatureKey::Hs256(hmac::Key::new(hmac::HMAC_SHA256, secret)))
    }

    /// Creates a key for RS256 from an RSA public key in PEM form (`PUBLIC KEY` or `RSA PUBLIC KEY`).
    ///
    /// # Errors
    /// Fails if this is not an RSA public key of 2,048 to 8,192 bits.
    pub(super) fn rs256(pem: &[u8]) -> Result<SignatureKey, TokenKeyError> {
        let error = |problem| TokenKeyError {
            problem,
            accepted: "RS256 requires an RSA public key of at least 2048 bits, as PEM (BEGIN PUBLIC KEY)",
        };
        let file = read_pem(pem).map_err(error)?;
        let key = match file.tag() {
            "RSA PUBLIC KEY" => Some(file.contents()),
            _ => public_key(file.contents(), (RSA_ENCRYPTION, None)),
        };
        let (key, (modulus, exponent)) =
            key.and_then(|key| Some((key, rsa_components(key)?))).ok_or_else(|| error("expected an RSA public key"))?;
        match modulus.len() {
            0..RSA_MODULUS_BYTES_MIN => return Err(error("the key is too short")),
            RSA_MODULUS_BYTES_MIN..=RSA_MODULUS_BYTES_MAX => {}
            _ => return Err(error("the key has more than 8192 bits")),
        }
        let is_odd = |number: &[u8]| number.last().is_some_and(|last| last % 2 == 1);
        if !(is_odd(modulus) && is_odd(exponent) && (3..=RSA_EXPONENT_MAX).contains(&saturating_u64(exponent))) {
            return Err(error("the key is damaged: it has an invalid modulus or exponent"));
        }
        Ok(SignatureKey::Rs256(UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, key.into())))
    }

    /// Creates a key for ES256 from a public key in PEM form (`PUBLIC KEY`).
    ///
    /// # Errors
    /// Fails if this is not an uncompressed point on the curve P-256.
    pub(super) fn es256(pem: &[u8]) -> Result<SignatureKey, TokenKeyError> {
        let error = |problem| TokenKeyError {
            problem,
            accepted: "ES256 requires an EC public key (an uncompressed point), as PEM (BEGIN PUBLIC KEY)",
        };
        let file = read_pem(pem).map_err(error)?;
        public_key(file.contents(), (EC_PUBLIC_KEY, Some(P256)))
            .filter(|point| is_on_p256(point))
            .map(|point| SignatureKey::Es256(UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point.into())))
            .ok_or_else(|| error("expected a public key on the curve P-256"))
    }

    /// Returns the name of the algorithm, as in the header of a token.
    pub(super) fn algorithm(&self) -> &'static str {
        match self {
            SignatureKey::Hs256(_) => "HS256",
            SignatureKey::Rs256(_) => "RS256",
            SignatureKey::Es256(_) => "ES256",
        }
    }

    /// Returns whether `signature` is the signature of `message`. Compares HS256 signatures in constant time.
    pub(super) fn is_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            SignatureKey::Hs256(key) => hmac::verify(key, message, signature).is_ok(),
            SignatureKey::Rs256(key) | SignatureKey::Es256(key) => key.verify(message, signature).is_ok(),
        }
    }
}

/// Reads the first block of a PEM file. The error says what the file contains instead of a public key.
fn read_pem(text: &[u8]) -> Result<pem::Pem, &'static str> {
    let file = pem::parse(text).map_err(|_| "the key is not a PEM file")?;
    match file.tag() {
        "PUBLIC KEY" | "RSA PUBLIC KEY" => Ok(file),
        "CERTIFICATE" => Err("the file is a certificate (`openssl x509 -pubkey -noout` prints its public key)"),
        tag if tag.ends_with("PRIVATE KEY") => {
            Err("the file is a private key (`openssl pkey -pubout` prints its public key, which is enough)")
        }
        _ => Err("the file has no public key"),
    }
}

/// Returns the key in a `SubjectPublicKeyInfo` (RFC 5280), or `None` if it is malformed or of another algorithm or
/// curve.
fn public_key(der: &[u8], algorithm: (ObjectIdentifier, Option<ObjectIdentifier>)) -> Option<&[u8]> {
    let info = SubjectPublicKeyInfoRef::from_der(der).ok()?;
    if info.algorithm.oids().ok()? != algorithm {
        return None;
    }
    info.subject_public_key.as_bytes()
}

/// Returns modulus and exponent of an `RSAPublicKey` (RFC 8017), big-endian without leading zeros. `None` if `der` is not
/// one.
fn rsa_components(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut reader = SliceReader::new(der).ok()?;
    let components = reader.sequence(|reader| {
        let (modulus, exponent) = (UintRef::decode(reader)?, UintRef::decode(reader)?);
        Ok::<_, spki::der::Error>((modulus.as_bytes(), exponent.as_bytes()))
    });
    reader.finish().ok()?;
    components.ok()
}

/// Reads a big-endian number. A larger one than `u64` holds becomes `u64::MAX`.
fn saturating_u64(number: &[u8]) -> u64 {
    let shifted = |value: u64, &byte: &u8| Some(value.checked_mul(256)? | u64::from(byte));
    number.iter().try_fold(0, shifted).unwrap_or(u64::MAX)
}

/// Returns whether these bytes are an uncompressed point on the curve P-256.
///
/// `ring` has no function for that alone. Its key agreement refuses a peer's key that is no such point.
fn is_on_p256(point: &[u8]) -> bool {
    let peer = agreement::UnparsedPublicKey::new(&ECDH_P256, point);
    EphemeralPrivateKey::generate(&ECDH_P256, &SystemRandom::new())
        .and_then(|ours| agreement::agree_ephemeral(ours, &peer, |_| ()))
        .is_ok()
}
