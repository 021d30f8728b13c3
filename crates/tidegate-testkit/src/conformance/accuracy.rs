//! Measures the error of an approximate algorithm.
//!
//! `sliding-counter` assumes that admissions were evenly distributed over the previous window. Each of its verdicts is
//! compared with the exact number of its *own* admissions in the trailing window. A request admitted although they had
//! reached the quota is *over*; a request denied although they had not is *early*. Arrivals are generated from a seed,
//! so the results are the same on every machine.

use std::collections::VecDeque;

use tidegate_core::{Check, Demand, Key, Limit, Timestamp};

use super::script::EPOCH_US;
use super::{Implementation, Random};

/// The number of right and wrong verdicts of a run, compared with an exact sliding window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Verdicts {
    /// Number of requests.
    pub requests: u64,
    /// Number of admitted requests.
    pub admitted: u64,
    /// Number of requests admitted although the quota was used up.
    pub over: u64,
    /// Number of requests denied although the quota was not used up.
    pub early: u64,
    /// The most admissions of one client in any trailing window.
    pub most_in_a_window: u64,
}

impl Verdicts {
    /// Returns the fraction of requests with a wrong verdict (`over` or `early`), from 0 to 1; 0 without requests.
    pub fn wrong(&self) -> f64 {
        (self.over + self.early) as f64 / self.requests.max(1) as f64
    }

    fn add(&mut self, other: Verdicts) {
        self.requests += other.requests;
        self.admitted += other.admitted;
        self.over += other.over;
        self.early += other.early;
        self.most_in_a_window = self.most_in_a_window.max(other.most_in_a_window);
    }
}

/// Checks one unit of `limit` for each arrival, and compares every verdict with the exact count of admissions.
///
/// `client` is the key, which must have no counter of this limit in `implementation` yet. `arrivals_us` are the times of the
/// requests in microseconds from the start, ascending.
pub fn judge(
    limit: &Limit,
    client: &str,
    arrivals_us: impl Iterator<Item = u64>,
    implementation: &mut dyn Implementation,
) -> Verdicts {
    let key = Key::new(client).expect("clients have short names");
    let demand = Demand::new(*limit, key);
    let mut window: VecDeque<u64> = VecDeque::new();
    let mut verdicts = Verdicts::default();
    for at_us in arrivals_us {
        while window.front().is_some_and(|oldest| oldest + limit.window_us() <= at_us) {
            window.pop_front();
        }
        let fits = (window.len() as u64) < u64::from(limit.quota());
        let decision = implementation.check(Timestamp::from_micros(EPOCH_US + at_us), &Check::one(&demand));
        verdicts.requests += 1;
        if decision.allowed() {
            window.push_back(at_us);
            verdicts.admitted += 1;
            verdicts.over += u64::from(!fits);
            verdicts.most_in_a_window = verdicts.most_in_a_window.max(window.len() as u64);
        } else {
            verdicts.early += u64::from(fits);
        }
    }
    verdicts
}

/// Generates random (Poisson) arrivals for this many windows, on average `rate` × quota of them per window.
///
/// `rate` must be positive. Times are in microseconds from the start, ascending.
pub fn poisson(limit: &Limit, rate: f64, windows: u64, mut random: Random) -> impl Iterator<Item = u64> {
    let end_us = (limit.window_us() * windows) as f64;
    let mean_gap_us = limit.window_us() as f64 / (f64::from(limit.quota()) * rate);
    let next = move |at_us: &f64| Some(at_us - mean_gap_us * (1.0 - random.unit()).ln());
    std::iter::successors(Some(0.0), next).skip(1).take_while(move |at_us| *at_us < end_us).map(|at_us| at_us as u64)
}

/// Generates the arrivals of [`poisson`] with pauses: one and a half windows with arrivals, then as long without any.
pub fn on_off(limit: &Limit, rate: f64, windows: u64, random: Random) -> impl Iterator<Item = u64> {
    let phase_us = limit.window_us() * 3 / 2;
    poisson(limit, rate, windows, random).filter(move |at_us| (at_us / phase_us).is_multiple_of(2))
}

/// Generates the worst arrivals for `sliding-counter`, in `windows / 3` rounds of three windows.
///
/// The first window is idle. The whole quota arrives at the end of the second. In the third, four times the quota
/// arrive evenly, so that every unit is taken as the weight of the second window falls. Times are in microseconds from
/// the start, ascending.
pub fn adversarial(limit: &Limit, windows: u64) -> impl Iterator<Item = u64> {
    let (quota, window_us) = (u64::from(limit.quota()), limit.window_us());
    (0..windows / 3).flat_map(move |round| {
        let burst_us = (3 * round + 1) * window_us + window_us - quota;
        let burst = (0..quota).map(move |n| burst_us + n);
        let steady = (0..4 * quota).map(move |n| (3 * round + 2) * window_us + n * window_us / (4 * quota));
        burst.chain(steady)
    })
}

/// A population of clients with [`poisson`] arrivals, whose rates follow Zipf's law: few are busy and most are not.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Population {
    /// Number of clients.
    pub clients: u64,
    /// The rate of the busiest client, in multiples of the limit's own rate.
    pub busiest: f64,
    /// The rate of the nth client is that of the busiest divided by n to this power.
    pub exponent: f64,
}

impl Population {
    /// Runs [`judge`] for each client, one after the other, over this many windows, and adds up the results.
    ///
    /// The arrivals are determined by `seed`.
    pub fn judge(&self, limit: &Limit, windows: u64, seed: u64, implementation: &mut dyn Implementation) -> Verdicts {
        let mut all = Verdicts::default();
        let mut random = Random::new(seed);
        for rank in 1..=self.clients {
            let rate = self.busiest / (rank as f64).powf(self.exponent);
            let arrivals = poisson(limit, rate, windows, Random::new(random.next_u64()));
            all.add(judge(limit, &format!("client {rank}"), arrivals, implementation));
        }
        all
    }
}
