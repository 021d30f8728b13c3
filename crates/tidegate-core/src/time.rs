//! Timestamps and clocks. Time is a number of microseconds, and always an argument.
//!
//! A Lua number is a double, exact up to 2^53. Microseconds since the epoch fit, with room to add a window;
//! nanoseconds do not. So every time in Tidegate is a whole number of microseconds below 2^52, in Rust and in Redis,
//! and the two can be compared exactly.
//!
//! Only [`SystemClock`] reads a clock. All other code takes the time as an argument, so a test can run a year of
//! traffic in a millisecond.

mod lifetime;

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub(crate) use self::lifetime::Lifetime;

/// A point in time: microseconds since the Unix epoch, below 2^52 (the year 2112).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The Unix epoch.
    pub const ZERO: Timestamp = Timestamp(0);
    /// The latest timestamp, 2^52 − 1 µs. Adding any window to it stays below 2^53.
    pub const MAX: Timestamp = Timestamp((1 << 52) - 1);

    /// Creates the timestamp `micros` microseconds after the epoch, at most [`Timestamp::MAX`].
    pub const fn from_micros(micros: u64) -> Self {
        if micros > Self::MAX.0 { Self::MAX } else { Timestamp(micros) }
    }

    /// Returns the microseconds since the epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns the timestamp `micros` microseconds later, at most [`Timestamp::MAX`].
    #[must_use]
    pub const fn plus_micros(self, micros: u64) -> Self {
        Self::from_micros(self.0.saturating_add(micros))
    }

    /// Returns the timestamp `micros` microseconds earlier, at least [`Timestamp::ZERO`].
    #[must_use]
    pub const fn minus_micros(self, micros: u64) -> Self {
        Timestamp(self.0.saturating_sub(micros))
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}µs", self.0)
    }
}

/// A source of time for a store.
pub trait Clock: Send + Sync {
    /// Returns the current time.
    fn now(&self) -> Timestamp;

    /// Returns the current time, read again after another thread has already decided at the later time `floor`.
    ///
    /// Two threads may read the clock in one order and reach a counter in the other. The thread with the earlier
    /// time then calls this method. A clock that never runs backwards should return `floor` if it reads less, because
    /// two cores may disagree by a tick. A clock that can run backwards must return what it reads, so that the
    /// counters can be corrected. The default implementation returns [`Clock::now`].
    fn now_at_least(&self, floor: Timestamp) -> Timestamp {
        let _ = floor;
        self.now()
    }
}

impl<C: Clock + ?Sized> Clock for std::sync::Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }
    fn now_at_least(&self, floor: Timestamp) -> Timestamp {
        (**self).now_at_least(floor)
    }
}

/// The system's clock: the wall time at creation, advanced by a monotonic counter.
///
/// It never steps. Corrections of the wall clock while the process runs have no effect on it, so they never shorten or
/// lengthen a window. Creating the first clock of a process blocks for about 10 ms, in which it measures the rate of
/// the counter.
pub struct SystemClock {
    counter: quanta::Clock,
    counter_at_start: u64,
    wall_at_start_us: u64,
    /// Microseconds per 2^64 steps of the counter.
    us_per_step: u64,
}

impl SystemClock {
    /// Creates a clock that starts at the current wall time.
    #[allow(clippy::disallowed_methods)] // the only place that may read a clock
    pub fn new() -> Self {
        let counter = quanta::Clock::new();
        let us_per_step = us_per_step(&counter);
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        SystemClock {
            counter_at_start: counter.raw(),
            counter,
            wall_at_start_us: u64::try_from(wall.as_micros()).map_or(0, |us| Timestamp::from_micros(us).as_micros()),
            us_per_step,
        }
    }
}

/// How long the rate of the counter is measured. The times of the start and the end are exact to 100 ns, so the error
/// of the rate is below 20 parts in a million, which is about the error of a quartz oscillator.
const MEASURED_FOR: Duration = Duration::from_millis(10);

/// Returns the microseconds per 2^64 steps of the counter. Measures them once per process.
///
/// quanta calibrates the counter for as little as a millisecond, with single reads. An interrupt between two reads can
/// make its clock wrong by one percent for as long as the process runs.
fn us_per_step(counter: &quanta::Clock) -> u64 {
    static US_PER_STEP: OnceLock<u64> = OnceLock::new();
    *US_PER_STEP.get_or_init(|| {
        let (start, steps_at_start) = read_both(counter);
        std::thread::sleep(MEASURED_FOR);
        let (end, steps_at_end) = read_both(counter);
        let steps = u128::from(steps_at_end.saturating_sub(steps_at_start).max(1));
        let us = ((end - start).as_nanos() << 64) / (1_000 * steps);
        u64::try_from(us).unwrap_or(u64::MAX)
    })
}

