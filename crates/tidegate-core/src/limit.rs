//! A limit: at most `quota` units per `window`, by an algorithm.
//!
//! All ranges are validated here, once. Code that holds a [`Limit`] may multiply and add its numbers as the algorithms
//! do without checking for overflow. The calculations are beside the constants.

mod text;

use std::time::Duration;

pub use text::LimitTextError;

use crate::time::Lifetime;

/// The largest quota, burst or queue. 24 bits: multiplied by 2^20 parts of a window it is below 2^53.
pub const QUOTA_MAX: u32 = 10_000_000;
/// The largest quota of `sliding-log`, which keeps one entry per admission.
pub const SLIDING_LOG_QUOTA_MAX: u32 = 100_000;
/// The largest quota at which `sliding` is exact to the microsecond. Above it, `sliding` divides the window into this
/// many ticks.
pub const SLIDING_EXACT_QUOTA_MAX: u32 = 1_000;
/// The shortest window: one millisecond.
pub const WINDOW_US_MIN: u64 = 1_000;
/// The longest window: 400 days. 45 bits, so a timestamp (52 bits) plus two windows is below 2^53.
pub const WINDOW_US_MAX: u64 = 400 * 86_400 * 1_000_000;

/// The maximum number of parts of a window by which the counter pair weighs the previous count. A count of up to
/// [`QUOTA_MAX`] (< 2^24) times 2^20 is far below 2^53.
const PAIR_PARTS_MAX: u64 = 1 << 20;
/// A bucket counts in single microseconds if capacity × ⌈window / 2^20⌉ is below this; see `algorithm/bucket.rs`.
///
/// 8.5e9 × 2^20 = 8.913e15, which leaves 9.4e13 below 2^53 for the rounding of the scale
/// (at most one part per unit of capacity, 1e7).
const GRAIN_DIVISOR: u64 = 8_500_000_000;

/// How a limit counts. Defaults to `sliding` in the text form of a limit.
///
/// The crate's front page states what each algorithm guarantees; `docs/algorithms.md` has the arithmetic.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Algorithm {
    /// Never more than the quota in any trailing window; exact up to a quota of 1,000.
    Sliding,
    /// Never more than the quota in any trailing window; exact at any quota.
    SlidingLog,
    /// Two counters, weighted: constant memory, approximate.
    SlidingCounter,
    /// One counter per window, which begins at a multiple of its length: up to twice the quota across a boundary.
    FixedWindow,
    /// An average rate that allows bursts.
    TokenBucket,
    /// Evenly spaced requests: each admission carries the time to wait before proceeding.
    LeakyBucket,
}

crate::__names! {
    "algorithm" Algorithm {
        Sliding = "sliding",
        SlidingLog = "sliding-log",
        SlidingCounter = "sliding-counter",
        FixedWindow = "fixed-window",
        TokenBucket = "token-bucket",
        LeakyBucket = "leaky-bucket",
    }
}

impl Algorithm {
    /// All algorithms, in the order of the documentation.
    pub const ALL: [Algorithm; 6] = [
        Algorithm::Sliding,
        Algorithm::SlidingLog,
        Algorithm::SlidingCounter,
        Algorithm::FixedWindow,
        Algorithm::TokenBucket,
        Algorithm::LeakyBucket,
    ];
}

/// The state machine of a limit, with the parameters of its arithmetic, computed once per limit.
// `repr(u8)` keeps the discriminant in a byte of its own, which is quicker to read than a niche inside a field.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub(crate) enum Shape {
    Log(LogShape),
    Pair(PairShape),
    Bucket(BucketShape),
}

/// The parameters of a limit that keeps a log: `sliding` or `sliding-log`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct LogShape {
    /// The length of a tick in microseconds. Admissions with the same ⌊t / tick⌋ share an entry.
    pub(crate) tick_us: u64,
    /// How long a log matters after its newest entry: a window.
    pub(crate) lifetime: Lifetime,
}

