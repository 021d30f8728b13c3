//! The oracle: a slow reference implementation that finds every answer by search.
//!
//! The core is fast because it has formulas: for the wait, for the remaining units, for the time at which a counter is
//! whole again. A formula can be off by one, and a test that repeats the formula has the same error. So the oracle
//! computes nothing that can be *tried*:
//!
//! ```text
//!   remaining     try costs until one does not fit
//!   retry_after   try instants until the cost fits
//!   next_after    try instants until one more than `remaining` fits
//!   reset_after   try instants until the record is as empty as a new one
//! ```
//!
//! Each kind of record implements only what `docs/algorithms.md` defines: its state at an instant (`Record::settled`),
//! whether a cost fits, and what a charge, a penalty or a refund writes. It was written from that document, not from
//! the core. A bucket keeps a list of its refunds and counts them anew for each use. Numbers are `i128`, sums are taken over everything kept, and nothing is optimized.
//!
//! **How instants are tried.** While nothing is charged, use only shrinks with time: the entries of a log expire, the
//! weight of a pair falls, a bucket leaks. So "it fits" is false up to some instant and true from there on, and a
//! binary search finds that instant exactly (`first_wait`) in at most 52 steps.
//!
//! **No clock.** The time is an argument. It may be earlier than that of the previous call.

mod bucket;
mod log;
mod pair;

use bucket::Bucket;
use log::Log;
use pair::Pair;
use tidegate_core::{
    Algorithm, Check, Decision, Demand, Limit, LimitStatus, LimitStatuses, ReceiptId, Redeemed, Redemption, Scope,
    Source, Timestamp, Wait,
};

/// The longest wait in any answer, in microseconds.
const WAIT_US_MAX: i128 = (1 << 52) - 1;

/// The reference implementation of all algorithms. It keeps every counter until it is reset, even if it has expired.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    counters: Vec<Counter>,
    /// The receipts that were redeemed, also those that have expired.
    used_receipts: Vec<ReceiptId>,
}

#[derive(Clone, Debug)]
struct Counter {
    name: Name,
    record: Record,
    /// From this time on the record equals a new one, under the limit that it was written with.
    expires_at: i128,
}

impl Oracle {
    /// Creates an oracle without counters.
    pub fn new() -> Oracle {
        Oracle::default()
    }

