//! The second opinion: every answer recounted from what was written down, by the slowest means there are.
//!
//! The core is fast because it has formulas: for the wait, for what remains, for the moment a counter
//! is whole again. A formula can be wrong by one, and a test that repeats the formula is wrong with it.
//! So nothing here is computed that can be *tried*:
//!
//! ```text
//!   remaining     try costs until one does not fit
//!   retry_after   try instants until the cost fits
//!   next_after    try instants until one more than `remaining` fits
//!   reset_after   try instants until the record is as empty as a new one
//! ```
//!
//! What is left for each kind of record to say is what the rules themselves say
//! (`docs/algorithms.md`, from which this was written, without a look at the core): how it reads at an
//! instant (`Record::settled`), whether a cost fits, and what a charge, a penalty or a refund
//! writes. Numbers are `i128`, sums are taken over everything kept, and there is no cleverness to trust.
//!
//! **How instants are tried.** If nobody spends, use only shrinks with time: a log's entries leave, a
//! pair's weight falls, a bucket leaks. So "it fits" is false up to some instant and true from there
//! on, and halving the interval finds that instant exactly (`first_wait`) in at most 52 steps.
//!
//! **Not here:** a clock. The time is an argument, and may be earlier than the time before.

mod bucket;
mod log;
mod pair;

use bucket::Bucket;
use log::Log;
use pair::Pair;
use tollgate_core::{Algorithm, Check, Decision, Demand, Limit, Line, Lines, Scope, Source, Timestamp, Wait};

/// The longest wait that is ever told.
const WAIT_US_MAX: i128 = (1 << 52) - 1;

/// Every counter that was ever written, by name. It forgets nothing.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    counters: Vec<Counter>,
}

#[derive(Clone, Debug)]
struct Counter {
    name: Name,
    record: Record,
    /// From here on the record is as good as none, under the limit that it was written with.
    expires_at: i128,
}

impl Oracle {
    /// An oracle that has seen nothing.
    pub fn new() -> Oracle {
        Oracle::default()
    }

