//! Decodes traces from bytes.
//!
//! A header has the limits, the start time and the kind of the trace. Each of the following eight bytes is one
//! operation. Any bytes are a trace, and a shorter prefix only has fewer operations. Numbers are chosen from short
//! lists of values at which arithmetic tends to fail: 0, 1, the quota and one more; one microsecond, an edge and one
//! before it.

use std::time::Duration;

use tidegate_core::{Algorithm, Limit, SLIDING_LOG_QUOTA_MAX, Timestamp, WINDOW_US_MAX};

use super::{Operation, SUBJECTS, Slot, Step, Trace, TraceDemand};

const OPERATIONS_MAX: usize = 256;
const QUOTAS: [u64; 16] =
    [1, 2, 3, 4, 5, 7, 10, 10, 50, 100, 999, 1_000, 1_001, 1_500, SLIDING_LOG_QUOTA_MAX as u64, 10_000_000];
const WINDOWS_US: [u64; 16] = [
    1_000,
    1_001,
    1_999,
    10_000,
    100_000,
    999_983,
    1_000_000,
    1_000_000,
    1_048_577,
    10_000_000,
    60_000_000,
    60_000_000,
    3_600_000_000,
    86_400_000_000,
    604_800_000_001,
    WINDOW_US_MAX,
];
const STARTS_US: [u64; 8] = [
    0,
    1,
    999,
    86_400_000_000,
    1_700_000_000_000_000,
    1_728_000_000_000_000,
    1_760_123_456_789_123,
    // A second before the latest timestamp, at which the clock stops.
    (1 << 52) - 1_000_001,
];

impl Trace {
    /// Decodes a trace. Any bytes are valid, and equal bytes give equal traces. At most 256 operations are read.
    pub fn from_bytes(bytes: &[u8]) -> Trace {
        let mut source = Bytes { bytes, next: 0 };
        let (first, shape, start) = (source.take(), source.take(), source.take());
        let wandering = shape & 1 == 1;
        let mut slots: Vec<Slot> = Vec::new();
        for n in 0..1 + usize::from(shape >> 1) % 3 {
            let slot = source.slot((n == 0).then_some(first), shape >> (3 + n));
            slots.push(slot.apart_from(&slots));
        }
        let start = Timestamp::from_micros(source.pick(start, &STARTS_US));
        let mut trace = Trace { start, wandering, slots, operations: Vec::new() };
        let mut present = trace.slots.clone();
        while !source.is_empty() && trace.operations.len() < OPERATIONS_MAX {
            let operation = source.operation(&trace, &present);
            if let Operation::Change { slot, limit } = operation {
                present[slot].limit = limit;
            }
            trace.operations.push(operation);
        }
        trace
    }
}

impl Slot {
    /// Returns this slot, changed to that of a rule if its bucket would share a counter with an explicit one of
    /// `others`.
    ///
    /// Two explicit buckets with the same window share a counter, whose limit then changes from check to check. Its
    /// lifetime would depend on the last write, so a store may have deleted it or not.
    pub(super) fn apart_from(self, others: &[Slot]) -> Slot {
        let shares = |other: &&Slot| !other.in_rule && other.limit.window_us() == self.limit.window_us();
        let shared = is_bucket(&self.limit) && others.iter().filter(shares).any(|other| is_bucket(&other.limit));
        Slot { in_rule: self.in_rule || shared, ..self }
    }
}

fn is_bucket(limit: &Limit) -> bool {
    matches!(limit.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket)
}

/// A reader of the bytes that encode a trace. After the end it returns zeros.
struct Bytes<'a> {
    bytes: &'a [u8],
    next: usize,
}

