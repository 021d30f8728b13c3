//! Asking the store to decide checks: one server, or several servers about the parts of a check.
//!
//! `parts.rs` describes how a check is split and its answers are combined, `denied_parts.rs` which part is asked first.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use smallvec::SmallVec;
use tidegate_core::{Atomicity, Check, Decision, Preview, StoreError, StoreErrorKind as Kind, Timestamp};
use tokio::time::{Instant, timeout};

use super::denied_parts::{PartTurn, Turn};
use super::late_calls::OwnedCheck;
use super::panicked;
use super::parts::{self, Asked, CheckAnswer, Part, PartAnswer, PartToAsk};
use super::shared::{Shared, time_left};
use super::stats::Counters;
use super::store_calls::ServerCall;
use crate::deny_cache::{CallSpan, has_several_subjects};
use crate::failure::Unavailable;
use crate::observe::StoreCallKind as Call;
use crate::run_to_completion::RunToCompletion;

impl Shared {
    /// Asks the store to decide checks, within `budget`. Returns one result per check, in order.
    ///
    /// `sent` is the current time. Without a budget, the caller has used up the deadline, and the store is not called. The
    /// calls are counted in `counters`. If the future is dropped, checks of several subjects are decided nevertheless: a
    /// caller that is gone must not leave the charge of one part of a check that another part denies.
    pub(super) async fn ask(
        self: &Arc<Self>,
        checks: &[Check<'_>],
        sent: Timestamp,
        budget: Option<Duration>,
        counters: &Arc<Counters>,
    ) -> Vec<Result<CheckAnswer, Unavailable>> {
        if self.store.atomicity() == Atomicity::Check {
            let shard = self.health.of(parts::location_of(&checks[0], &*self.store).shard, &*self.store);
            let turns = checks.iter().map(|_| None).collect();
            let call = ServerCall { shard, checks: checks.iter().copied().collect(), turns };
            let asked = self.ask_shard(&call, sent, budget, counters).await;
            return asked.into_iter().map(|asked| asked.map(CheckAnswer::Whole)).collect();
        }
        if !checks.iter().any(has_several_subjects) {
            return self.ask_by_parts(checks, sent, budget, counters).await;
        }
        let checks: Vec<OwnedCheck> = checks.iter().map(OwnedCheck::of).collect();
        let (shared, counters) = (self.clone(), counters.clone());
        let asked = async move {
            let demands: SmallVec<[_; 1]> = checks.iter().map(OwnedCheck::demands).collect();
            let checks: SmallVec<[Check<'_>; 1]> = demands.iter().map(|demands| Check::of_distinct(demands)).collect();
            shared.ask_by_parts(&checks, sent, budget, &counters).await
        };
        RunToCompletion::new(self.pending.clone(), asked).await
    }

    /// Asks all servers that hold counters of the checks. Returns one result per check, in order.
    ///
    /// A check with counters in several partitions is split, and is admitted only if all its parts are. Otherwise, the
    /// charges of its admitted parts are refunded; see `parts.rs`. All parts are asked at the same time, unless one of
    /// them will probably be denied; see `denied_parts.rs`. A check is not sent at all if the breaker of one of its
    /// servers is open.
    async fn ask_by_parts(
        self: &Arc<Self>,
        checks: &[Check<'_>],
        sent: Timestamp,
        budget: Option<Duration>,
        counters: &Counters,
    ) -> Vec<Result<CheckAnswer, Unavailable>> {
        let begun = Instant::now();
        let split: Vec<SmallVec<[Part<'_>; 1]>> =
            checks.iter().map(|check| parts::split(check, &*self.store)).collect();
        let health = |part: &Part<'_>| self.health.of(part.location.shard, &*self.store);
        // If one part of a check cannot be sent, the others must not be charged.
        let blocked_by = |parts: &SmallVec<[Part<'_>; 1]>| {
            let several = parts.iter().filter(|_| parts.len() > 1);
            several.map(health).find(|shard| shard.breaker.is_open()).map(|shard| shard.last_failure())
        };
        let blocked: Vec<Option<Unavailable>> = split.iter().map(blocked_by).collect();
        let turn = |parts: &SmallVec<[Part<'_>; 1]>| Arc::new(self.denied_parts.turn(parts, sent));
        let turns: Vec<Option<Arc<Turn>>> = split.iter().map(|parts| (parts.len() > 1).then(|| turn(parts))).collect();
        let first = |check: usize| turns[check].as_ref().and_then(|turn| turn.first);
        let how = |check: usize, part: usize| match first(check) {
            Some(first) if first != part => Asked::Previewed,
            _ => Asked::Charged,
        };
        let to_ask = |(check, part): (usize, usize), asked: Asked| PartToAsk {
            part: &split[check][part],
            asked,
            turn: turns[check].clone().filter(|_| asked == Asked::Charged).map(|turn| PartTurn { turn, part }),
        };

        let of_check =
            |(check, parts): (usize, &SmallVec<[Part<'_>; 1]>)| (0..parts.len()).map(move |part| (check, part));
        let all = split.iter().enumerate().filter(|(check, _)| blocked[*check].is_none()).flat_map(of_check);
        let asked: Vec<PartToAsk<'_, '_>> =
            all.clone().map(|(check, part)| to_ask((check, part), how(check, part))).collect();
        let mut answers: Vec<SmallVec<[PartAnswer; 1]>> = split.iter().map(|_| SmallVec::new()).collect();
        for ((check, _), answer) in all.zip(self.ask_parts(&asked, sent, budget, counters).await) {
            answers[check].push(answer);
        }

        // The parts that were previewed so far, of checks that all parts allow.
        let is_waiting = |check: &usize| first(*check).is_some() && answers[*check].iter().all(PartAnswer::allows);
        let waiting: Vec<(usize, usize)> = (0..split.len())
            .filter(is_waiting)
            .flat_map(|check| of_check((check, &split[check])))
            .filter(|&(check, part)| answers[check].get(part).is_some_and(|answer| answer.asked == Asked::Previewed))
            .collect();
        if !waiting.is_empty() {
            let asked: Vec<PartToAsk<'_, '_>> = waiting.iter().map(|&part| to_ask(part, Asked::Charged)).collect();
            let (took, now) = (begun.elapsed(), self.clock.now());
            let left = budget.and_then(|budget| time_left(budget, took));
            // Without the time for an answer, the units would be charged, and their charge not be known.
            let second = if left.is_some_and(|left| left >= took) {
                self.ask_parts(&asked, now, left, counters).await
            } else {
                let failure = Unavailable::new(Kind::TimedOut, "the deadline is too short for a second round trip");
                let failed = |_| PartAnswer { asked: Asked::Previewed, result: Err(failure.clone()) };
                asked.iter().map(failed).collect()
            };
            waiting.iter().zip(second).for_each(|(&(check, part), answer)| answers[check][part] = answer);
        }

        let now = self.clock.now();
        let mut to_refund: Vec<(OwnedCheck, Decision)> = Vec::new();
        let mut concluded = Vec::with_capacity(checks.len());
        for ((((check, parts), turn), blocked), answers) in
            checks.iter().zip(&split).zip(&turns).zip(blocked).zip(answers)
        {
            if let Some(failure) = blocked {
                concluded.push(Err(failure));
                continue;
            }
            if let Some(turn) = turn {
                self.learn_parts(parts, turn, &answers, CallSpan { sent, received: now.max(sent) });
            }
            let (answer, refunds) = parts::conclude(check, parts, answers);
            counters.split_checks_refunded.fetch_add(u64::from(!refunds.is_empty()), Ordering::Relaxed);
            to_refund.extend(refunds);
            concluded.push(answer);
        }
        if !to_refund.is_empty() {
            // Each refund is sent at its first poll. One that does not complete in time completes without this caller.
            let left = budget.unwrap_or_default().saturating_sub(begun.elapsed());
            let (shared, count) = (self.clone(), to_refund.len());
            let mut refunds = Box::pin(async move {
                shared.refund_charges(to_refund.iter().map(|(check, decision)| (check, decision))).await;
                // The checks are in flight until here.
                drop(turns);
            });
            if timeout(left, &mut refunds).await.is_err() {
                self.late_calls.spawn(count, refunds);
            }
        }
        concluded
    }

    /// Asks all servers of these parts at the same time, with one call per server. Returns one answer per part, in order.
    async fn ask_parts<'a>(
        self: &Arc<Self>,
        parts: &[PartToAsk<'_, 'a>],
        sent: Timestamp,
        budget: Option<Duration>,
        counters: &Counters,
    ) -> Vec<PartAnswer> {
        let preview = |ask: &PartToAsk<'_, 'a>| (ask.asked == Asked::Previewed).then(|| Preview::of(&ask.part.demands));
        let previews: Vec<Option<Preview<'a>>> = parts.iter().map(preview).collect();
        let mut calls: Vec<ServerCall<'_>> = Vec::new();
        for (PartToAsk { part, turn, .. }, preview) in parts.iter().zip(&previews) {
            let check = preview.as_ref().map_or_else(|| part.check(), Preview::check);
            let check = check.in_partition(part.location.partition);
            let known = calls.iter().position(|call| call.shard.id == part.location.shard);
            let index = known.unwrap_or_else(|| {
                let shard = self.health.of(part.location.shard, &*self.store);
                calls.push(ServerCall { shard, checks: SmallVec::new(), turns: SmallVec::new() });
                calls.len() - 1
            });
            calls[index].checks.push(check);
            calls[index].turns.push(turn.clone());
        }
        let answers = calls.iter().map(|call| self.ask_shard(call, sent, budget, counters));
        let mut answers: Vec<_> = join_all(answers).await.into_iter().map(Vec::into_iter).collect();
        // Each call answers its parts in the order in which they were put into it.
        let answer_to = |(PartToAsk { part, asked, .. }, preview): (&PartToAsk<'_, 'a>, &Option<Preview<'a>>)| {
            let call = calls.iter().position(|call| call.shard.id == part.location.shard);
            let result =
                call.and_then(|call| answers[call].next()).unwrap_or_else(|| Err(Unavailable::from(&panicked())));
            let result = match preview {
                Some(preview) => result.map(|decision| preview.conclude(&decision)),
                None => result,
            };
            PartAnswer { asked: *asked, result }
        };
        parts.iter().zip(&previews).map(answer_to).collect()
    }

    /// Records the answers to the parts of a check: which of them denied it, and bans.
    fn learn_parts(&self, parts: &[Part<'_>], turn: &Turn, answers: &[PartAnswer], call: CallSpan) {
        for (index, (part, answer)) in parts.iter().zip(answers).enumerate() {
            let Ok(decision) = &answer.result else { continue };
            turn.learn(index, decision, call.received);
            if let Some(cache) = self.deny_cache.as_ref().filter(|_| decision.ban.is_some()) {
                cache.learn(&part.check(), decision, call);
            }
        }
    }

    /// Returns the parts of a check that the store decides at once: all of it, or one per partition.
    fn parts_of<'a>(&self, check: &Check<'a>) -> SmallVec<[Part<'a>; 1]> {
        match self.store.atomicity() {
            Atomicity::Check => SmallVec::from_iter([Part::whole(check, &*self.store)]),
            _ => parts::split(check, &*self.store),
        }
    }

    /// Makes a call for each part of a check, at the same time, except to servers whose breaker is open.
    ///
    /// # Errors
    /// Returns the first error. If another call may have been executed, it is [in part](StoreError::in_part).
    pub(super) async fn for_each_part<'a, F, Fut, T>(
        &self,
        check: &Check<'a>,
        call: F,
    ) -> Result<SmallVec<[T; 1]>, StoreError>
    where
        F: Fn(Part<'a>) -> Fut,
        Fut: Future<Output = Result<T, StoreError>>,
    {
        let parts = self.parts_of(check);
        let count = parts.len();
        let calls = parts.into_iter().map(|part| async {
            self.fail_if_open(part.location.shard)?;
            call(part).await
        });
        let results = join_all(calls).await;
        let is_in_part =
            count > 1 && results.iter().any(|result| !result.as_ref().is_err_and(StoreError::is_unexecuted));
        let results: Result<SmallVec<[T; 1]>, StoreError> = results.into_iter().collect();
        results.map_err(|error| if is_in_part { error.in_part() } else { error })
    }

    /// Previews a check: each partition by itself, at the same time.
    pub(super) async fn preview(&self, check: &Check<'_>) -> Result<Decision, StoreError> {
        let parts = self.parts_of(check);
        let preview = async |part: &Part<'_>| {
            let check = part.check();
            let previewed = self.call(Call::Inspect, 1, async { self.store.preview(&check).await }).await?;
            Ok((Asked::Previewed, previewed))
        };
        let previews = try_join_all(parts.iter().map(preview)).await?;
        Ok(parts::combine(check, &parts, &previews))
    }
}
