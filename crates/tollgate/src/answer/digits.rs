//! Numbers in headers.
//!
//! **As a value of their own**, mostly without an allocation. A header value made from a number costs two allocations, one made from a
//! static text none. Most of what a limit says is below a thousand, so those texts are laid out at compile time, end to end, each
//! without leading zeros.
//!
//! **Within a text**, eight digits at a time. What remains of a quota and the seconds of a window have no more, and they are told on
//! every response. One word holds all eight, so they are parted from each other side by side instead of one after the other:
//!
//! ```text
//!   12345678 ──▶ 1234 | 5678 ──▶ 12 | 34 | 56 | 78 ──▶ 1 2 3 4 5 6 7 8
//! ```
//!
//! The result is moved as one word, too. Of a general formatter's, a copy of unknown length has to be made, which took longer than
//! the digits themselves.

use http::HeaderValue;

const BYTES: usize = 10 + 90 * 2 + 900 * 3;

static LAID_OUT: [u8; BYTES] = {
    let mut bytes = [0; BYTES];
    let (mut at, mut number) = (0, 0);
    while number < 1_000 {
        if number >= 100 {
            bytes[at] = b'0' + (number / 100) as u8;
            at += 1;
        }
        if number >= 10 {
            bytes[at] = b'0' + (number / 10 % 10) as u8;
            at += 1;
        }
        bytes[at] = b'0' + (number % 10) as u8;
        at += 1;
        number += 1;
    }
    bytes
};

static TEXT: &str = match std::str::from_utf8(&LAID_OUT) {
    Ok(text) => text,
    Err(_) => panic!("digits are text"),
};

/// The number in decimal.
pub(super) fn header_value(number: u64) -> HeaderValue {
    let range = match number {
        0..10 => number..number + 1,
        10..100 => 10 + (number - 10) * 2..10 + (number - 9) * 2,
        100..1_000 => 190 + (number - 100) * 3..190 + (number - 99) * 3,
        _ => return HeaderValue::from_str(itoa::Buffer::new().format(number)).unwrap_or_else(|_| number.into()),
    };
    HeaderValue::from_static(&TEXT[range.start as usize..range.end as usize])
}

/// The digits of a number that has at most eight, and how many they are.
#[inline]
pub(super) fn eight_digits(number: u64) -> Option<([u8; 8], usize)> {
    const ZEROS: u64 = u64::from_le_bytes([b'0'; 8]);
    if number >= 100_000_000 {
        return None;
    }
    // What comes first is in the lower bits throughout. The factors are 2^20 / 100 and 2^10 / 10, rounded up: near enough for what
    // they are multiplied with, which is below 10,000 and below 100.
    let halves = (number / 10_000) | ((number % 10_000) << 32);
    let hundreds = ((halves * 10_486) >> 20) & 0x0000_007F_0000_007F;
    let pairs = hundreds | ((halves - 100 * hundreds) << 16);
    let tens = ((pairs * 103) >> 10) & 0x000F_000F_000F_000F;
    let digits = tens | ((pairs - 10 * tens) << 8);
    let leading = (digits.trailing_zeros() as usize / 8).min(7);
    Some((((digits | ZEROS) >> (8 * leading)).to_le_bytes(), 8 - leading))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_digits_are_those_of_the_number() {
        let is_right = |number: u64| {
            let (digits, count) = eight_digits(number).unwrap();
            digits[..count] == *number.to_string().as_bytes()
        };
        // Every half beside the smallest and the largest, and whatever has one digit more than the one before.
        let halves = (0..10_000).flat_map(|half| [half, half * 10_000, half * 10_000 + 9_999, 99_990_000 + half]);
        let powers = (0..8).map(|power| 10_u64.pow(power)).flat_map(|power| [power - 1, power, power + 1]);
        for number in halves.chain(powers).chain((0..100_000_000).step_by(997)) {
            assert!(is_right(number), "{number}: {:?}", eight_digits(number));
        }
        assert_eq!([100_000_000, u64::MAX].map(eight_digits), [None; 2]);
    }

    #[test]
    fn every_number_is_its_decimal_text() {
        for number in (0..2_000).chain([9_999, 4_294_967_295, u64::MAX]) {
            assert_eq!(header_value(number), number.to_string().as_str());
        }
    }
}
