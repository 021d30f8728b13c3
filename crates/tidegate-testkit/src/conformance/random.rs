//! Random traces from a seed.

use std::fmt;

use tidegate_core::Algorithm;

use super::shrink::shrink;
use super::{Difference, Implementation, Trace, compare};

/// A difference between an implementation and the oracle, with the shrunk trace that shows it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The shrunk trace.
    pub trace: Trace,
    /// The first difference on that trace.
    pub difference: Box<Difference>,
    /// The index of the original trace among those of its seed and algorithm.
    pub number: usize,
    /// The number of operations of the original trace.
    pub operations_before: usize,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "trace {} (shrunk from {} operations):", self.number, self.operations_before)?;
        write!(f, "{}{}", self.trace, self.difference)
    }
}

/// Compares implementations with the oracle on `count` random traces for each algorithm.
///
/// The traces are determined by `seed`. `fresh` creates an implementation without counters, one for each trace. A trace that
/// needs more than the implementation's abilities is [reduced](Trace::within) or skipped.
///
/// # Errors
/// If they differ. Contains the first trace on which they do, shrunk.
pub fn random_traces<S: Implementation>(
    count: usize,
    seed: u64,
    mut fresh: impl FnMut() -> S,
) -> Result<(), Box<Failure>> {
    Algorithm::ALL.into_iter().try_for_each(|algorithm| random_traces_of(algorithm, count, seed, &mut fresh))
}

/// Compares implementations with the oracle on `count` random traces whose first limit has this algorithm.
///
/// The traces are determined by `seed`. `fresh` creates an implementation without counters, one for each trace. A trace that
/// needs more than the implementation's abilities is [reduced](Trace::within) or skipped.
///
/// # Errors
/// If they differ. Contains the first trace on which they do, shrunk.
pub fn random_traces_of<S: Implementation>(
    algorithm: Algorithm,
    count: usize,
    seed: u64,
    mut fresh: impl FnMut() -> S,
) -> Result<(), Box<Failure>> {
    let mut random = Random::new(seed);
    for number in 0..count {
        let mut implementation = fresh();
        let Some(trace) = random.trace(algorithm).within(implementation.abilities()) else { continue };
        if let Err(difference) = compare(&trace, &mut implementation) {
            return Err(Box::new(shrunk(trace, difference, number, &mut fresh)));
        }
    }
    Ok(())
}

/// Compares implementations with the oracle on `count` random traces of one long log each.
///
/// The logs have up to thousands of entries. The traces change costs, refund old entries, step the clock back, and
/// change the quota across the values at which a store changes its representation of a log. They are determined by
/// `seed`. `fresh` creates an implementation without counters, one for each trace. Its abilities are not considered; it must
/// support refunds, rules and fills.
///
/// # Errors
/// If they differ. Contains the first trace on which they do, shrunk.
pub fn long_traces<S: Implementation>(
    count: usize,
    seed: u64,
    mut fresh: impl FnMut() -> S,
) -> Result<(), Box<Failure>> {
    let mut random = Random::new(seed);
    for number in 0..count {
        let trace = Trace::long_log(&mut random);
        if let Err(difference) = compare(&trace, &mut fresh()) {
            return Err(Box::new(shrunk(trace, difference, number, &mut fresh)));
        }
    }
    Ok(())
}

/// Shrinks a trace on which an implementation and the oracle differ. Returns the smallest trace found, with its difference.
///
/// `number` and the original length are copied into the failure. `fresh` creates an implementation without counters.
fn shrunk<S: Implementation>(
    trace: Trace,
    difference: Box<Difference>,
    number: usize,
    fresh: &mut impl FnMut() -> S,
) -> Failure {
    let operations_before = trace.operations.len();
    let mut failure = Failure { trace: trace.clone(), difference, number, operations_before };
    // An implementation may hash with a random seed and so fail only sometimes. Keep the smallest trace that did fail, with
    // the difference seen on it.
    shrink(trace, |candidate| match compare(candidate, &mut fresh()) {
        Ok(()) => false,
        Err(difference) => {
            failure = Failure { trace: candidate.clone(), difference, number, operations_before };
            true
        }
    });
    failure
}

/// Returns the number of traces to run for each algorithm: `TIDEGATE_TRACES` if it is set, else `otherwise`.
///
/// # Panics
/// If the variable is not a number.
pub fn traces_from_env(otherwise: usize) -> usize {
    number_from_env("TIDEGATE_TRACES", otherwise)
}

fn number_from_env(name: &str, otherwise: usize) -> usize {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")),
        Err(_) => otherwise,
    }
}

/// A random number generator (splitmix64). A seed gives the same sequence of numbers on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator with this seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns the next number: 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a random number from 0 to `bound` − 1, nearly uniformly distributed.
    ///
    /// # Panics
    /// If `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    /// Returns a random number in [0, 1), uniformly distributed.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a random trace of 4 to 48 operations whose first limit has this algorithm.
    ///
    /// It has one to three limits, without [`Operation::Fill`](super::Operation::Fill).
    pub fn trace(&mut self, algorithm: Algorithm) -> Trace {
        let operations = 4 + self.below(44);
        let mut bytes: Vec<u8> = (0..3 + 12 + 8 * operations).map(|_| self.next_u64() as u8).collect();
        let number = Algorithm::ALL.iter().position(|other| *other == algorithm);
        bytes[0] = number.and_then(|number| u8::try_from(number).ok()).expect("there are few algorithms");
        Trace::from_bytes(&bytes)
    }
}
