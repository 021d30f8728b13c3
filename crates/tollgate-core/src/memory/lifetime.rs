//! How long a state lives, in eight bits: a tiny float, (4 + two bits) × 2^(six bits).
//!
//! Rounded so that a state is never dropped early: a time up, by at most a quarter; the rate at which a bucket leaks down,
//! by as much.

use crate::time::Timestamp;

/// A bucket's rate is kept in parts per 2^20 µs, because large grains leak less than one part a microsecond; the
/// slowest, one part in [`GRAIN_US_MAX`], is then 26.
const RATE_SHIFT: u32 = 20;
/// No bucket has longer grains: 10,000,001 × ⌈400 days / 2^20⌉ / 8.5e9 + 1 µs.
pub(super) const GRAIN_US_MAX: u64 = 40_000;

/// The code of the rate at which a bucket leaks: `quota` parts in `grain_us`.
#[inline]
pub(super) fn rate(quota: u32, grain_us: u64) -> u8 {
    let rate = u64::from(quota) << RATE_SHIFT;
    code_down(if grain_us == 1 { rate } else { rate / grain_us })
}

/// The code of no rate at all, which no limit has: a level that leaks so slowly stays until it is written again.
const STANDSTILL: u8 = 0;

/// The code of a rate at which a level takes no less than so long to leak.
pub(super) fn rate_to_leak(level: u64, us: u64) -> u8 {
    match (u128::from(level) << RATE_SHIFT) / u128::from(us.max(1)) {
        0..5 => STANDSTILL,
        rate => code_down(u64::try_from(rate).unwrap_or(u64::MAX)),
    }
}

/// The smallest such number that is not below `value`.
#[inline]
pub(super) fn code_up(value: u64) -> u8 {
    match value {
        0..=4 => 0,
        // Of the quarters of a power of two, the one after that of the number before.
        _ => code_down(value - 1) + 1,
    }
}

/// The largest such number that is not above `value`, which must be at least 4.
#[inline]
fn code_down(value: u64) -> u8 {
    let exponent = value.ilog2() - 2;
    (exponent << 2) as u8 | (value >> exponent & 3) as u8
}

#[inline]
pub(super) fn coded(code: u8) -> u64 {
    (4 + u64::from(code & 3)) << (code >> 2)
}

/// How long a level takes to leak at a coded rate: in whole grains, so up to one more than the quotient.
pub(super) fn time_to_leak_us(level: u64, code: u8) -> u64 {
    // The rate is (4 + m) × 2^e parts in 2^20 µs.
    let (quarters, exponent) = (4 + u64::from(code & 3), u32::from(code >> 2));
    let quotient = level.div_ceil(quarters);
    let us = match RATE_SHIFT.checked_sub(exponent) {
        Some(_) if code == STANDSTILL => u64::MAX,
        Some(shift) => quotient.saturating_mul(1 << shift),
        None => (quotient >> (exponent - RATE_SHIFT)) + 1,
    };
    // Beyond the end of time, whenever it began: what is not empty then is not dropped then.
    us.saturating_add(GRAIN_US_MAX).min(Timestamp::MAX.as_micros() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::WINDOW_US_MAX;

    #[test]
    fn what_takes_longer_than_there_is_time_to_leak_is_there_until_the_end() {
        let us = time_to_leak_us(u64::MAX >> 11, rate(1, GRAIN_US_MAX));
        assert!(us > Timestamp::MAX.as_micros());
    }

    #[test]
    fn a_rate_to_leak_by_is_never_too_quick_and_a_quarter_too_slow_at_most() {
        for (level, us) in [(1, 1), (60_000_000, 1_000_000), (1 << 52, 7), (1_000, 200_000_000), (12_345, 6_789)] {
            let leaks_us = time_to_leak_us(level, rate_to_leak(level, us));
            assert!(leaks_us >= us && leaks_us <= us / 3 * 4 + 2 * GRAIN_US_MAX, "{level} in {us}: {leaks_us}");
        }
        assert!(time_to_leak_us(1_000, rate_to_leak(1_000, WINDOW_US_MAX)) > Timestamp::MAX.as_micros());
    }

    #[test]
    fn a_lifetime_is_never_shortened_and_at_most_a_quarter_longer() {
        let mut us = 1_u64;
        while us < 4 * WINDOW_US_MAX {
            for us in [us, us + 1, us * 5 / 4, us * 3 / 2, us * 7 / 4 + 1] {
                let up = coded(code_up(us));
                assert!(up >= us && (up <= us + us / 4 || us <= 4), "{us} became {up}");
                let down = coded(code_down(us.max(4)));
                assert!(us < 4 || (down <= us && down >= us - us / 4), "{us} became {down}");
            }
            us *= 2;
        }
    }
}
