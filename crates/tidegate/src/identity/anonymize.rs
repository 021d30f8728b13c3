//! Pseudonyms for addresses and keys, so that the store contains no personal data.
//!
//! A plain hash of an IPv4 address does not protect it: there are only 2^32 addresses, and all of them can be tried in
//! minutes. So the pseudonym is an HMAC. Without the secret, addresses cannot be tried. The salt changes at midnight
//! UTC, so that pseudonyms of different days cannot be linked without the secret.
//!
//! ```text
//!   salt      = HMAC-SHA-256(secret, "tidegate anonymize " date)      date: 2026-02-03, or "never"
//!   pseudonym = HMAC-SHA-256(salt, kind ":" value), its first 16 bytes in hexadecimal
//! ```
//!
//! The date is left out of the salt for entries of the ban list, "tidegate bans", so that a ban outlives midnight.
//!
//! Instances with the same secret compute the same pseudonyms on the same date. The kind is part of the input, so an
//! address and a user with the same text have different pseudonyms. Counters change at midnight, so a caller may use up
//! to twice its quota around midnight. [`Rotate::Never`] avoids that, but then pseudonyms can be linked over any time.

use std::fmt;
use std::time::{Duration, UNIX_EPOCH};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tidegate_config::Rotate;
use tidegate_core::{Timestamp, Wait};

/// Minimum length of the secret in bytes. All values of 16 random bytes cannot be tried.
const SECRET_BYTES_MIN: usize = 16;

const DAY_US: u64 = 86_400_000_000;

/// The error for an [`Anonymizer`] secret that is shorter than 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the secret for anonymize must be at least {SECRET_BYTES_MIN} bytes long; this one has {bytes}")]
pub struct SecretError {
    bytes: usize,
}

/// Computes the pseudonyms of addresses, users and keys with a secret. Its `Debug` output does not show the secret.
///
/// ```
/// use tidegate::Timestamp;
/// use tidegate::identity::{Anonymizer, Rotate};
///
/// let anonymizer = Anonymizer::new(b"a secret that all instances share", Rotate::Daily)?;
/// let noon = Timestamp::from_micros(1_770_120_000_000_000);
/// let pseudonym = anonymizer.salt(noon).pseudonym("ip", b"203.0.113.9");
/// assert_eq!(pseudonym.to_string().len(), 32);
/// assert!(!format!("{anonymizer:?}").contains("secret that"));
/// # Ok::<(), tidegate::identity::SecretError>(())
/// ```
#[derive(Clone)]
pub struct Anonymizer {
    /// An HMAC that is keyed with the secret.
    keyed: Hmac<Sha256>,
    rotate: Rotate,
    bans: Salt,
}

impl Anonymizer {
    /// Creates an anonymizer with a secret. Instances that share a store need the same `secret` and `rotate`.
    ///
    /// # Errors
    /// Fails if the secret is shorter than 16 bytes.
    pub fn new(secret: &[u8], rotate: Rotate) -> Result<Anonymizer, SecretError> {
        if secret.len() < SECRET_BYTES_MIN {
            return Err(SecretError { bytes: secret.len() });
        }
        let mut bans = keyed(secret);
        bans.update(b"tidegate bans");
        let bans = Salt(keyed(&bans.finalize().into_bytes()));
        Ok(Anonymizer { keyed: keyed(secret), rotate, bans })
    }

    /// Returns the salt of entries of the ban list, which does not change with the date.
    pub(crate) fn ban_salt(&self) -> &Salt {
        &self.bans
    }

    /// Returns the time from `now` until pseudonyms change, or `None` with [`Rotate::Never`].
    pub(crate) fn rotates_after(&self, now: Timestamp) -> Option<Wait> {
        match self.rotate {
            Rotate::Daily => Some(Wait::from_micros(DAY_US - now.as_micros() % DAY_US)),
            Rotate::Never => None,
        }
    }

    /// Returns the salt of the UTC day of `now`, or a constant salt with [`Rotate::Never`].
    pub fn salt(&self, now: Timestamp) -> Salt {
        let mut mac = self.keyed.clone();
        mac.update(b"tidegate anonymize ");
        match self.rotate {
            Rotate::Daily => mac.update(utc_date(now).as_bytes()),
            Rotate::Never => mac.update(b"never"),
        }
        Salt(keyed(&mac.finalize().into_bytes()))
    }
}

impl fmt::Debug for Anonymizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Anonymizer").field("rotate", &self.rotate).finish_non_exhaustive()
    }
}

/// The salt with which pseudonyms are computed: that of one day, or the constant one of [`Rotate::Never`].
#[derive(Clone)]
pub struct Salt(Hmac<Sha256>);