/// The parameters of a limit that keeps two counts: `sliding-counter` or `fixed-window`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct PairShape {
    /// Whether the previous window counts: `true` for `sliding-counter`, `false` for `fixed-window`.
    pub(crate) weighs_previous: bool,
    /// The limit's window and its parts.
    pub(crate) cut: WindowCut,
    /// How long a pair matters after the start of its current window: two windows, also for `fixed-window`, since a rule may
    /// change to `sliding-counter`, which needs the previous count.
    pub(crate) lifetime: Lifetime,
}

/// A window divided into parts of equal length, of which the last may be shorter.
///
/// The previous count of a `sliding-counter` is weighed by the number of parts that are left of the window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct WindowCut {
    /// The length of the window, in microseconds.
    pub(crate) window_us: u64,
    /// The length of a part, in microseconds.
    pub(crate) part_us: u64,
    /// The number of parts.
    pub(crate) parts: u64,
}

/// The parameters of a limit that keeps a bucket: `token-bucket` or `leaky-bucket`.
///
/// A level is counted in parts of a unit, and time in grains of one or more microseconds; see `algorithm/bucket.rs`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct BucketShape {
    /// The largest level, in parts: the burst, or the queue plus the unit in service, times `parts_per_unit`.
    pub(crate) full: u64,
    /// The number of parts in one unit. A grain leaks `quota` parts.
    pub(crate) parts_per_unit: u64,
    /// The limit's quota.
    pub(crate) quota: u64,
    /// The resolution of time, in microseconds.
    grain_us: u32,
    /// Whether an admission carries a wait (`leaky-bucket`).
    pub(crate) is_leaky: bool,
}

/// At most `quota` units per `window`, by an [`Algorithm`].
///
/// ```
/// use tidegate_core::{Algorithm, Limit};
///
/// let limit: Limit = "100/min token-bucket burst=20".parse()?;
/// assert_eq!(limit.algorithm(), Algorithm::TokenBucket);
/// assert_eq!(limit.burst(), Some(20));
/// assert_eq!(limit.to_string(), "100/min token-bucket burst=20");
///
/// let error = "10/fortnight".parse::<Limit>().unwrap_err();
/// assert!(error.to_string().contains("ms, s, min, h, day, week"));
/// # Ok::<(), tidegate_core::LimitTextError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Limit {
    window_us: u64,
    shape: Shape,
    quota: u32,
    /// Burst or queue; the quota for the algorithms that have neither.
    cost_max: u32,
    algorithm: Algorithm,
    count_denied: bool,
}

/// The reason why a limit is invalid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// The quota is 0 or too large.
    #[error("a quota must be from 1 to {max}{}, found {got}", .of.map(|a| format!(" for {a}")).unwrap_or_default())]
    Quota {
        /// The rejected quota.
        got: u64,
        /// The largest accepted quota.
        max: u32,
        /// The algorithm, if `max` is specific to it; else `None`.
        of: Option<Algorithm>,
    },
    /// The window is too short or too long.
    #[error("{}; found {}", text::WindowRange { got_us: *.got_us }, in_unit(*.got_us))]
    Window {
        /// The rejected window, in microseconds.
        got_us: u64,
    },
    /// The burst or the queue is 0 or too large.
    #[error("{option} must be from 1 to {QUOTA_MAX}, found {got}")]
    Capacity {
        /// `burst` or `queue`.
        option: &'static str,
        /// The rejected value.
        got: u64,
    },
    /// The algorithm does not have this option.
    #[error("{option} is an option of {belongs_to}, not of {algorithm}")]
    Option {
        /// `burst` or `queue`.
        option: &'static str,
        /// The name of the algorithm that has this option.
        belongs_to: &'static str,
        /// The limit's own algorithm.
        algorithm: Algorithm,
    },
}

/// Formats a window in the largest unit that divides it, such as `500day`.
fn in_unit(window_us: u64) -> String {
    let (count, unit) = text::in_largest_unit(window_us);
    format!("{count}{unit}")
}

