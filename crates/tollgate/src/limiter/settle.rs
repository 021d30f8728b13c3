//! Settling an estimate: reserve before the work, pay what it really was after.
//!
//! What a request costs is often known only when it is done: the tokens of a completion, the rows of a query, the bytes of an
//! upload. Charging afterwards lets a burst through before the first bill comes; so an estimate is charged at the start, and
//! corrected at the end:
//!
//! ```text
//!   check, cost 500 ──▶ admitted, 500 are taken ──▶ the work ──▶ settle, 320:  180 go back
//!                                                            └─▶ settle, 650:  150 more are taken, fit or not
//! ```
//!
//! **Less than the estimate** is a refund of a part: the units that were never used leave the very entry, window or bucket level
//! that the estimate went into. The counter is then what it would be if the right cost had been charged at the start.
//!
//! **More than the estimate** has already been used, so asking whether it fits comes too late. It is charged as of now, and where it
//! does not fit the counter is full, no more: the same as a refused request under `count_denied`. Whoever underestimates
//! pays by waiting; the limit holds what was really used, up to its quota.
//!
//! **Once.** A settlement is made once per decision, by whoever got it, and by nobody if the decision was a denial. It is never
//! repeated here: whether a call that failed was executed is unknown. A lost refund errs towards refusal and is gone with its
//! window; a lost overrun errs towards admission, by what was underestimated once.

use smallvec::SmallVec;
use tollgate_core::{Check, Cost, Decision, Demand, Line, Lines, StoreError};

use super::{Backend, Limiter, guarded, is_of, panicked};

impl Limiter {
    /// Corrects what an admitted decision charged to what was really used, on every limit of its check that charged anything.
    /// Once per decision.
    ///
    /// ```
    /// use tollgate::{Check, CheckOptions, Cost, Demand, Key, Limiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::memory();
    /// let tokens = Demand::new("1000/min".parse()?, Key::new("api-key:7")?).cost(500);
    /// let check = Check::one(&tokens);
    /// // Units may come back, so no denial of this check is remembered.
    /// let options = CheckOptions { refundable: true, ..CheckOptions::default() };
    ///
    /// let reserved = limiter.check_with(&check, options).await?;
    /// assert_eq!(reserved.lines[0].remaining, 500);
    /// // … the work turns out to be smaller …
    /// limiter.settle(&check, &reserved, Cost::new(320)).await?;
    /// assert_eq!(limiter.inspect(&tokens).await?.remaining, 680);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// What a local answer charged is settled where it was charged; what nobody counted is not settled at all.
    ///
    /// # Errors
    /// When the store does not answer. The correction is then lost, never repeated.
    pub async fn settle(&self, check: &Check<'_>, decision: &Decision, actual: Cost) -> Result<(), StoreError> {
        let actual_of = |demand: &Demand<'_>| if demand.cost == Cost::PEEK { Cost::PEEK } else { actual };
        let actual: SmallVec<[Cost; 4]> = check.demands().iter().map(actual_of).collect();
        self.settle_each(check, decision, &actual).await
    }

    /// The same for a check whose limits count different things, requests and tokens, say: what was used of each, in the
    /// order of the check. A limit for which nothing is said stays as it is.
    ///
    /// # Errors
    /// When the store does not answer. What goes back and what is charged are two calls; the first error is told, and the other
    /// is made all the same. An error that [`is_unexecuted`](StoreError::is_unexecuted) speaks of both.
    pub async fn settle_each(&self, check: &Check<'_>, decision: &Decision, actual: &[Cost]) -> Result<(), StoreError> {
        if !decision.allowed() || !is_of(decision, check) {
            return Ok(());
        }
        let difference = Difference::between(check, decision, actual);
        let refunded = match Check::new(&difference.unused) {
            Ok(unused) => {
                let Decision { at, source, .. } = *decision;
                self.refund(&unused, &Decision { at, source, lines: difference.unused_lines }).await
            }
            Err(_nothing) => Ok(()),
        };
        let charged = match (Check::new(&difference.overrun), &self.0.backend) {
            (Ok(overrun), Backend::Memory(store)) => guarded(|| drop(store.check(&overrun))).ok_or_else(panicked),
            (Ok(overrun), Backend::Shared(shared)) => shared.charge(&overrun, decision.source).await,
            (Err(_nothing), _) => Ok(()),
        };
        match difference.unused.is_empty() || difference.overrun.is_empty() {
            true => refunded.and(charged),
            false => both(refunded, charged),
        }
    }
}

/// The answer to two calls: that nothing was executed is said only if it is true of both.
fn both(one: Result<(), StoreError>, other: Result<(), StoreError>) -> Result<(), StoreError> {
    match (one, other) {
        (Ok(()), Ok(())) => Ok(()),
        (Err(one), Err(other)) if other.is_unexecuted() => Err(one),
        (Err(error), _) | (Ok(()), Err(error)) => Err(error.in_part()),
    }
}

/// What was reserved and not used, and what was used and not reserved.
#[derive(Default)]
struct Difference<'a> {
    unused: SmallVec<[Demand<'a>; 2]>,
    unused_lines: Lines,
    overrun: SmallVec<[Demand<'a>; 2]>,
}

impl<'a> Difference<'a> {
    fn between(check: &Check<'a>, decision: &Decision, actual: &[Cost]) -> Difference<'a> {
        let mut difference = Difference::default();
        for ((demand, line), actual) in check.demands().iter().zip(&decision.lines).zip(actual) {
            let (reserved, used) = (line.cost, actual.units());
            if used < reserved {
                difference.unused.push(*demand);
                difference.unused_lines.push(Line { cost: reserved - used, ..*line });
            } else if used > reserved {
                // The counter is the same; only a refusal is charged, too.
                let limit = demand.limit.with_count_denied(true);
                difference.overrun.push(Demand { limit, ..*demand }.cost(used - reserved));
            }
        }
        difference
    }
}

#[cfg(test)]
mod tests;