impl Bytes<'_> {
    fn is_empty(&self) -> bool {
        self.next >= self.bytes.len()
    }

    fn take(&mut self) -> u8 {
        let byte = self.bytes.get(self.next).copied().unwrap_or(0);
        self.next += 1;
        byte
    }

    fn pick<T: Copy>(&self, byte: u8, from: &[T]) -> T {
        from[usize::from(byte) % from.len()]
    }

    fn slot(&mut self, algorithm: Option<u8>, in_rule: u8) -> Slot {
        let own = self.take();
        let algorithm = self.pick(algorithm.unwrap_or(own), &Algorithm::ALL);
        let window_us = self.take();
        let window_us = self.pick(window_us, &WINDOWS_US);
        let (quota, options) = (self.take(), self.take());
        Slot { limit: limit(algorithm, self.pick(quota, &QUOTAS), window_us, options), in_rule: in_rule & 1 == 1 }
    }

    fn operation(&mut self, trace: &Trace, present: &[Slot]) -> Operation {
        let kind = self.take();
        let bytes: [u8; 7] = std::array::from_fn(|_| self.take());
        match kind {
            0..=139 => Operation::Check(self.demands(bytes, trace, present)),
            140..=204 => Operation::Move(self.step(bytes, trace, present)),
            205..=229 => Operation::Refund { nth: bytes[0].into(), with_present_limits: bytes[1] & 1 == 1 },
            230..=235 => Operation::Reset(self.demand(bytes[0], bytes[1], bytes[2], trace, present)),
            _ => self.change(bytes, trace, present),
        }
    }

    /// Decodes the demands of a check: one to three of them; in a wandering trace one for every slot, in order.
    fn demands(&self, bytes: [u8; 7], trace: &Trace, present: &[Slot]) -> Vec<TraceDemand> {
        if trace.wandering {
            let demand = |slot: usize| TraceDemand { key: 0, slot, cost: self.cost(bytes[slot], &present[slot].limit) };
            return (0..present.len()).map(demand).collect();
        }
        let demand = |n: usize| self.demand(bytes[2 * n], bytes[2 * n] >> 2, bytes[2 * n + 1], trace, present);
        (0..1 + usize::from(bytes[6]) % 3).map(demand).collect()
    }

    fn demand(&self, key: u8, slot: u8, cost: u8, trace: &Trace, present: &[Slot]) -> TraceDemand {
        let key = if trace.wandering { 0 } else { usize::from(key) % SUBJECTS.len() };
        let slot = usize::from(slot) % present.len();
        TraceDemand { key, slot, cost: self.cost(cost, &present[slot].limit) }
    }

    fn cost(&self, byte: u8, limit: &Limit) -> u32 {
        let (quota, max) = (limit.quota(), limit.cost_max());
        match byte {
            0..=19 => 0,
            20..=109 => 1,
            110..=129 => 2,
            130..=149 => 3,
            150..=164 => max / 2,
            165..=179 => max / 3,
            180..=199 => max.saturating_sub(1),
            200..=224 => max,
            225..=234 => quota,
            235..=244 => max + 1,
            245 => u32::MAX,
            _ => u32::from(byte - 245),
        }
    }

    fn step(&self, bytes: [u8; 7], trace: &Trace, present: &[Slot]) -> Step {
        let slot = usize::from(bytes[1]) % present.len();
        let limit = &present[slot].limit;
        let window_us = limit.window_us();
        let offset_us = i64::from(bytes[2] % 3) - 1;
        let unit_us = window_us / u64::from(limit.quota());
        match bytes[0] {
            0..=9 => Step::By(0),
            10..=39 => Step::By(u64::from(bytes[2] % 4)),
            40..=69 => Step::By(self.pick(bytes[2], &[window_us - 1, window_us, window_us + 1])),
            70..=89 => Step::By(window_us / u64::from(bytes[2].max(1))),
            90..=109 => Step::By(self.pick(bytes[2], &[unit_us, unit_us + 1, unit_us.saturating_sub(1), 3 * unit_us])),
            110..=119 => {
                Step::By(self.pick(bytes[2], &[2 * window_us - 1, 2 * window_us, 2 * window_us + 1, 5 * window_us]))
            }
            120..=159 => Step::ToEdge { slot, offset_us },
            160..=219 if !trace.wandering || bytes[3] & 1 == 1 => Step::ToRetry { offset_us },
            _ if !trace.wandering => Step::By(u64::from(bytes[3]) * u64::from(bytes[2])),
            160..=179 => Step::Back(self.pick(bytes[2], &[1, 2, 1_000, 1_000_000])),
            180..=199 => Step::Back(3_600_000_000),
            200..=229 => Step::Back(window_us / u64::from(bytes[2].max(1))),
            _ => Step::Back(self.pick(bytes[2], &[window_us - 1, window_us, window_us + 1, 3 * window_us])),
        }
    }

    fn change(&self, bytes: [u8; 7], trace: &Trace, present: &[Slot]) -> Operation {
        let slot = usize::from(bytes[0]) % present.len();
        let Slot { limit: old, in_rule } = present[slot];
        let quota = self.pick(bytes[1], &QUOTAS);
        let changed = match (trace.wandering, in_rule) {
            (false, _) if is_bucket(&old) => old,
            (false, _) => limit(old.algorithm(), quota, old.window_us(), bytes[2]),
            (true, false) => limit(old.algorithm(), quota, old.window_us(), bytes[2]),
            (true, true) => {
                let window_us = if bytes[3] & 1 == 1 { self.pick(bytes[4], &WINDOWS_US) } else { old.window_us() };
                let algorithm = if bytes[3] & 6 == 6 { sibling(old.algorithm()) } else { old.algorithm() };
                limit(algorithm, quota, window_us, bytes[2])
            }
        };
        Operation::Change { slot, limit: changed }
    }
}

