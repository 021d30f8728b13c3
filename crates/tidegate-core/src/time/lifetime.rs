//! A length of time in eight bits.

/// How long the state of a counter matters. A small float, (4 + two bits) × 2^(six bits) µs, ordered by length.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Lifetime(pub(crate) u8);

/// The shortest lifetime: 33 ms, so that a counter in steady use is not dropped and added again between any two checks.
const US_MIN: u64 = 1 << 15;

impl Lifetime {
    /// Creates a lifetime of `us` microseconds or [`US_MIN`] if that is longer, rounded up by at most a quarter. `us` must
    /// be below 2^63.
    #[inline(always)]
    pub(crate) const fn of_us(us: u64) -> Lifetime {
        let below = if us > US_MIN { us - 1 } else { US_MIN - 1 };
        let exponent = below.ilog2() - 2;
        // Codes are ordered like their numbers, so the successor of the code below `us` is at least `us`.
        Lifetime(((exponent << 2) as u8 | (below >> exponent & 3) as u8) + 1)
    }

    #[inline(always)]
    pub(crate) const fn as_micros(self) -> u64 {
        (4 + (self.0 & 3) as u64) << (self.0 >> 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetime_is_never_shorter_and_at_most_a_quarter_longer() {
        let mut us = 1_u64;
        while us < 1 << 54 {
            for us in [us, us + 1, us * 5 / 4, us * 3 / 2, us * 7 / 4 + 1] {
                let (up, whole) = (Lifetime::of_us(us).as_micros(), us.max(US_MIN));
                assert!(up >= whole && up <= whole + whole / 4, "{us} became {up}");
            }
            us *= 2;
        }
    }
}
