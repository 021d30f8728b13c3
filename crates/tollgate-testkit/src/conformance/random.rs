//! Many traces from one seed.

use std::fmt;

use tollgate_core::Algorithm;

use super::shrink::shrink;
use super::{Difference, Subject, Trace, compare};

/// A trace on which a subject and the oracle differ, already shrunk.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What happens.
    pub trace: Trace,
    /// Where they differ.
    pub difference: Box<Difference>,
    /// The number of the trace under its seed.
    pub number: usize,
    /// How many operations it had before it was shrunk.
    pub operations_before: usize,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "trace {} (shrunk from {} operations):", self.number, self.operations_before)?;
        write!(f, "{}{}", self.trace, self.difference)
    }
}

/// Puts a fresh subject through `count` random traces for each algorithm, beside the oracle.
///
/// # Errors
/// With the first trace on which they differ, shrunk.
pub fn random_traces<S: Subject>(count: usize, seed: u64, mut fresh: impl FnMut() -> S) -> Result<(), Box<Failure>> {
    Algorithm::ALL.into_iter().try_for_each(|algorithm| random_traces_of(algorithm, count, seed, &mut fresh))
}

/// The same for one algorithm (which the first limit of each trace then has).
///
/// # Errors
/// With the first trace on which they differ, shrunk.
pub fn random_traces_of<S: Subject>(
    algorithm: Algorithm,
    count: usize,
    seed: u64,
    mut fresh: impl FnMut() -> S,
) -> Result<(), Box<Failure>> {
    let mut random = Random::new(seed);
    for number in 0..count {
        let mut subject = fresh();
        let Some(trace) = random.trace(algorithm).within(subject.abilities()) else { continue };
        if let Err(difference) = compare(&trace, &mut subject) {
            return Err(Box::new(shrunk(trace, difference, number, &mut fresh)));
        }
    }
    Ok(())
}

/// Puts a fresh subject through `count` random traces on one long log each, beside the oracle: up to thousands of
/// entries, changing costs, refunds of old entries, clock steps, and quotas that change across those where a store changes
/// how it keeps a log.
///
/// # Errors
/// With the first trace on which they differ, shrunk.
pub fn long_traces<S: Subject>(count: usize, seed: u64, mut fresh: impl FnMut() -> S) -> Result<(), Box<Failure>> {
    let mut random = Random::new(seed);
    for number in 0..count {
        let trace = Trace::of_a_long_log(&mut random);
        if let Err(difference) = compare(&trace, &mut fresh()) {
            return Err(Box::new(shrunk(trace, difference, number, &mut fresh)));
        }
    }
    Ok(())
}

fn shrunk<S: Subject>(
    trace: Trace,
    difference: Box<Difference>,
    number: usize,
    fresh: &mut impl FnMut() -> S,
) -> Failure {
    let operations_before = trace.operations.len();
    let mut failure = Failure { trace: trace.clone(), difference, number, operations_before };
    // A subject may hash with a seed of its own and so fail only now and then: what counts is the smallest
    // trace that was seen to fail, with the difference seen on it.
    shrink(trace, |candidate| match compare(candidate, &mut fresh()) {
        Ok(()) => false,
        Err(difference) => {
            failure = Failure { trace: candidate.clone(), difference, number, operations_before };
            true
        }
    });
    failure
}

/// How many traces to run for each algorithm: `TOLLGATE_TRACES`, or as many as given.
pub fn traces_from_env(otherwise: usize) -> usize {
    number_from_env("TOLLGATE_TRACES", otherwise)
}

fn number_from_env(name: &str, otherwise: usize) -> usize {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} should be a number, not {text:?}")),
        Err(_) => otherwise,
    }
}

/// Reproducible randomness (splitmix64): a seed gives the same run on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence that belongs to this seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound` (which is not 0), near enough to evenly.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A random trace whose first limit has this algorithm.
    pub fn trace(&mut self, algorithm: Algorithm) -> Trace {
        let operations = 4 + self.below(44);
        let mut bytes: Vec<u8> = (0..3 + 12 + 8 * operations).map(|_| self.next_u64() as u8).collect();
        let number = Algorithm::ALL.iter().position(|other| *other == algorithm);
        bytes[0] = number.and_then(|number| u8::try_from(number).ok()).expect("there are few algorithms");
        Trace::from_bytes(&bytes)
    }
}
