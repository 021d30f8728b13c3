//! The lifetime of a state in eight bits, its *code*: a small float, (4 + two bits) × 2^(six bits).
//!
//! Values are rounded so that a state is never dropped early: a time is rounded up by at most a quarter, and the rate
//! at which a bucket leaks is rounded down by at most a quarter.

use crate::time::Timestamp;

/// The base-2 logarithm of the time unit of a rate. A rate is in parts per 2^20 µs, because a bucket with large grains
/// leaks less than one part per microsecond. The slowest rate, one part per [`GRAIN_US_MAX`], is then 26.
const RATE_SHIFT: u32 = 20;
/// An upper bound on the grain of any bucket, in µs: 10,000,001 × ⌈400 days / 2^20⌉ / 8.5e9 + 1.
pub(super) const GRAIN_US_MAX: u64 = 40_000;

/// Returns the eight-bit code of the rate of `quota` parts per `grain_us` microseconds.
///
/// The rate is rounded down by at most a quarter. `grain_us` must be 1 to [`GRAIN_US_MAX`], and `quota` at least 1.
#[inline(always)]
pub(super) fn rate_code(quota: u64, grain_us: u64) -> u8 {
    let rate = quota << RATE_SHIFT;
    code_down(if grain_us == 1 { rate } else { rate / grain_us })
}

/// The code of a rate of zero: the level never leaks. No limit's own rate has this code.
const STANDSTILL: u8 = 0;

/// Returns the code of the fastest coded rate at which `level` parts take at least `us` microseconds to leak.
///
/// Returns [`STANDSTILL`] if that rate is too slow to be coded.
pub(super) fn rate_code_to_leak(level: u64, us: u64) -> u8 {
    match (u128::from(level) << RATE_SHIFT) / u128::from(us.max(1)) {
        0..5 => STANDSTILL,
        rate => code_down(u64::try_from(rate).unwrap_or(u64::MAX)),
    }
}

/// Returns the eight-bit code of the smallest codable number that is at least `value`.
///
/// That is 4 for values below 4; otherwise it is at most a quarter more than `value`.
#[inline]
pub(super) fn code_up(value: u64) -> u8 {
    match value {
        0..=4 => 0,
        // Codes are ordered like their numbers, so the successor of the code below `value` is at least `value`.
        _ => code_down(value - 1) + 1,
    }
}

/// Returns the eight-bit code of the largest codable number that is at most `value`, which must be at least 4.
#[inline(always)]
fn code_down(value: u64) -> u8 {
    // The lowest bit makes no difference, and spares the test for zero.
    let exponent = (value | 1).ilog2() - 2;
    (exponent << 2) as u8 | (value >> exponent & 3) as u8
}

/// Returns the number that an eight-bit code stands for.
#[inline]
pub(super) fn decode(code: u8) -> u64 {
    (4 + u64::from(code & 3)) << (code >> 2)
}

/// Returns an upper bound on the time, in microseconds, in which `level` parts leak at the rate with this code.
///
/// A bucket leaks in whole grains, so [`GRAIN_US_MAX`] is added to the quotient. The result is at most one microsecond
/// more than [`Timestamp::MAX`].
pub(super) fn time_to_leak_us(level: u64, code: u8) -> u64 {
    // The rate is (4 + m) × 2^e parts in 2^20 µs.
    let (quarters, exponent) = (4 + u64::from(code & 3), u32::from(code >> 2));
    let quotient = level.div_ceil(quarters);
    let us = match RATE_SHIFT.checked_sub(exponent) {
        Some(_) if code == STANDSTILL => u64::MAX,
        Some(shift) => quotient.saturating_mul(1 << shift),
        None => (quotient >> (exponent - RATE_SHIFT)) + 1,
    };
    // Added to any time, the maximum is later than `Timestamp::MAX`: such a level never expires.
    us.saturating_add(GRAIN_US_MAX).min(Timestamp::MAX.as_micros() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::WINDOW_US_MAX;

    #[test]
    fn level_that_leaks_after_the_latest_timestamp_never_expires() {
        let us = time_to_leak_us(u64::MAX >> 11, rate_code(1, GRAIN_US_MAX));
        assert!(us > Timestamp::MAX.as_micros());
    }

    #[test]
    fn rate_to_leak_is_never_too_fast_and_at_most_a_quarter_too_slow() {
        for (level, us) in [(1, 1), (60_000_000, 1_000_000), (1 << 52, 7), (1_000, 200_000_000), (12_345, 6_789)] {
            let leaks_us = time_to_leak_us(level, rate_code_to_leak(level, us));
            assert!(leaks_us >= us && leaks_us <= us / 3 * 4 + 2 * GRAIN_US_MAX, "{level} in {us}: {leaks_us}");
        }
        assert!(time_to_leak_us(1_000, rate_code_to_leak(1_000, WINDOW_US_MAX)) > Timestamp::MAX.as_micros());
    }

    #[test]
    fn coded_lifetime_is_never_shorter_and_at_most_a_quarter_longer() {
        let mut us = 1_u64;
        while us < 4 * WINDOW_US_MAX {
            for us in [us, us + 1, us * 5 / 4, us * 3 / 2, us * 7 / 4 + 1] {
                let up = decode(code_up(us));
                assert!(up >= us && (up <= us + us / 4 || us <= 4), "{us} became {up}");
                let down = decode(code_down(us.max(4)));
                assert!(us < 4 || (down <= us && down >= us - us / 4), "{us} became {down}");
            }
            us *= 2;
        }
    }
}
