//! Redemptions: as refunds, so that every case and trace with refunds also tests them, and in random runs of their own.

use std::time::Duration;

use tidegate_core::{
    Algorithm, Check, Cost, Decision, Demand, Key, Limit, LimitStatus, LimitStatuses, ReceiptId, Redeemed, Redemption,
    Timestamp,
};

use super::{Abilities, Implementation, Random};
use crate::oracle::Oracle;

/// A [`Implementation`] that redeems receipts.
pub trait Redeem: Implementation {
    /// Gives units back and charges units as `redemption` says, unless its id was used before or is expired at `now`.
    fn redeem(&mut self, now: Timestamp, redemption: &Redemption<'_>) -> Redeemed;
}

/// A [`Implementation`] that refunds by redeeming a receipt with an id of its own.
///
/// Each refund is redeemed four times: as expired, which must change nothing, then for the first time, and twice more,
/// which must change nothing either.
#[derive(Clone, Debug)]
pub struct Redeeming<S> {
    inner: S,
    /// The number of ids that were used.
    used: u64,
}

impl<S: Redeem> Redeeming<S> {
    /// Wraps an implementation on which no receipt was redeemed yet.
    pub fn new(inner: S) -> Redeeming<S> {
        Redeeming { inner, used: 0 }
    }
}

impl<S: Redeem> Implementation for Redeeming<S> {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        self.inner.check(now, check)
    }

    /// Refunds by a redemption; at the end of time, when every receipt is expired, by a refund.
    ///
    /// # Panics
    /// If a redemption does not have the expected outcome.
    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        if now == Timestamp::MAX {
            return self.inner.refund(now, check, decision);
        }
        self.used += 1;
        let id = ReceiptId::new(1, self.used);
        let redemption = Redemption::new(id, check.demands()[0].key.subject(), Timestamp::MAX).refund(*check, decision);
        let mut expired = redemption;
        expired.until = now;
        assert_eq!(self.inner.redeem(now, &expired), Redeemed::Expired);
        assert_eq!(self.inner.redeem(now, &redemption), Redeemed::Done);
        for _ in 0..2 {
            assert_eq!(self.inner.redeem(now, &redemption), Redeemed::AlreadyUsed);
        }
    }

    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        self.inner.reset(now, demand);
    }

    fn as_seen(&self, decision: Decision) -> Decision {
        self.inner.as_seen(decision)
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    fn fill(&mut self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        self.inner.fill(demand, instants);
    }
}

impl Redeem for Oracle {
    fn redeem(&mut self, now: Timestamp, redemption: &Redemption<'_>) -> Redeemed {
        Oracle::redeem(self, now, redemption)
    }
}

/// The shortest window of a run. The nth limit has n times this window, so that each limit has a counter of its own.
const WINDOW_US: u64 = 300_000;
const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);

/// Compares implementations with the oracle on `count` random runs of checks and redemptions.
///
/// A run has one to three limits. A redemption gives back a part of an admission on some of them, charges others, often
/// more than fits, and is often repeated or expired. After each operation, the status of every limit is compared. The
/// runs are determined by `seed`. `fresh` creates an implementation without counters, one for each run.
///
/// # Errors
/// If they differ. Describes the first difference.
pub fn random_redemptions<S: Redeem>(count: u64, seed: u64, mut fresh: impl FnMut() -> S) -> Result<(), String> {
    (0..count).try_for_each(|run| {
        let mut random = Random::new(seed ^ run);
        random_run(&mut random, &mut fresh()).map_err(|difference| format!("run {run} of seed {seed}: {difference}"))
    })
}