    /// Decides a check at `now`, and charges it if all limits allow it. A denied check charges limits with
    /// `count_denied`.
    ///
    /// There are no bans. The source of the decision is always [`Source::Store`].
    pub fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        let now_us = micros(now);
        let verdicts: Vec<bool> = check.demands().iter().map(|demand| self.fits(demand, now_us)).collect();
        let admitted = verdicts.iter().all(|&fits| fits);
        let verdicts = check.demands().iter().zip(verdicts);
        let statuses = verdicts.map(|(demand, fits)| self.write_verdict(demand, now_us, fits, admitted));
        Decision::new(now, Source::Store, statuses.collect::<LimitStatuses>())
    }

    /// Refunds what `decision` charged for `check`, as far as it still counts at `now`.
    ///
    /// `check` must have the demands of the decided check, in the same order; their limits may have changed. Does
    /// nothing for a denial. The oracle does not detect a second refund of one decision.
    pub fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        if !decision.allowed() {
            return;
        }
        for (demand, status) in check.demands().iter().zip(&decision.limits) {
            if status.cost > 0 {
                let limit = &demand.limit;
                let mut record = self.record(demand).settled(limit, micros(now));
                let reset_us = status.reset_after.as_micros().map_or(WAIT_US_MAX, i128::from);
                let receipt = OracleCharge {
                    at: micros(decision.at),
                    units: i128::from(status.cost),
                    reset_us,
                    refunded_before: i128::from(status.refunded_before),
                };
                record.refund(limit, micros(now), &receipt);
                self.write(demand, micros(now), record);
            }
        }
    }

    /// Gives units back and charges units as `redemption` says, unless its id was used before or is expired at `now`.
    pub fn redeem(&mut self, now: Timestamp, redemption: &Redemption<'_>) -> Redeemed {
        if redemption.until <= now {
            return Redeemed::Expired;
        }
        if self.used_receipts.contains(&redemption.id) {
            return Redeemed::AlreadyUsed;
        }
        self.used_receipts.push(redemption.id);
        if let Some((check, decision)) = &redemption.refund {
            self.refund(now, check, decision);
        }
        let charged: Vec<Demand<'_>> = redemption.charged_demands().collect();
        if let Ok(check) = Check::new(&charged) {
            self.check(now, &check);
        }
        Redeemed::Done
    }

    /// Deletes the counter of `demand`. The cost is ignored.
    pub fn reset(&mut self, demand: &Demand<'_>) {
        let name = Name::of(demand);
        self.counters.retain(|counter| counter.name != name);
    }

    /// Returns whether the counter does not exist or is expired at `now`, so that a store may have deleted it.
    ///
    /// A counter is expired if it equals a new one under the limit that it was last written with.
    pub fn is_expired(&self, now: Timestamp, demand: &Demand<'_>) -> bool {
        self.find(demand).is_none_or(|counter| counter.expires_at <= micros(now))
    }

    /// Charges one unit at each of these instants, without deciding. The cost of `demand` is ignored.
    ///
    /// The instants must be ascending, and not before the last charge. Without an instant, nothing changes. The result
    /// is the same as if each unit had been admitted, except for `sliding-counter` and `fixed-window`: they charge all
    /// units to the window that was current when the counter was last written, and for a new counter to the window that
    /// begins at the epoch.
    pub fn charge_at(&mut self, demand: &Demand<'_>, instants: impl Iterator<Item = Timestamp>) {
        let mut record = self.record(demand);
        let mut latest = None;
        for instant in instants {
            record.charge(&demand.limit, micros(instant), 1);
            latest = Some(instant);
        }
        if let Some(latest) = latest {
            self.write(demand, micros(latest), record);
        }
    }

    fn fits(&self, demand: &Demand<'_>, now: i128) -> bool {
        let record = self.record(demand).settled(&demand.limit, now);
        units(demand) == 0 || fits(&record, &demand.limit, now, units(demand))
    }

    /// Writes the counter of `demand` after the verdicts are known, if they change it, and returns its limit status.
    ///
    /// `own_verdict` says whether this limit allows the cost, `admitted` whether all limits of the check do. A cost of
    /// 0 writes nothing.
    fn write_verdict(&mut self, demand: &Demand<'_>, now: i128, own_verdict: bool, admitted: bool) -> LimitStatus {
        let (limit, cost) = (&demand.limit, units(demand));
        let before = self.record(demand);
        let settled = before.settled(limit, now);
        let mut after = settled.clone();
        let mut refunded_before = 0;
        if cost > 0 {
            if admitted {
                refunded_before = settled.refunded();
                after.charge(limit, now, cost);
                self.write(demand, now, after.clone());
            } else if limit.count_denied() {
                after.penalty(limit, now, cost);
                self.write(demand, now, after.clone());
            } else if before.is_written_by_a_denial(limit, now) {
                self.write(demand, now, after.clone());
            }
        }
        let retry_after = retry_after(if admitted { &settled } else { &after }, limit, now, cost);
        LimitStatus { allowed: own_verdict, retry_after, refunded_before, ..status(&after, demand, now) }
    }

    fn find(&self, demand: &Demand<'_>) -> Option<&Counter> {
        let name = Name::of(demand);
        self.counters.iter().find(|counter| counter.name == name)
    }

    fn record(&self, demand: &Demand<'_>) -> Record {
        self.find(demand).map_or_else(|| Record::empty(&demand.limit), |counter| counter.record.clone())
    }

    fn write(&mut self, demand: &Demand<'_>, now: i128, record: Record) {
        let is_new_after = |d| record.settled(&demand.limit, now + d).is_new(&demand.limit);
        let lives_us = first_wait(is_new_after).as_micros().map_or(WAIT_US_MAX, i128::from);
        self.reset(demand);
        self.counters.push(Counter { name: Name::of(demand), record, expires_at: now + lives_us });
    }
}

/// The identity of a counter. Two demands with equal names use the same counter.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Name {
    subject: Vec<u8>,
    scope: String,
}