/// Reads the monotonic clock and the counter at nearly the same time.
///
/// The thread may be interrupted between the two reads, so this returns the fastest of many attempts.
#[allow(clippy::disallowed_methods)] // the only place that may read a clock
fn read_both(counter: &quanta::Clock) -> (Instant, u64) {
    let attempt = || {
        let before = Instant::now();
        let steps = counter.raw();
        (before.elapsed(), before, steps)
    };
    let mut fastest = attempt();
    for _ in 0..100 {
        fastest = std::cmp::min(fastest, attempt());
    }
    (fastest.1, fastest.2)
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    #[inline(always)]
    fn now(&self) -> Timestamp {
        // Two cores may disagree by a step. The result is never before the start.
        let steps = self.counter.raw().saturating_sub(self.counter_at_start);
        let elapsed_us = ((u128::from(steps) * u128::from(self.us_per_step)) >> 64) as u64;
        Timestamp::from_micros(self.wall_at_start_us.wrapping_add(elapsed_us))
    }

    #[inline]
    fn now_at_least(&self, floor: Timestamp) -> Timestamp {
        self.now().max(floor)
    }
}

impl fmt::Debug for SystemClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SystemClock").field("wall_at_start_us", &self.wall_at_start_us).finish()
    }
}

/// A clock that changes only when it is set or advanced, for tests and simulations. It can be set back.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Creates a clock at `start`.
    pub fn new(start: Timestamp) -> Self {
        ManualClock(AtomicU64::new(start.as_micros()))
    }

    /// Sets the clock to `now`, which may be earlier than its current time.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::SeqCst);
    }

    /// Moves the clock forward by `by`, in whole microseconds, at most to [`Timestamp::MAX`].
    ///
    /// Concurrent calls may lose an advance.
    pub fn advance(&self, by: Duration) {
        let by_us = u64::try_from(by.as_micros()).unwrap_or(u64::MAX);
        self.set(self.now().plus_micros(by_us));
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn timestamps_saturate_instead_of_wrapping() {
        assert_eq!(Timestamp::from_micros(u64::MAX), Timestamp::MAX);
        assert_eq!(Timestamp::MAX.plus_micros(u64::MAX), Timestamp::MAX);
        assert_eq!(Timestamp::ZERO.minus_micros(1), Timestamp::ZERO);
    }

    #[test]
    #[allow(clippy::disallowed_methods)] // compares with the clock that `SystemClock` reads
    fn system_clock_starts_at_wall_time() {
        let wall_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64;
        let apart_us = SystemClock::new().now().as_micros().abs_diff(wall_us);
        assert!(apart_us < 60_000_000, "{apart_us} µs apart");
    }

    /// Compares the clock with another one between the same two readings, so that a pause of the process moves both.
    #[test]
    #[allow(clippy::disallowed_methods)] // compares with the clock that `SystemClock` reads
    fn system_clock_keeps_pace_with_the_monotonic_clock() {
        let clock = SystemClock::new();
        let (outer, first) = (Instant::now(), clock.now());
        let inner = Instant::now();
        let mut last = first;
        while inner.elapsed() < Duration::from_millis(20) {
            let now = clock.now();
            assert!(now >= last, "{now:?} after {last:?}");
            last = now;
        }
        let least_us = inner.elapsed().as_micros() as u64;
        let passed_us = clock.now().as_micros() - first.as_micros();
        let most_us = outer.elapsed().as_micros() as u64;
        // Times are rounded to microseconds. The rate is allowed an error of 100 parts in a million.
        let range_us = least_us - least_us / 10_000 - 2..=most_us + most_us / 10_000 + 2;
        assert!(range_us.contains(&passed_us), "{passed_us} µs, expected {range_us:?}");
    }

    #[test]
    fn system_clock_returns_the_floor_while_it_reads_less() {
        let clock = Arc::new(SystemClock::new());
        let now = clock.now();
        assert!(clock.now_at_least(now.minus_micros(1_000_000)) >= now);
        let later = now.plus_micros(3_600_000_000);
        assert_eq!(clock.now_at_least(later), later);
        assert_eq!((*clock).now_at_least(later), later);
    }

    #[test]
    fn manual_clock_returns_what_it_reads_whatever_the_floor() {
        let clock = Arc::new(ManualClock::new(Timestamp::from_micros(7)));
        assert_eq!(clock.now_at_least(Timestamp::from_micros(9)), Timestamp::from_micros(7));
        clock.advance(Duration::from_micros(5));
        assert_eq!(clock.now(), Timestamp::from_micros(12));
        clock.set(Timestamp::from_micros(3));
        assert_eq!(clock.now(), Timestamp::from_micros(3));
        clock.advance(Duration::MAX);
        assert_eq!(clock.now(), Timestamp::MAX);
    }
}