    /// Decides, and writes down what follows from it.
    pub fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        let now_us = micros(now);
        let verdicts: Vec<bool> = check.demands().iter().map(|demand| self.fits(demand, now_us)).collect();
        let admitted = verdicts.iter().all(|&fits| fits);
        let lines = check.demands().iter().zip(verdicts);
        let lines = lines.map(|(demand, fits)| self.settle_line(demand, now_us, fits, admitted));
        Decision { at: now, source: Source::Store, lines: lines.collect::<Lines>() }
    }

    /// Takes back what `decision` charged for `check`, as far as it still counts.
    pub fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        if !decision.allowed() {
            return;
        }
        for (demand, line) in check.demands().iter().zip(&decision.lines) {
            if demand.cost.units() > 0 {
                let limit = &demand.limit;
                let mut record = self.record(demand).settled(limit, micros(now));
                let reset_us = line.reset_after.as_micros().map_or(WAIT_US_MAX, i128::from);
                let receipt = Receipt { at: micros(decision.at), units: units(demand), reset_us };
                record.refund(limit, micros(now), &receipt);
                self.write(demand, micros(now), record);
            }
        }
    }

    /// Forgets one counter.
    pub fn reset(&mut self, demand: &Demand<'_>) {
        let name = Name::of(demand);
        self.counters.retain(|counter| counter.name != name);
    }

    /// Whether nothing is written for this counter, or only what no longer counts under the limit that it was written with:
    /// a store may then have forgotten it.
    pub fn is_expired(&self, now: Timestamp, demand: &Demand<'_>) -> bool {
        self.find(demand).is_none_or(|counter| counter.expires_at <= micros(now))
    }

    /// Writes a history as if it had been admitted unit by unit: one at each of these instants.
    pub fn recall(&mut self, demand: &Demand<'_>, instants: impl Iterator<Item = Timestamp>) {
        let mut record = self.record(demand);
        let mut latest = Timestamp::ZERO;
        for instant in instants {
            record.charge(&demand.limit, micros(instant), 1);
            latest = instant;
        }
        self.write(demand, micros(latest), record);
    }

    fn fits(&self, demand: &Demand<'_>, now: i128) -> bool {
        let record = self.record(demand).settled(&demand.limit, now);
        units(demand) == 0 || fits(&record, &demand.limit, now, units(demand))
    }

    /// Writes what the verdict means for one counter, and says what is to be answered.
    fn settle_line(&mut self, demand: &Demand<'_>, now: i128, own_verdict: bool, admitted: bool) -> Line {
        let (limit, cost) = (&demand.limit, units(demand));
        let before = self.record(demand);
        let settled = before.settled(limit, now);
        let mut after = settled.clone();
        if cost > 0 {
            if admitted {
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
        Line { allowed: own_verdict, retry_after, ..line(&after, demand, now) }
    }

    fn find(&self, demand: &Demand<'_>) -> Option<&Counter> {
        let name = Name::of(demand);
        self.counters.iter().find(|counter| counter.name == name)
    }

    fn record(&self, demand: &Demand<'_>) -> Record {
        self.find(demand).map_or_else(|| Record::empty(&demand.limit), |counter| counter.record.clone())
    }

    fn write(&mut self, demand: &Demand<'_>, now: i128, record: Record) {
        let reset_us = reset_after(&record, &demand.limit, now).as_micros().map_or(WAIT_US_MAX, i128::from);
        self.reset(demand);
        self.counters.push(Counter { name: Name::of(demand), record, expires_at: now + reset_us });
    }
}

/// Which counter: everything that distinguishes it, spelled out.
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

/// What an admission left behind for its refund.
struct Receipt {
    at: i128,
    units: i128,
    reset_us: i128,
}

/// What is written down for one counter. Six algorithms, three kinds of record.
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
            other => panic!("{other:?} has no recount"),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Record::Log(_) => "log",
            Record::Pair(_) => "pair",
            Record::Bucket(_) => "bucket",
        }
    }

    /// How this record reads at `now` under `limit`, nothing being spent.
    fn settled(&self, limit: &Limit, now: i128) -> Record {
        match self {
            Record::Log(log) => Record::Log(log.settled(limit, now)),
            Record::Pair(pair) => Record::Pair(pair.settled(limit, now)),
            Record::Bucket(bucket) => Record::Bucket(bucket.settled(limit, now)),
        }
    }

    /// Whether a settled record has room for so many units more.
    fn has_room(&self, limit: &Limit, now: i128, cost: i128) -> bool {
        match self {
            Record::Log(log) => log.has_room(limit, cost),
            Record::Pair(pair) => pair.has_room(limit, now, cost),
            Record::Bucket(bucket) => bucket.has_room(limit, cost),
        }
    }

    /// Whether a settled record is as good as a new one.
    fn is_whole(&self, limit: &Limit) -> bool {
        match self {
            Record::Log(log) => log.is_whole(),
            Record::Pair(pair) => pair.is_whole(limit),
            Record::Bucket(bucket) => bucket.is_whole(),
        }
    }

    /// A log always forgets what has left. The others are written only if they had to be converted to be told from.
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

    fn refund(&mut self, limit: &Limit, now: i128, receipt: &Receipt) {
        match self {
            Record::Log(log) => log.refund(limit, receipt),
            Record::Pair(pair) => pair.refund(receipt),
            Record::Bucket(bucket) => bucket.refund(limit, now, receipt),
        }
    }
}

/// What is answered of a settled record, apart from the verdict.
fn line(record: &Record, demand: &Demand<'_>, now: i128) -> Line {
    let limit = &demand.limit;
    let remaining = largest_fitting(record, limit, now);
    let next_after =
        if remaining == i128::from(limit.cost_max()) { Wait::ZERO } else { wait(record, limit, now, remaining + 1) };
    Line {
        allowed: false,
        cost: demand.cost.units(),
        quota: limit.quota(),
        remaining: u32::try_from(remaining).expect("what remains is at most the largest cost"),
        retry_after: Wait::ZERO,
        next_after,
        reset_after: reset_after(record, limit, now),
    }
}

/// A peek asks for one unit. A leaky bucket tells whoever is let in to wait until those before are through.
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

/// The first wait after which it holds, given that it keeps holding from there on; at most [`WAIT_US_MAX`].
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

/// The largest cost that fits, given that every smaller one does too.
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