impl Limit {
    /// Creates a `sliding` limit of `quota` units per `window`.
    ///
    /// The window is truncated to whole microseconds.
    ///
    /// # Errors
    /// Returns an error if the quota is not from 1 to 10,000,000, or the window is not from 1 ms to 400 days.
    pub fn new(quota: u64, window: Duration) -> Result<Limit, LimitError> {
        let window_us = u64::try_from(window.as_micros()).unwrap_or(u64::MAX);
        Limit::build(quota, window_us, Algorithm::Sliding, None, false)
    }

    /// Returns this limit with another algorithm.
    ///
    /// Quota, window and `count_denied` stay. Burst and queue are reset to the quota.
    ///
    /// # Errors
    /// Returns an error if the quota is too large for the algorithm: `sliding-log` accepts up to 100,000.
    pub fn with_algorithm(self, algorithm: Algorithm) -> Result<Limit, LimitError> {
        Limit::build(u64::from(self.quota), self.window_us, algorithm, None, self.count_denied)
    }

    /// Returns this `token-bucket` limit with a capacity of `burst` units. Defaults to the quota.
    ///
    /// # Errors
    /// Returns an error if the algorithm is not `token-bucket`, or the burst is not from 1 to 10,000,000.
    pub fn with_burst(self, burst: u64) -> Result<Limit, LimitError> {
        self.with_capacity("burst", burst)
    }

    /// Returns this `leaky-bucket` limit with a queue of at most `queue` waiting units. Defaults to the quota.
    ///
    /// # Errors
    /// Returns an error if the algorithm is not `leaky-bucket`, or the queue is not from 1 to 10,000,000.
    pub fn with_queue(self, queue: u64) -> Result<Limit, LimitError> {
        self.with_capacity("queue", queue)
    }

    /// Returns this limit, set to charge denied requests too (`true`) or not. Defaults to `false`.
    ///
    /// A denied request is charged only up to the quota. With `true`, a client that keeps sending after a denial stays
    /// denied.
    #[must_use]
    pub fn with_count_denied(self, count_denied: bool) -> Limit {
        Limit { count_denied, ..self }
    }

    /// Returns this limit with another quota.
    ///
    /// The changed limit counts on the same counter, so units already used stay used. A burst or queue that equals
    /// the old quota becomes the new quota; another value stays.
    ///
    /// # Errors
    /// Returns an error if the quota is out of range for the algorithm.
    pub fn with_quota(self, quota: u64) -> Result<Limit, LimitError> {
        let capacity = (self.cost_max != self.quota).then_some(u64::from(self.cost_max));
        Limit::build(quota, self.window_us, self.algorithm, capacity, self.count_denied)
    }

    /// Returns the quota: the units per window.
    pub const fn quota(&self) -> u32 {
        self.quota
    }

    /// Returns the window in microseconds.
    pub const fn window_us(&self) -> u64 {
        self.window_us
    }

    /// Returns the window.
    pub const fn window(&self) -> Duration {
        Duration::from_micros(self.window_us)
    }

    /// Returns the algorithm.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the capacity of a `token-bucket`, in units; `None` for other algorithms.
    pub fn burst(&self) -> Option<u32> {
        (self.algorithm == Algorithm::TokenBucket).then_some(self.cost_max)
    }

    /// Returns the maximum number of waiting units in a `leaky-bucket`; `None` for other algorithms.
    pub fn queue(&self) -> Option<u32> {
        (self.algorithm == Algorithm::LeakyBucket).then_some(self.cost_max)
    }

    /// Returns whether denied requests are charged too.
    pub const fn count_denied(&self) -> bool {
        self.count_denied
    }

    /// Returns the largest cost that can ever be admitted: the burst, the queue, or else the quota.
    pub const fn cost_max(&self) -> u32 {
        self.cost_max
    }