impl Name {
    fn of(demand: &Demand<'_>) -> Name {
        let limit = &demand.limit;
        let scope = match demand.key.scope() {
            Scope::Explicit => format!("{:?} {}", limit.algorithm(), limit.window_us()),
            other => format!("{other:?} {}", Record::empty(limit).kind()),
        };
        Name { subject: demand.key.subject().to_vec(), scope }
    }
}

/// The data of an admission that its refund needs: its time, its units, its `reset_after`, with times in microseconds,
/// and its `refunded_before`.
struct OracleCharge {
    at: i128,
    units: i128,
    reset_us: i128,
    refunded_before: i128,
}

/// The state of one counter. The six algorithms use three kinds of record. Times are in microseconds.
///
/// `charge`, `penalty` and `refund` expect a record that is [settled](Record::settled) at `now` under the same limit.
#[derive(Clone, Debug)]
enum Record {
    Log(Log),
    Pair(Pair),
    Bucket(Bucket),
}

impl Record {
    fn empty(limit: &Limit) -> Record {
        match limit.algorithm() {
            Algorithm::Sliding | Algorithm::SlidingLog => Record::Log(Log::default()),
            Algorithm::SlidingCounter | Algorithm::FixedWindow => Record::Pair(Pair::empty(limit)),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => Record::Bucket(Bucket::empty(limit)),
            other => panic!("the oracle does not implement {other:?}"),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Record::Log(_) => "log",
            Record::Pair(_) => "pair",
            Record::Bucket(_) => "bucket",
        }
    }

    /// Returns this record at `now` under `limit`: expired units are dropped, and changes of limit and clock are
    /// applied.
    fn settled(&self, limit: &Limit, now: i128) -> Record {
        match self {
            Record::Log(log) => Record::Log(log.settled(limit, now)),
            Record::Pair(pair) => Record::Pair(pair.settled(limit, now)),
            Record::Bucket(bucket) => Record::Bucket(bucket.settled(limit, now)),
        }
    }

    /// Returns whether `cost` more units fit into this record, which must be [settled](Record::settled) at `now`.
    fn has_room(&self, limit: &Limit, now: i128, cost: i128) -> bool {
        match self {
            Record::Log(log) => log.has_room(limit, cost),
            Record::Pair(pair) => pair.has_room(limit, now, cost),
            Record::Bucket(bucket) => bucket.has_room(limit, cost),
        }
    }

    /// Returns whether this [settled](Record::settled) record counts no units, like that of a new counter.
    fn is_whole(&self, limit: &Limit) -> bool {
        match self {
            Record::Log(log) => log.is_whole(),
            Record::Pair(pair) => pair.is_whole(limit),
            Record::Bucket(bucket) => bucket.is_whole(),
        }
    }

    /// Returns whether this [settled](Record::settled) record equals that of a new counter, for refunds, too.
    fn is_new(&self, limit: &Limit) -> bool {
        self.is_whole(limit) && self.refunded() == 0
    }

    /// Returns the units that were refunded on a bucket, as far as they matter; 0 for other records.
    fn refunded(&self) -> u64 {
        match self {
            Record::Log(_) | Record::Pair(_) => 0,
            Record::Bucket(bucket) => u64::try_from(bucket.refunded()).expect("less than 2^53"),
        }
    }

    /// Returns whether a denial at `now` that charges nothing stores the [settled](Record::settled) record.
    ///
    /// `self` must be the record as it was stored, before it is settled. Only for a limit without `count_denied`: with
    /// it, a denial is charged and always stored.
    ///
    /// A log is always stored, without the expired entries. The others are stored only if settling converts them: after
    /// the clock was set back or, for a pair, the window was changed.
    fn is_written_by_a_denial(&self, limit: &Limit, now: i128) -> bool {
        match self {
            Record::Log(_) => true,
            Record::Pair(pair) => pair.is_from_the_future(now) || pair.is_of_another_window(limit),
            Record::Bucket(bucket) => bucket.is_from_the_future(now),
        }
    }

    fn charge(&mut self, limit: &Limit, now: i128, cost: i128) {
        match self {
            Record::Log(log) => log.charge(limit, now, cost),
            Record::Pair(pair) => pair.charge(cost),
            Record::Bucket(bucket) => bucket.charge(limit, now, cost),
        }
    }