/// Returns the other algorithm with the same kind of state, such as `sliding-log` for `sliding`.
fn sibling(algorithm: Algorithm) -> Algorithm {
    match algorithm {
        Algorithm::Sliding => Algorithm::SlidingLog,
        Algorithm::SlidingLog => Algorithm::Sliding,
        Algorithm::SlidingCounter => Algorithm::FixedWindow,
        Algorithm::FixedWindow => Algorithm::SlidingCounter,
        Algorithm::TokenBucket => Algorithm::LeakyBucket,
        _ => Algorithm::TokenBucket,
    }
}

fn limit(algorithm: Algorithm, quota: u64, window_us: u64, options: u8) -> Limit {
    let quota = if algorithm == Algorithm::SlidingLog { quota.min(SLIDING_LOG_QUOTA_MAX.into()) } else { quota };
    let limit = Limit::new(quota, Duration::from_micros(window_us)).and_then(|l| l.with_algorithm(algorithm));
    let limit = limit.expect("the lists hold what a limit accepts");
    let capacity = QUOTAS[usize::from(options >> 4)];
    let limit = match algorithm {
        Algorithm::TokenBucket if options & 3 == 3 => limit.with_burst(capacity),
        Algorithm::LeakyBucket if options & 3 == 3 => limit.with_queue(capacity),
        _ => Ok(limit),
    };
    limit.expect("the lists hold what a limit accepts").with_count_denied(options & 12 == 12)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;
    use crate::conformance::trace::demands;

    /// Two buckets with one counter would make its lifetime depend on the last write.
    #[test]
    fn no_two_buckets_share_a_counter() {
        let mut random = Random::new(7);
        let mut two_buckets = 0;
        for _ in 0..10_000 {
            let trace = random.trace(Algorithm::TokenBucket);
            let buckets: Vec<usize> = (0..trace.slots.len()).filter(|n| is_bucket(&trace.slots[*n].limit)).collect();
            let asks: Vec<TraceDemand> =
                buckets.iter().map(|slot| TraceDemand { key: 0, slot: *slot, cost: 1 }).collect();
            two_buckets += usize::from(buckets.len() > 1);
            assert_eq!(demands(&asks, &trace.slots).len(), buckets.len(), "{trace}");
        }
        assert!(two_buckets > 1_000, "{two_buckets}");
    }
}