fn random_run(random: &mut Random, implementation: &mut dyn Redeem) -> Result<(), String> {
    let limits: Vec<Limit> = (1..=1 + random.below(3)).map(|nth| random_limit(random, nth * WINDOW_US)).collect();
    let demand = |limit: &Limit| Demand::new(*limit, Key::new("client").expect("a short subject"));
    let demands: Vec<Demand<'_>> = limits.iter().map(demand).collect();
    let peeks: Vec<Demand<'_>> = demands.iter().map(|demand| demand.cost(Cost::PEEK)).collect();
    let mut oracle = Oracle::new();
    let mut admitted: Vec<(Decision, Timestamp)> = Vec::new();
    let mut now = START;
    for operation in 0..60 {
        now = now.plus_micros(match random.below(10) {
            0..3 => 0,
            3..9 => random.below(WINDOW_US / 8),
            _ => random.below(2 * WINDOW_US),
        });
        let what = if admitted.is_empty() || random.below(3) > 0 {
            let charged: Vec<Demand<'_>> = demands
                .iter()
                .map(|demand| demand.cost(random.below(1 + u64::from(demand.limit.quota()) / 4) as u32))
                .collect();
            let check = Check::new(&charged).expect("each limit has a window of its own");
            let (expected, got) = (oracle.check(now, &check), implementation.check(now, &check));
            if expected != got {
                return Err(format!("operation {operation}, a check: expected {expected:?}, got {got:?}"));
            }
            if got.allowed() {
                admitted.push((got, now.plus_micros(random.below(4 * WINDOW_US))));
            }
            "a check"
        } else {
            let nth = random.below(admitted.len() as u64) as usize;
            let (decision, until) = &admitted[nth];
            let correction = RandomCorrection::of(random, &demands, decision);
            // In three streams, some at the edges of a block.
            let id = ReceiptId::new(nth as u64 % 3, 1_020 * (nth as u64 % 2) + nth as u64 / 3);
            let redemption = correction.redemption(Redemption::new(id, b"client", *until));
            let (expected, got) = (oracle.redeem(now, &redemption), implementation.redeem(now, &redemption));
            if expected != got {
                return Err(format!("operation {operation}, {redemption:?}: expected {expected:?}, got {got:?}"));
            }
            "a redemption"
        };
        let peek = Check::new(&peeks).expect("each limit has a window of its own");
        let (expected, got) = (oracle.check(now, &peek), implementation.check(now, &peek));
        if expected != got {
            return Err(format!("after operation {operation}, {what}: expected {expected:?}, got {got:?}"));
        }
    }
    Ok(())
}

fn random_limit(random: &mut Random, window_us: u64) -> Limit {
    let algorithm = Algorithm::ALL[random.below(Algorithm::ALL.len() as u64) as usize];
    let quota = [3, 60, 700, 3_000][random.below(4) as usize];
    let limit = Limit::new(quota, Duration::from_micros(window_us));
    limit.and_then(|limit| limit.with_algorithm(algorithm)).expect("a valid limit")
}

/// A correction of an admission: each limit is refunded in part, charged, or left as it is.
struct RandomCorrection<'a> {
    refunded: Vec<Demand<'a>>,
    refund: Decision,
    charged: Vec<Demand<'a>>,
}

impl<'a> RandomCorrection<'a> {
    fn of(random: &mut Random, demands: &[Demand<'a>], decision: &Decision) -> RandomCorrection<'a> {
        let refund = Decision { limits: LimitStatuses::new(), ..decision.clone() };
        let mut correction = RandomCorrection { refunded: Vec::new(), refund, charged: Vec::new() };
        for (demand, status) in demands.iter().zip(&decision.limits) {
            match random.below(3) {
                0 if status.cost > 0 => {
                    let cost = 1 + random.below(status.cost.into()) as u32;
                    correction.refunded.push(*demand);
                    correction.refund.limits.push(LimitStatus { cost, ..*status });
                }
                1 => correction.charged.push(demand.cost(random.below(2 * u64::from(demand.limit.quota())) as u32)),
                _ => {}
            }
        }
        correction
    }

    fn redemption<'r>(&'r self, mut redemption: Redemption<'r>) -> Redemption<'r> {
        if let Ok(check) = Check::new(&self.refunded) {
            redemption = redemption.refund(check, &self.refund);
        }
        if let Ok(check) = Check::new(&self.charged) {
            redemption = redemption.charge(check);
        }
        redemption
    }
}
