//! Time is a number of microseconds, and always an argument.
//!
//! A Lua number is a double: exact up to 2^53. Microseconds since the epoch fit with room to add a
//! window; nanoseconds do not. So every time in Tollgate is a whole number of microseconds below
//! 2^52, in Rust and in Redis alike, and the two can be compared to the last digit.
//!
//! Only [`SystemClock`] reads a clock. Everything else is told the time, which is what makes a
//! year of traffic testable in a millisecond.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An instant: microseconds since the Unix epoch, below 2^52 (the year 2112).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The epoch itself.
    pub const ZERO: Timestamp = Timestamp(0);
    /// The latest instant there is. Adding any window to it stays below 2^53.
    pub const MAX: Timestamp = Timestamp((1 << 52) - 1);

    /// The instant `micros` after the epoch, or [`Timestamp::MAX`] if that is later than it.
    pub const fn from_micros(micros: u64) -> Self {
        if micros > Self::MAX.0 { Self::MAX } else { Timestamp(micros) }
    }

    /// Microseconds since the epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// This instant, `micros` later; never beyond [`Timestamp::MAX`].
    #[must_use]
    pub const fn plus_micros(self, micros: u64) -> Self {
        Self::from_micros(self.0.saturating_add(micros))
    }

    /// This instant, `micros` earlier; never before the epoch.
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

/// Where a store gets its time from.
pub trait Clock: Send + Sync {
    /// The present instant.
    fn now(&self) -> Timestamp;

    /// The present instant, asked again because somebody has already seen `floor`.
    ///
    /// Two threads may read the clock in one order and reach a counter in the other. The late one
    /// asks again through this. A clock that cannot run backwards may answer `floor` itself
    /// when it reads less (two cores may disagree by a tick); one that can must answer what it
    /// reads, because then it really did.
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

/// The machine's clock: the wall time when it was made, advanced by the processor's counter.
///
/// It never steps: a correction of the wall clock while the process runs does not reach it, so no
/// window is cut short or stretched by one.
pub struct SystemClock {
    counter: quanta::Clock,
    counter_at_start: u64,
    wall_at_start_us: u64,
    /// Microseconds per 2^64 steps of the counter.
    us_per_step: u64,
}

impl SystemClock {
    /// Reads the wall clock once and goes on from there.
    #[allow(clippy::disallowed_methods)] // the one place that may read a clock
    pub fn new() -> Self {
        let counter = quanta::Clock::new();
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        // 2^40 steps take minutes to hours, so the nanoseconds have nine digits and more.
        let ns_per_2_40_steps = u128::from(counter.delta_as_nanos(0, 1 << 40));
        let us_per_step = (ns_per_2_40_steps << 24) / 1_000;
        SystemClock {
            counter_at_start: counter.raw(),
            counter,
            wall_at_start_us: u64::try_from(wall.as_micros()).map_or(0, |us| Timestamp::from_micros(us).as_micros()),
            us_per_step: u64::try_from(us_per_step).unwrap_or(u64::MAX),
        }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    #[inline(always)]
    fn now(&self) -> Timestamp {
        // Two cores may disagree by a step: never before the start.
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

/// A clock that stands still until told otherwise, for tests and simulations. It may be set back.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that says `start` until it is moved.
    pub fn new(start: Timestamp) -> Self {
        ManualClock(AtomicU64::new(start.as_micros()))
    }

    /// From here on it is `now`, later or earlier.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::SeqCst);
    }

    /// Moves the clock forward.
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

    #[test]
    fn times_saturate_instead_of_wrapping() {
        assert_eq!(Timestamp::from_micros(u64::MAX), Timestamp::MAX);
        assert_eq!(Timestamp::MAX.plus_micros(u64::MAX), Timestamp::MAX);
        assert_eq!(Timestamp::ZERO.minus_micros(1), Timestamp::ZERO);
    }

    #[test]
    fn the_system_clock_starts_at_wall_time_and_does_not_go_back() {
        let clock = SystemClock::new();
        let first = clock.now();
        assert!(first > Timestamp::from_micros(1_700_000_000_000_000));
        assert!(clock.now_at_least(first) >= first);
    }
}
