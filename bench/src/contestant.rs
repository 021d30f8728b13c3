//! One check by each contestant, called as a service would call it.
//!
//! | contestant | key | store | clock |
//! |---|---|---|---|
//! | tollgate | the text, borrowed | `MemoryStore` with a cap above what is needed | its own |
//! | governor | `&String` (or `&u64`, for reference) | its default keyed store | its default |
//! | throttlecrab | `&str` | `PeriodicStore` behind a mutex: it wants `&mut self` | `SystemTime` |

use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use throttlecrab::PeriodicStore;
use tollgate_core::{Algorithm, Check, Cost, Demand, Key, Limit, MemoryStore};

use crate::traffic::Request;

/// Something that admits or refuses.
pub trait Contestant: Sync {
    /// Whether this request is admitted, now.
    fn check(&self, request: &Request) -> bool;

    /// Makes the requests, in order; how many were admitted. One dynamic call for many checks, so that
    /// each contestant's check is compiled into its own loop.
    fn run(&self, requests: &[Request], count: usize) -> usize {
        requests.iter().cycle().take(count).filter(|request| self.check(request)).count()
    }
}

/// The limit of a measurement, in the terms of every contestant: `quota` per `window`, bursts up to `quota`.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Units per window, and the burst.
    pub quota: u32,
    /// The window.
    pub window: Duration,
}

/// Tollgate's memory store.
pub struct Tollgate {
    store: MemoryStore,
    limit: Limit,
}

impl Tollgate {
    /// A store of its own for these terms.
    ///
    /// # Panics
    /// If the algorithm does not take the terms.
    pub fn new(terms: Terms, algorithm: Algorithm) -> Tollgate {
        let limit = Limit::new(terms.quota.into(), terms.window).and_then(|limit| limit.with_algorithm(algorithm));
        let store = MemoryStore::builder().max_bytes(4 << 30).build();
        Tollgate { store, limit: limit.expect("terms in range") }
    }
}

impl Contestant for Tollgate {
    #[inline]
    fn check(&self, request: &Request) -> bool {
        let key = Key::new(&request.text).expect("a short key");
        self.store.check_one(&self.limit, key, Cost::ONE).allowed
    }
}

/// Tollgate's memory store with two limits of one subject, decided together.
pub struct TollgateTwoLimits {
    store: MemoryStore,
    limits: [Limit; 2],
}

impl TollgateTwoLimits {
    /// Creates a store for a `sliding` limit of these terms, and one of 10,000,000 a day.
    ///
    /// # Panics
    /// Panics if the terms are out of range.
    pub fn new(terms: Terms) -> TollgateTwoLimits {
        let limits = [(terms.quota, terms.window), (10_000_000, Duration::from_secs(86_400))];
        let limits = limits.map(|(quota, window)| Limit::new(quota.into(), window).expect("terms in range"));
        TollgateTwoLimits { store: MemoryStore::new(), limits }
    }
}

impl Contestant for TollgateTwoLimits {
    #[inline]
    fn check(&self, request: &Request) -> bool {
        let key = Key::new(&request.text).expect("a short key");
        let demands = self.limits.map(|limit| Demand::new(limit, key));
        self.store.check(&Check::of_distinct(&demands)).allowed()
    }
}

/// governor with keys as a service has them.
pub struct GovernorText(DefaultKeyedRateLimiter<String>);

impl GovernorText {
    /// A limiter of its own for these terms.
    pub fn new(terms: Terms) -> GovernorText {
        GovernorText(RateLimiter::keyed(governor_quota(terms)))
    }
}

impl Contestant for GovernorText {
    #[inline]
    fn check(&self, request: &Request) -> bool {
        self.0.check_key(&request.text).is_ok()
    }
}

/// governor with numbers for keys, for reference.
pub struct GovernorNumber(DefaultKeyedRateLimiter<u64>);

impl GovernorNumber {
    /// A limiter of its own for these terms.
    pub fn new(terms: Terms) -> GovernorNumber {
        GovernorNumber(RateLimiter::keyed(governor_quota(terms)))
    }
}

impl Contestant for GovernorNumber {
    #[inline]
    fn check(&self, request: &Request) -> bool {
        self.0.check_key(&request.number).is_ok()
    }
}

fn governor_quota(terms: Terms) -> Quota {
    let burst = NonZeroU32::new(terms.quota).expect("a quota above zero");
    Quota::with_period(terms.window / terms.quota).expect("a period above zero").allow_burst(burst)
}

/// throttlecrab's library.
pub struct Throttlecrab {
    limiter: Mutex<throttlecrab::RateLimiter<PeriodicStore>>,
    terms: Terms,
}

impl Throttlecrab {
    /// A limiter of its own for these terms.
    pub fn new(terms: Terms) -> Throttlecrab {
        Throttlecrab { limiter: Mutex::new(throttlecrab::RateLimiter::new(PeriodicStore::new())), terms }
    }
}

impl Contestant for Throttlecrab {
    #[inline]
    #[allow(clippy::disallowed_methods)] // throttlecrab is told the time by its caller, who reads the system's clock
    fn check(&self, request: &Request) -> bool {
        // It takes whole seconds; a shorter window becomes its multiple.
        let seconds = self.terms.window.as_secs().max(1);
        let per_period = u128::from(self.terms.quota) * u128::from(seconds) * 1_000_000 / self.terms.window.as_micros();
        let mut limiter = self.limiter.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let answer = limiter.rate_limit(
            &request.text,
            self.terms.quota.into(),
            per_period as i64,
            seconds as i64,
            1,
            SystemTime::now(),
        );
        answer.is_ok_and(|(allowed, _)| allowed)
    }
}
