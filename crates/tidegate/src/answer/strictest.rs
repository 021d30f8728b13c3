//! Selects the most restrictive of several limits.

use tidegate_core::LimitStatus;

/// Returns whether limit `one` restricts the client more than limit `other`.
///
/// A denial is stricter than an admission. Of two denials, the longer `retry_after` is stricter (*never* is the longest).
/// Of two admissions, the smaller remaining / quota is stricter. `false` if they are equally strict.
fn is_stricter(one: &LimitStatus, other: &LimitStatus) -> bool {
    match (one.allowed, other.allowed) {
        (false, true) => true,
        (true, false) => false,
        (false, false) => one.retry_after > other.retry_after,
        // Compares remaining/quota without dividing: both products are below 2^64.
        (true, true) => {
            u64::from(one.remaining) * u64::from(other.quota) < u64::from(other.remaining) * u64::from(one.quota)
        }
    }
}

/// Returns the pair whose limit status restricts the client most: on a tie the first, `None` if there are no pairs.
///
/// The first part of a pair is any value, which is returned with its status.
pub(super) fn strictest<'a, P: Copy>(
    statuses: impl Iterator<Item = (P, &'a LimitStatus)>,
) -> Option<(P, &'a LimitStatus)> {
    statuses.reduce(|found, next| if is_stricter(next.1, found.1) { next } else { found })
}

#[cfg(test)]
mod tests {
    use tidegate_core::Wait;

    use super::*;

    fn admitted(remaining: u32, quota: u32) -> LimitStatus {
        let wait = Wait::from_micros(1);
        LimitStatus {
            allowed: true,
            cost: 1,
            quota,
            remaining,
            retry_after: Wait::ZERO,
            next_after: wait,
            reset_after: wait,
            late_us: 0,
            refunded_before: 0,
        }
    }

    fn refused(retry_after: Wait) -> LimitStatus {
        LimitStatus { allowed: false, retry_after, ..admitted(0, 10) }
    }

    fn pick(statuses: &[LimitStatus]) -> usize {
        strictest(statuses.iter().enumerate()).unwrap().0
    }

    #[test]
    fn of_admissions_the_smallest_fraction_of_the_quota_wins_not_the_smallest_number() {
        assert_eq!(pick(&[admitted(9, 10), admitted(400, 1_000)]), 1);
        assert_eq!(pick(&[admitted(1, 10), admitted(99, 1_000)]), 1);
        assert_eq!(pick(&[admitted(1, 10), admitted(101, 1_000)]), 0);
        assert_eq!(pick(&[admitted(u32::MAX, u32::MAX), admitted(u32::MAX - 1, u32::MAX)]), 1);
    }

    #[test]
    fn of_denials_the_longest_wait_wins_and_never_is_longest() {
        let (short, long) = (Wait::from_micros(1_000_000), Wait::from_micros(1_000_001));
        assert_eq!(pick(&[refused(short), refused(long)]), 1);
        assert_eq!(pick(&[refused(long), refused(Wait::NEVER), refused(long)]), 1);
    }

    #[test]
    fn denial_is_stricter_than_any_admission() {
        assert_eq!(pick(&[admitted(0, 10), refused(Wait::from_micros(1)), admitted(0, 10)]), 1);
    }

    #[test]
    fn of_equals_the_first_wins() {
        assert_eq!(pick(&[admitted(5, 10), admitted(50, 100)]), 0);
        assert_eq!(pick(&[refused(Wait::from_micros(7)), refused(Wait::from_micros(7))]), 0);
        assert_eq!(pick(&[refused(Wait::NEVER), refused(Wait::NEVER)]), 0);
        assert!(strictest(std::iter::empty::<((), &LimitStatus)>()).is_none());
    }
}
