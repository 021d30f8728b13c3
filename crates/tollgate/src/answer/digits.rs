//! Numbers as header values, mostly without an allocation.
//!
//! A header value made from a number costs two allocations, one made from a static text none. Most of what a limit
//! says is below a thousand, so those texts are laid out at compile time, end to end, each without leading zeros.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_its_decimal_text() {
        for number in (0..2_000).chain([9_999, 4_294_967_295, u64::MAX]) {
            assert_eq!(header_value(number), number.to_string().as_str());
        }
    }
}
