//! Division by a precomputed divisor: two multiplications instead of a division.
//!
//! A limit's quota and window are fixed when the limit is created, and every check divides by them several times. With
//! r = ⌊(2^64 − 1) / d⌋ the estimate ⌊n × r / 2^64⌋ is the quotient ⌊n / d⌋ or one less, for every n. The remainder
//! n − estimate × d shows which: it is d or more exactly if the estimate is one too small.

/// A divisor, not zero, with its precomputed reciprocal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Divisor {
    by: u64,
    reciprocal: u64,
}

impl Divisor {
    /// Prepares division by `by`.
    ///
    /// # Panics
    /// Panics if `by` is zero.
    pub(crate) const fn new(by: u64) -> Divisor {
        Divisor { by, reciprocal: u64::MAX / by }
    }

    /// Returns the divisor as a number.
    #[inline(always)]
    pub(crate) const fn get(self) -> u64 {
        self.by
    }

    /// Returns `n` divided by the divisor, rounded down.
    #[inline(always)]
    pub(crate) const fn div(self, n: u64) -> u64 {
        let estimate = ((n as u128 * self.reciprocal as u128) >> 64) as u64;
        estimate + (n - estimate * self.by >= self.by) as u64
    }

    /// Returns `n` divided by the divisor, rounded down, and the remainder.
    #[inline(always)]
    pub(crate) const fn div_rem(self, n: u64) -> (u64, u64) {
        let estimate = ((n as u128 * self.reciprocal as u128) >> 64) as u64;
        let left = n - estimate * self.by;
        match left.checked_sub(self.by) {
            Some(less) => (estimate + 1, less),
            None => (estimate, left),
        }
    }

    /// Returns `n` divided by the divisor, rounded up. `n + (divisor − 1)` must not overflow.
    #[inline(always)]
    pub(crate) const fn div_ceil(self, n: u64) -> u64 {
        self.div(n + (self.by - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns numbers of every bit length, the powers of two with their neighbours, and the ends of the range.
    fn numbers() -> impl Iterator<Item = u64> {
        let mut random = 88_172_645_463_325_252_u64;
        let spread = (0..4_000).map(move |step| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random >> (step % 64)
        });
        let edges = (0..64).flat_map(|bit| [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + 1]);
        edges.chain([u64::MAX, u64::MAX - 1, 34_560_000_000_000, 10_000_000]).chain(spread)
    }

    #[test]
    fn divisor_agrees_with_native_division() {
        for by in numbers().filter(|&by| by > 0) {
            let divisor = Divisor::new(by);
            let check = |n: u64| {
                assert_eq!(divisor.div_rem(n), (n / by, n % by), "{n} by {by}");
                assert_eq!(divisor.div(n), n / by, "{n} by {by}");
                if n.checked_add(by - 1).is_some() {
                    assert_eq!(divisor.div_ceil(n), n.div_ceil(by), "{n} by {by}");
                }
            };
            numbers().take(400).for_each(check);
            // The estimate is most likely to be wrong at a multiple and its neighbours.
            for times in numbers().step_by(16).map(|times| times % (u64::MAX / by).max(1)) {
                let multiple = by * times;
                [multiple.saturating_sub(1), multiple, multiple.saturating_add(1)].into_iter().for_each(check);
            }
        }
    }
}