impl Salt {
    /// Computes a pseudonym from a kind and a value, such as `ip` and `203.0.113.9`: the first 16 bytes of the
    /// HMAC-SHA-256 of `kind:value`. The same salt, kind and value always give the same pseudonym.
    ///
    /// (`a`, `b:c`) and (`a:b`, `c`) give the same pseudonym, so kinds must be chosen so that this cannot occur.
    pub fn pseudonym(&self, kind: impl AsRef<[u8]>, value: &[u8]) -> Pseudonym {
        let mut mac = self.0.clone();
        mac.update(kind.as_ref());
        mac.update(b":");
        mac.update(value);
        let digest: [u8; 32] = mac.finalize().into_bytes().into();
        let mut pseudonym = [0; 16];
        pseudonym.copy_from_slice(&digest[..16]);
        Pseudonym(pseudonym)
    }
}

impl fmt::Debug for Salt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Salt([hidden])")
    }
}

/// A pseudonym of an address, a user or a key, created by [`Salt::pseudonym`]. `Display` shows 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Pseudonym([u8; 16]);

impl fmt::Display for Pseudonym {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes a key of any length")
}

/// Returns the UTC date of a timestamp, as `2026-02-03`.
fn utc_date(now: Timestamp) -> String {
    let mut text = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_micros(now.as_micros())).to_string();
    text.truncate("2026-02-03".len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

    fn at(date_us: u64) -> Timestamp {
        Timestamp::from_micros(date_us)
    }

    #[test]
    fn pseudonyms_match_those_computed_with_openssl() {
        // printf '%s' 'tidegate anonymize 2026-02-03' | openssl dgst -sha256 -hmac SECRET gives the salt; the same
        // command with the salt as key and 'ip:203.0.113.9' as text gives the pseudonym.
        let noon = at(1_770_120_000_000_000);
        assert_eq!(utc_date(noon), "2026-02-03");
        let daily = Anonymizer::new(SECRET, Rotate::Daily).unwrap().salt(noon);
        assert_eq!(daily.pseudonym("ip", b"203.0.113.9").to_string(), "1e03323d34f0e2b3ca107d409cad3466");
        let never = Anonymizer::new(SECRET, Rotate::Never).unwrap().salt(noon);
        assert_eq!(never.pseudonym("ip", b"203.0.113.9").to_string(), "3260c5bd2e5bb5859a41551ba1567fcc");
    }

    #[test]
    fn pseudonyms_change_at_midnight_to_the_microsecond() {
        let anonymizer = Anonymizer::new(SECRET, Rotate::Daily).unwrap();
        let name = |now: Timestamp| anonymizer.salt(now).pseudonym("ip", b"203.0.113.9");
        for day in [1, 20_000, 20_487, 40_000] {
            let midnight = at(day * DAY_US);
            assert_ne!(name(midnight.minus_micros(1)), name(midnight));
            assert_eq!(name(midnight), name(midnight.plus_micros(DAY_US - 1)));
            assert_ne!(name(midnight), name(midnight.plus_micros(DAY_US)));
        }
        let constant = Anonymizer::new(SECRET, Rotate::Never).unwrap();
        assert_eq!(constant.salt(at(0)).pseudonym("ip", b"x"), constant.salt(Timestamp::MAX).pseudonym("ip", b"x"));
    }

    #[test]
    fn kind_value_and_secret_each_change_the_pseudonym() {
        let salt = Anonymizer::new(SECRET, Rotate::Never).unwrap().salt(at(0));
        let other = Anonymizer::new(b"another secret, as long", Rotate::Never).unwrap().salt(at(0));
        let name = salt.pseudonym("ip", b"10.0.0.1");
        assert_ne!(name, salt.pseudonym("user", b"10.0.0.1"));
        assert_ne!(name, salt.pseudonym("ip", b"10.0.0.2"));
        assert_ne!(name, other.pseudonym("ip", b"10.0.0.1"));
    }

    #[test]
    fn short_secret_is_refused() {
        let error = Anonymizer::new(b"fifteen bytes..", Rotate::Daily).unwrap_err();
        assert_eq!(error.to_string(), "the secret for anonymize must be at least 16 bytes long; this one has 15");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        // From `date -u -d @SECONDS +%F`: around leap days and centuries, and the first and last representable day.
        for (days, date) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (364, "1970-12-31"),
            (365, "1971-01-01"),
            (11_015, "2000-02-28"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (11_322, "2000-12-31"),
            (19_781, "2024-02-28"),
            (19_782, "2024-02-29"),
            (20_487, "2026-02-03"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
            (52_123, "2112-09-16"),
        ] {
            assert_eq!(utc_date(at(days * DAY_US)), date);
            assert_eq!(utc_date(at(days * DAY_US + DAY_US - 1)), date);
        }
    }

    #[test]
    fn every_representable_day_follows_the_previous_one() {
        let is_leap = |year: u32| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let (mut year, mut month, mut day) = (1970_u32, 1_u32, 1_u32);
        for days in 0..=Timestamp::MAX.as_micros() / DAY_US {
            assert_eq!(utc_date(at(days * DAY_US)), format!("{year:04}-{month:02}-{day:02}"));
            let length = match month {
                2 if is_leap(year) => 29,
                2 => 28,
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            (year, month, day) = match (day == length, month == 12) {
                (false, _) => (year, month, day + 1),
                (true, false) => (year, month + 1, 1),
                (true, true) => (year + 1, 1, 1),
            };
        }
    }
}