    /// Returns an upper bound on the units admitted within any trailing window, however the requests are timed.
    ///
    /// The quota for `sliding` and `sliding-log`, more for the others. The table is on the crate's front page.
    pub fn most_in_any_window(&self) -> u64 {
        let (quota, cost_max) = (u64::from(self.quota), u64::from(self.cost_max));
        match self.algorithm {
            Algorithm::Sliding | Algorithm::SlidingLog => quota,
            Algorithm::SlidingCounter | Algorithm::FixedWindow => 2 * quota,
            Algorithm::TokenBucket => cost_max + quota,
            Algorithm::LeakyBucket => cost_max + 1 + quota,
        }
    }

    /// Returns a number that identifies the algorithm and the window. It is the scope of a key in `Scope::Explicit`.
    #[inline(always)]
    pub(crate) const fn scope(&self) -> u64 {
        self.window_us << 8 | 0x10 | self.algorithm as u64
    }

    /// Returns the state machine and its parameters.
    pub(crate) const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns this limit with another burst, if `option` is `burst`, or another queue, if it is `queue`.
    ///
    /// # Errors
    /// Returns an error if the algorithm does not have the option, or `capacity` is not 1 to 10,000,000.
    fn with_capacity(self, option: &'static str, capacity: u64) -> Result<Limit, LimitError> {
        let belongs_to = if option == "burst" { Algorithm::TokenBucket } else { Algorithm::LeakyBucket };
        if self.algorithm != belongs_to {
            return Err(LimitError::Option { option, belongs_to: belongs_to.as_str(), algorithm: self.algorithm });
        }
        let quota = u64::from(self.quota);
        Limit::build(quota, self.window_us, self.algorithm, Some(capacity), self.count_denied)
    }

    /// Validates the values and creates the limit.
    ///
    /// `capacity` is the burst or the queue; `None` is the quota. It must be `None` for algorithms that have neither;
    /// this is not checked.
    ///
    /// # Errors
    /// Returns an error for the first of quota, window and capacity that is out of range.
    fn build(
        quota: u64,
        window_us: u64,
        algorithm: Algorithm,
        capacity: Option<u64>,
        count_denied: bool,
    ) -> Result<Limit, LimitError> {
        let (max, of) = match algorithm {
            Algorithm::SlidingLog => (SLIDING_LOG_QUOTA_MAX, Some(algorithm)),
            _ => (QUOTA_MAX, None),
        };
        let quota = in_range(quota, max).ok_or(LimitError::Quota { got: quota, max, of })?;
        if !(WINDOW_US_MIN..=WINDOW_US_MAX).contains(&window_us) {
            return Err(LimitError::Window { got_us: window_us });
        }
        let cost_max = match capacity {
            None => quota,
            Some(got) => {
                let option = if algorithm == Algorithm::LeakyBucket { "queue" } else { "burst" };
                in_range(got, QUOTA_MAX).ok_or(LimitError::Capacity { option, got })?
            }
        };
        let shape = Shape::new(algorithm, quota, window_us, cost_max);
        Ok(Limit { window_us, shape, quota, cost_max, algorithm, count_denied })
    }
}

impl Shape {
    /// Computes the state machine of an algorithm and its parameters. All values must be in range.
    fn new(algorithm: Algorithm, quota: u32, window_us: u64, cost_max: u32) -> Shape {
        let log = |tick_us| Shape::Log(LogShape { tick_us, lifetime: Lifetime::of_us(window_us) });
        let (cut, lifetime) = (WindowCut::new(window_us), Lifetime::of_us(2 * window_us));
        let pair = |weighs_previous| Shape::Pair(PairShape { weighs_previous, cut, lifetime });
        let bucket = |capacity, is_leaky| Shape::Bucket(BucketShape::new(quota, capacity, window_us, is_leaky));
        match algorithm {
            Algorithm::Sliding if quota > SLIDING_EXACT_QUOTA_MAX => {
                log(window_us.div_ceil(u64::from(SLIDING_EXACT_QUOTA_MAX)))
            }
            Algorithm::Sliding | Algorithm::SlidingLog => log(1),
            Algorithm::SlidingCounter => pair(true),
            Algorithm::FixedWindow => pair(false),
            Algorithm::TokenBucket => bucket(cost_max.into(), false),
            Algorithm::LeakyBucket => bucket(u64::from(cost_max) + 1, true),
        }
    }
}

