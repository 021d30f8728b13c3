//! One check by each contestant, called as in a service.
//!
//! | contestant | key | store | clock |
//! |---|---|---|---|
//! | tidegate | `&str` | `MemoryStore` with a cap that is never reached | its default |
//! | governor | `&String` (or `&u64`, for reference) | its default keyed store | its default |
//! | throttlecrab | `&str` | `PeriodicStore` behind a mutex, because it takes `&mut self` | `SystemTime` |

use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use throttlecrab::PeriodicStore;
use tidegate_core::{Algorithm, Check, Demand, Key, Limit, MemoryStore};

use crate::traffic::Request;

/// A rate limiter under measurement.
pub trait Contestant: Sync {
    /// Takes one unit for the key of this request, and returns whether that was admitted.
    fn check(&self, request: &Request) -> bool;

    /// Makes `count` checks and returns the number of admitted ones. Starts over when the requests are used up.
    ///
    /// Returns 0 if `requests` is empty. Many checks are one dynamic call, so that the compiler can inline the check of
    /// each contestant into its loop.
    fn run(&self, requests: &[Request], count: usize) -> usize {
        requests.iter().cycle().take(count).filter(|request| self.check(request)).count()
    }
}

/// The limit of a measurement, independent of the contestant: `quota` units per `window`, with bursts of up to `quota`.
#[derive(Clone, Copy, Debug)]
pub struct LimitSpec {
    /// Units per window, and the largest burst.
    pub quota: u32,
    /// The length of the window.
    pub window: Duration,
}

/// The memory store of Tidegate, with one limit.
pub struct Tidegate {
    store: MemoryStore,
    limit: Limit,
}

impl Tidegate {
    /// Creates a store for one limit of the given algorithm.
    ///
    /// # Panics
    /// Panics if the algorithm does not support this quota and window.
    pub fn new(spec: LimitSpec, algorithm: Algorithm) -> Tidegate {
        let limit = Limit::new(spec.quota.into(), spec.window).and_then(|limit| limit.with_algorithm(algorithm));
        let store = MemoryStore::builder().max_bytes(4 << 30).build();
        Tidegate { store, limit: limit.expect("a valid limit") }
    }
}

impl Contestant for Tidegate {
    #[inline]
    fn check(&self, request: &Request) -> bool {
        let key = Key::new(&request.text).expect("a valid key");
        self.store.check(&Check::one(&Demand::new(self.limit, key))).allowed()
    }
}

/// The memory store of Tidegate, with two limits of one key that are decided together.
pub struct TidegateTwoLimits {
    store: MemoryStore,
    limits: [Limit; 2],
}

impl TidegateTwoLimits {
    /// Creates a store for two `sliding` limits: the given one, and 10,000,000 a day.
    ///
    /// # Panics
    /// Panics if the quota or the window is out of range.
    pub fn new(spec: LimitSpec) -> TidegateTwoLimits {
        let limits = [(spec.quota, spec.window), (10_000_000, Duration::from_secs(86_400))];
        let limits = limits.map(|(quota, window)| Limit::new(quota.into(), window).expect("a valid limit"));
        TidegateTwoLimits { store: MemoryStore::new(), limits }
    }
}

impl Contestant for TidegateTwoLimits {
    #[inline]
    fn check(&self, request: &Request) -> bool {
        let key = Key::new(&request.text).expect("a valid key");
        let demands = self.limits.map(|limit| Demand::new(limit, key));
        self.store.check(&Check::of_distinct(&demands)).allowed()
    }
}

/// governor, with text as keys.
pub struct GovernorText(DefaultKeyedRateLimiter<String>);

impl GovernorText {
    /// Creates a limiter with governor's default store and clock.
    ///
    /// # Panics
    /// Panics if the quota is 0, or if the window is shorter than one nanosecond per unit.
    pub fn new(spec: LimitSpec) -> GovernorText {
        GovernorText(RateLimiter::keyed(governor_quota(spec)))
    }
}

impl Contestant for GovernorText {
    #[inline]
    fn check(&self, request: &Request) -> bool {
        self.0.check_key(&request.text).is_ok()
    }
}

/// governor, with numbers as keys, for reference.
pub struct GovernorNumber(DefaultKeyedRateLimiter<u64>);

impl GovernorNumber {
    /// Creates a limiter with governor's default store and clock.
    ///
    /// # Panics
    /// Panics if the quota is 0, or if the window is shorter than one nanosecond per unit.
    pub fn new(spec: LimitSpec) -> GovernorNumber {
        GovernorNumber(RateLimiter::keyed(governor_quota(spec)))
    }
}

impl Contestant for GovernorNumber {
    #[inline]
    fn check(&self, request: &Request) -> bool {
        self.0.check_key(&request.number).is_ok()
    }
}

fn governor_quota(spec: LimitSpec) -> Quota {
    let burst = NonZeroU32::new(spec.quota).expect("a quota above zero");
    Quota::with_period(spec.window / spec.quota).expect("a period above zero").allow_burst(burst)
}

/// throttlecrab, behind a mutex.
pub struct Throttlecrab {
    limiter: Mutex<throttlecrab::RateLimiter<PeriodicStore>>,
    spec: LimitSpec,
}

impl Throttlecrab {
    /// Creates a limiter with a [`PeriodicStore`].
    pub fn new(spec: LimitSpec) -> Throttlecrab {
        Throttlecrab { limiter: Mutex::new(throttlecrab::RateLimiter::new(PeriodicStore::new())), spec }
    }
}

impl Contestant for Throttlecrab {
    #[inline]
    #[allow(clippy::disallowed_methods)] // throttlecrab takes the time as an argument
    fn check(&self, request: &Request) -> bool {
        // throttlecrab takes periods in whole seconds: the window is rounded down, to at least one second, and the quota
        // is scaled to it.
        let seconds = self.spec.window.as_secs().max(1);
        let per_period = u128::from(self.spec.quota) * u128::from(seconds) * 1_000_000 / self.spec.window.as_micros();
        let mut limiter = self.limiter.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let result = limiter.rate_limit(
            &request.text,
            self.spec.quota.into(),
            per_period as i64,
            seconds as i64,
            1,
            SystemTime::now(),
        );
        result.is_ok_and(|(allowed, _)| allowed)
    }
}