    fn penalty(&mut self, limit: &Limit, now: i128, cost: i128) {
        match self {
            Record::Log(log) => log.penalty(limit, now, cost),
            Record::Pair(pair) => pair.penalty(limit, cost),
            Record::Bucket(bucket) => bucket.penalty(limit, cost),
        }
    }

    fn refund(&mut self, limit: &Limit, now: i128, receipt: &OracleCharge) {
        match self {
            Record::Log(log) => log.refund(limit, receipt),
            Record::Pair(pair) => pair.refund(receipt),
            Record::Bucket(bucket) => bucket.refund(limit, now, receipt),
        }
    }
}

/// Returns the limit status of a settled record, except `allowed` and `retry_after`, which are `false` and zero.
fn status(record: &Record, demand: &Demand<'_>, now: i128) -> LimitStatus {
    let limit = &demand.limit;
    let remaining = largest_fitting(record, limit, now);
    let next_after =
        if remaining == i128::from(limit.cost_max()) { Wait::ZERO } else { wait(record, limit, now, remaining + 1) };
    LimitStatus {
        allowed: false,
        cost: demand.cost.units(),
        quota: limit.quota(),
        remaining: u32::try_from(remaining).expect("the remaining units are at most the largest cost"),
        retry_after: Wait::ZERO,
        next_after,
        reset_after: reset_after(record, limit, now),
        late_us: 0,
        refunded_before: 0,
    }
}

/// Returns the `retry_after` of a cost on a settled record: zero if it fits, and [`Wait::NEVER`] if it never will.
///
/// A peek (cost 0) gets that of one unit. If the cost fits into a leaky bucket, the wait is the delay until the units
/// before it have leaked.
fn retry_after(record: &Record, limit: &Limit, now: i128, cost: i128) -> Wait {
    let cost = cost.max(1);
    if limit.algorithm() == Algorithm::LeakyBucket && fits(record, limit, now, cost) {
        return reset_after(record, limit, now);
    }
    wait(record, limit, now, cost)
}

fn fits(record: &Record, limit: &Limit, now: i128, cost: i128) -> bool {
    cost <= i128::from(limit.cost_max()) && record.has_room(limit, now, cost)
}

fn wait(record: &Record, limit: &Limit, now: i128, cost: i128) -> Wait {
    if cost > i128::from(limit.cost_max()) {
        return Wait::NEVER;
    }
    first_wait(|d| fits(&record.settled(limit, now + d), limit, now + d, cost))
}

fn reset_after(record: &Record, limit: &Limit, now: i128) -> Wait {
    first_wait(|d| record.settled(limit, now + d).is_whole(limit))
}

/// Returns the shortest wait for which `holds`, called with microseconds, is true. Returns [`WAIT_US_MAX`] if there is
/// none below that.
///
/// `holds` must be true for all longer waits, too, since this is a binary search.
fn first_wait(holds: impl Fn(i128) -> bool) -> Wait {
    let (mut too_short, mut long_enough) = (-1, WAIT_US_MAX);
    while long_enough - too_short > 1 {
        let middle = (too_short + long_enough).div_euclid(2);
        if holds(middle) {
            long_enough = middle;
        } else {
            too_short = middle;
        }
    }
    Wait::from_micros(u64::try_from(long_enough).expect("a wait is not negative"))
}

/// Returns the largest cost that fits into a settled record, by a binary search; 0 if no unit fits.
fn largest_fitting(record: &Record, limit: &Limit, now: i128) -> i128 {
    let (mut fitting, mut too_large) = (0, i128::from(limit.cost_max()) + 1);
    while too_large - fitting > 1 {
        let middle = (fitting + too_large) / 2;
        if fits(record, limit, now, middle) {
            fitting = middle;
        } else {
            too_large = middle;
        }
    }
    fitting
}

fn micros(instant: Timestamp) -> i128 {
    i128::from(instant.as_micros())
}

fn units(demand: &Demand<'_>) -> i128 {
    i128::from(demand.cost.units())
}

fn div_ceil(a: i128, b: i128) -> i128 {
    -(-a).div_euclid(b)
}