impl BucketShape {
    /// Computes the parameters of a bucket.
    ///
    /// `capacity` is the burst, or the queue plus 1; `is_leaky` is `true` for a leaky bucket. All values must have been
    /// validated.
    fn new(quota: u32, capacity: u64, window_us: u64, is_leaky: bool) -> BucketShape {
        // capacity ≤ 1e7 + 1 and ⌈window / 2^20⌉ < 2^25: the product is below 2^49.
        let grain_us = capacity * window_us.div_ceil(1 << 20) / GRAIN_DIVISOR + 1;
        let parts_per_unit = window_us.div_ceil(grain_us);
        let full = capacity * parts_per_unit;
        let quota = u64::from(quota);
        let grain_us = u32::try_from(grain_us).expect("a grain is at most 39,480 µs");
        BucketShape { full, parts_per_unit, quota, grain_us, is_leaky }
    }

    /// Returns the largest level, in units: the burst, or the queue plus the unit in service.
    pub(crate) const fn capacity(&self) -> u64 {
        self.full / self.parts_per_unit
    }

    /// Returns the grain: the resolution of the bucket's time, in microseconds.
    #[inline(always)]
    pub(crate) const fn grain_us(&self) -> u64 {
        self.grain_us as u64
    }
}

impl WindowCut {
    /// Divides a window, which must not be zero, into at most 2^20 parts.
    pub(crate) const fn new(window_us: u64) -> WindowCut {
        let part_us = window_us.div_ceil(PAIR_PARTS_MAX);
        let parts = window_us.div_ceil(part_us);
        WindowCut { window_us, part_us, parts }
    }
}

/// Returns `value` if it is 1 to `max`, else `None`.
fn in_range(value: u64, max: u32) -> Option<u32> {
    u32::try_from(value).ok().filter(|value| (1..=max).contains(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn level_of_the_largest_bucket_is_below_two_to_the_53() {
        for window_us in [WINDOW_US_MIN, 999_999, 60_000_000, 86_400_000_000, WINDOW_US_MAX - 1, WINDOW_US_MAX] {
            for capacity in [1, 2, 999, 52_125, 103_000, 103_200, 9_999_999, u64::from(QUOTA_MAX) + 1] {
                let shape = BucketShape::new(1, capacity, window_us, true);
                let level_max = u128::from(capacity) * u128::from(shape.parts_per_unit);
                assert!(level_max + u128::from(QUOTA_MAX) < 1 << 53, "{capacity} in {window_us}: {shape:?}");
                assert!(shape.parts_per_unit * shape.grain_us() >= window_us, "rounding favours refusal");
                assert_eq!(shape.capacity(), capacity);
            }
        }
    }

    /// A check copies its limits, so their size is part of its cost.
    #[test]
    fn limit_is_at_most_64_bytes() {
        assert!(size_of::<Limit>() <= 64, "{}", size_of::<Limit>());
    }

    #[test]
    fn common_buckets_count_in_single_microseconds() {
        let day = Limit::new(100_000, Duration::from_secs(86_400)).unwrap();
        let day = day.with_algorithm(Algorithm::TokenBucket).unwrap();
        let Shape::Bucket(shape) = day.shape() else { panic!("a bucket") };
        assert_eq!((shape.grain_us(), shape.parts_per_unit), (1, 86_400_000_000));
    }

    #[test]
    fn burst_follows_a_changed_quota_only_if_they_were_equal() {
        let limit: Limit = "100/min token-bucket".parse().unwrap();
        assert_eq!(limit.with_quota(50).unwrap().burst(), Some(50));
        let limit: Limit = "100/min token-bucket burst=20".parse().unwrap();
        assert_eq!(limit.with_quota(50).unwrap().burst(), Some(20));
    }
}
