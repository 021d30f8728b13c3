//! A whole number as JSON has them: `3`, and also `3.0` and `3e0`.
//!
//! JSON knows one kind of number, and JSON Schema calls each an integer that has no fraction, however it is written. Some
//! languages have only such numbers and write them so.

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// A whole number that is not negative. One that is too large for 64 bits is the largest: whoever reads it has a bound below that.
#[derive(Clone, Copy)]
pub(super) struct Whole(pub(super) u64);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Whole, D::Error> {
        struct WholeVisitor;
        impl Visitor<'_> for WholeVisitor {
            type Value = Whole;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "a whole number from 0 to {}", u32::MAX)
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Whole, E> {
                Ok(Whole(number))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Whole, E> {
                u64::try_from(number).map(Whole).map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Whole, E> {
                match number >= 0.0 && number.fract() == 0.0 {
                    // From a float `as` stops at the largest.
                    true => Ok(Whole(number as u64)),
                    false => Err(E::invalid_value(Unexpected::Float(number), &self)),
                }
            }
        }
        deserializer.deserialize_u64(WholeVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_without_a_fraction_is_whole_however_it_is_written() {
        for (text, number) in [
            ("0", 0),
            ("-0", 0),
            ("-0.0", 0),
            ("3", 3),
            ("3.0", 3),
            ("3e0", 3),
            ("30E-1", 3),
            ("4294967295.0", u32::MAX.into()),
            ("4294967296.0", 1 << 32),
            ("18446744073709551616", u64::MAX),
            ("1e300", u64::MAX),
        ] {
            assert_eq!(serde_json::from_str::<Whole>(text).expect(text).0, number, "{text}");
        }
    }

    #[test]
    fn anything_else_is_told_what_was_expected() {
        for text in ["-1", "-1.0", "0.5", "1821.25", "1e-1", "\"3\"", "null", "true", "[3]"] {
            let error = serde_json::from_str::<Whole>(text).err().expect(text).to_string();
            assert!(error.contains("expected a whole number from 0 to 4294967295"), "{text}: {error}");
        }
    }
}
