//! Encrypts receipts as text for clients, and decrypts them.
//!
//! A receipt contains keys and client addresses, and can refund units. So the text that a client gets is encrypted and
//! authenticated under a secret that all instances of a deployment share:
//!
//! ```text
//!   base64url( version 1 byte │ salt 16 bytes │ AES-256-GCM( encoded receipt ) │ tag 16 bytes )
//!
//!   key = HKDF-SHA-256(secret, salt), nonce = 0
//! ```
//!
//! Each receipt has a random salt and therefore its own key, so the nonce can be constant. Random nonces under one key
//! would be safe for only about 2^32 receipts.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf;
use tidegate::receipt::Receipt;

const VERSION: u8 = 1;
const SALT_BYTES: usize = 16;
/// The maximum length of a text that is decrypted.
pub(crate) const RECEIPT_TEXT_BYTES_MAX: usize = 64 * 1024;

/// The secret with which an instance encrypts receipts.
///
/// Instances that share a store need the same secret, so that each can redeem the receipts of the others.
#[derive(Clone)]
pub struct ReceiptSecret(hkdf::Prk);

/// The error for a text that is not a receipt of this deployment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "this is not a receipt of this service, or it was issued under another receipt secret; expected the `receipt` of an admitted check, unchanged"
)]
pub(crate) struct InvalidReceiptText;

impl ReceiptSecret {
    /// Creates a secret from bytes: at least 16 random ones.
    pub fn new(secret: &[u8]) -> ReceiptSecret {
        ReceiptSecret(hkdf::Salt::new(hkdf::HKDF_SHA256, b"tidegate receipts").extract(secret))
    }

    /// Generates a random secret. Receipts that are encrypted with it are valid until the process ends.
    ///
    /// # Errors
    /// Returns an error if the operating system provides no random numbers.
    pub fn generate() -> std::io::Result<ReceiptSecret> {
        random::<32>().map(|secret| ReceiptSecret::new(&secret))
    }

    /// Encrypts a receipt. Logs an error and returns `None` if the operating system provides no random numbers.
    pub(crate) fn seal(&self, receipt: &Receipt) -> Option<String> {
        let salt =
            random::<SALT_BYTES>().inspect_err(|error| tracing::error!(%error, "cannot issue a receipt")).ok()?;
        let mut sealed = receipt.encode();
        self.key(&salt)?.seal_in_place_append_tag(nonce(), Aad::from([VERSION]), &mut sealed).ok()?;
        Some(URL_SAFE_NO_PAD.encode([&[VERSION][..], &salt, &sealed].concat()))
    }

    /// Decrypts a receipt.
    ///
    /// # Errors
    /// Returns an error if the text was not made by [`ReceiptSecret::seal`] under the same secret.
    pub(crate) fn open(&self, text: &[u8]) -> Result<Receipt, InvalidReceiptText> {
        if text.len() > RECEIPT_TEXT_BYTES_MAX {
            return Err(InvalidReceiptText);
        }
        let mut bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| InvalidReceiptText)?;
        let Some((&VERSION, rest)) = bytes.split_first_mut().map(|(version, rest)| (&*version, rest)) else {
            return Err(InvalidReceiptText);
        };
        let (salt, sealed) = rest.split_first_chunk_mut::<SALT_BYTES>().ok_or(InvalidReceiptText)?;
        let key = self.key(salt).ok_or(InvalidReceiptText)?;
        let encoded = key.open_in_place(nonce(), Aad::from([VERSION]), sealed).map_err(|_| InvalidReceiptText)?;
        Receipt::decode(encoded).map_err(|_| InvalidReceiptText)
    }

    fn key(&self, salt: &[u8; SALT_BYTES]) -> Option<LessSafeKey> {
        let info = [salt.as_slice()];
        Some(LessSafeKey::new(UnboundKey::from(self.0.expand(&info, &AES_256_GCM).ok()?)))
    }
}

impl std::fmt::Debug for ReceiptSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReceiptSecret")
    }
}

/// Returns random bytes from the operating system.
fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|_| std::io::Error::other("the operating system provides no random numbers"))?;
    Ok(bytes)
}

fn nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; 12])
}

#[cfg(test)]
mod tests {
    use tidegate::{Check, Demand, Key, Limiter};

    use super::*;

    async fn receipt(key: &str) -> Receipt {
        let limiter = Limiter::memory();
        let demand = Demand::new("5/min".parse().unwrap(), Key::new(key).unwrap());
        let check = Check::one(&demand);
        let decision = limiter.check(&check).await.unwrap();
        limiter.receipt(&check, &decision).unwrap()
    }

    #[tokio::test]
    async fn sealed_receipt_is_opened_by_the_same_secret_only() {
        let secret = ReceiptSecret::new(b"sixteen bytes or more");
        let receipt = receipt("user:42").await;
        let text = secret.seal(&receipt).unwrap();
        assert!(!text.contains("user"), "{text}");
        assert_eq!(secret.open(text.as_bytes()), Ok(receipt.clone()));
        assert_eq!(ReceiptSecret::new(b"sixteen bytes or more").open(text.as_bytes()), Ok(receipt.clone()));
        assert_eq!(ReceiptSecret::new(b"another secret of 16+").open(text.as_bytes()), Err(InvalidReceiptText));
        assert_ne!(secret.seal(&receipt).unwrap(), text, "two texts of one receipt have different salts");
    }

    #[tokio::test]
    async fn changed_or_truncated_text_is_rejected() {
        let secret = ReceiptSecret::generate().unwrap();
        let text = secret.seal(&receipt("user:42").await).unwrap();
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            assert_eq!(secret.open(&changed), Err(InvalidReceiptText), "byte {at}");
            assert_eq!(secret.open(&text.as_bytes()[..at]), Err(InvalidReceiptText), "{at} bytes");
        }
        let long = "A".repeat(RECEIPT_TEXT_BYTES_MAX + 1);
        for text in ["", "A", "AQ", "not base64!", &text.to_uppercase(), &long] {
            assert_eq!(secret.open(text.as_bytes()), Err(InvalidReceiptText));
        }
    }
}
