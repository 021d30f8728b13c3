//! A whole number in JSON: `3`, and also `3.0` and `3e0`.
//!
//! JSON has one kind of number, and to JSON Schema every number without a fraction is an integer, however it is
//! written. Some languages have only floating-point numbers and write them so.
//!
//! The digits are parsed as they are written. A float would round first: `1e-400` would become 0, a peek that is never
//! denied, and `1.00000000000000000001` would become 1.

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// The most characters of a value that an error shows.
const SHOWN_CHARS_MAX: usize = 32;

/// Deserializes a field that is present: a JSON number without a fraction, from 0 on.
///
/// A number that does not fit into 64 bits becomes `u64::MAX`, which every field rejects as too large. The error names
/// `field` and its largest value `max`.
pub(in crate::listeners::http) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
    field: &str,
    max: u32,
) -> Result<u64, D::Error> {
    let text = <&RawValue>::deserialize(deserializer)?.get();
    parse(text).ok_or_else(|| {
        let shown: String = text.chars().take(SHOWN_CHARS_MAX).collect();
        D::Error::custom(format_args!("{field} must be a whole number from 0 to {max}, found {shown}"))
    })
}

/// Returns the value of a JSON number, at most `u64::MAX`.
///
/// Returns `None` if the text is no number, or the number is negative or has a fraction.
fn parse(text: &str) -> Option<u64> {
    let (text, is_negative) = text.strip_prefix('-').map_or((text, false), |rest| (rest, true));
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = || whole.bytes().chain(fraction.bytes());
    if whole.is_empty() || !digits().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    if digits().all(|digit| digit == b'0') {
        return Some(0);
    }
    if is_negative {
        return None;
    }
    // The number of digits before the decimal point. JSON guarantees that the exponent is a number, but it may be a
    // long one.
    let shift = exponent.parse::<i64>().unwrap_or(if exponent.starts_with('-') { i64::MIN } else { i64::MAX });
    let point = i64::try_from(whole.len()).ok()?.saturating_add(shift);
    let mut value = 0_u64;
    for (place, digit) in (0_i64..).zip(digits()) {
        match place < point {
            true => value = value.saturating_mul(10).saturating_add(u64::from(digit - b'0')),
            false if digit != b'0' => return None,
            false => {}
        }
    }
    let zeros = point.saturating_sub(i64::try_from(whole.len() + fraction.len()).ok()?);
    // A digit followed by more than 20 zeros does not fit into 64 bits.
    (0..zeros.clamp(0, 20)).for_each(|_| value = value.saturating_mul(10));
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<u64, serde_json::Error> {
        deserialize(&mut serde_json::Deserializer::from_str(text), "cost", u32::MAX)
    }

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
            ("0e-400", 0),
            ("0.000e99999999999999999999", 0),
            ("1e99999999999999999999", u64::MAX),
            ("300000000000000000000e-20", 3),
            ("0.0003e4", 3),
            ("1.5e1", 15),
        ] {
            assert_eq!(read(text).expect(text), number, "{text}");
        }
    }

    #[test]
    fn anything_else_is_rejected_with_what_is_expected() {
        for text in [
            "-1",
            "-1.0",
            "0.5",
            "1821.25",
            "1e-1",
            "1e-400",
            "1E-99999999999999999999",
            "-1e-400",
            "1.00000000000000000001",
            "0.99999999999999999999999",
            "4294967295.00000000000000001",
            "15e-1",
            "\"3\"",
            "null",
            "true",
            "[3]",
            "{}",
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains("must be a whole number from 0 to 4294967295"), "{text}: {error}");
        }
    }
}
