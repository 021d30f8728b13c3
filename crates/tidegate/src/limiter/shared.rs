//! A shared store, which may not answer: deadline, circuit breaker, deny cache, local share.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{FusedFuture, join_all, try_join_all};
use smallvec::SmallVec;
use tidegate_core::{
    Atomicity, BanListing, Check, Clock, Cost, Decision, Demand, LimitStatus, MemoryStore, Preview, ReceiptId,
    Redeemed, ShardId, Source, Store, StoreError, StoreErrorKind as Kind, Timestamp, Wait,
};
use tokio::time::{Instant, timeout};

use super::announcing::{self, Announcing};
use super::denied_parts::{DeniedParts, PartTurn, Turn};
use super::health::{Health, ShardHealth};
use super::late_calls::{LATE_MAX, LateCalls, OwnedCheck};
use super::parts::{self, Answer, Asked, Part, PartAnswer, PartToAsk};
use super::settle::Difference;
use super::stats::{Counters, add};
use super::{CheckOptions, catch_panic, panicked, probing, redeem_in_memory};
use crate::breaker::Phase;
use crate::deadline::{LATENESS_MAX, answer_by, timer};
use crate::deny_cache::{CallSpan, DenyCache, has_several_subjects};
use crate::failure::{OnFailure, Unavailable, local_share, local_wait};
use crate::observe::{Observers, StoreCallKind as Call};
use crate::run_to_completion::{PendingWork, RunToCompletion};

const NO_TIMER: &str = "the store can be used only inside a tokio runtime with time enabled";
pub(super) const NOT_ASKED: &str = "the store is not called until a probe succeeds";

/// A shared store with its deadline, circuit breaker and deny cache, and this instance's shares of the limits.
pub(super) struct Shared {
    store: Arc<dyn Store>,
    local: MemoryStore,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) observers: Observers,
    deny_cache: Option<DenyCache>,
    denied_parts: DeniedParts,
    pub(super) late_calls: LateCalls,
    /// The checks on several servers whose callers are gone.
    pub(super) pending: Arc<PendingWork>,
    /// Whether a task is asking the store for the bans of the subjects of a check.
    is_finding_ban: AtomicBool,
    health: Health,
    pub(super) deadlines: Deadlines,
    /// The configured number of instances, which overrides the counted one.
    instances: Option<u32>,
    pub(super) announcing: Announcing,
}

/// The parts from which [`Shared::new`] builds a [`Shared`].
pub(super) struct SharedParts {
    pub(super) store: Arc<dyn Store>,
    pub(super) local: MemoryStore,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) observers: Observers,
    pub(super) deadlines: Deadlines,
    pub(super) instances: Option<u32>,
    pub(super) announces: bool,
    pub(super) has_deny_cache: bool,
}

/// The deadlines for an answer from the store.
#[derive(Clone, Copy)]
pub(super) struct Deadlines {
    /// For checks, and for all calls that are not decisions.
    pub(super) check: Duration,
    /// For the checks of [`Limiter::until_ready`](super::Limiter::until_ready).
    pub(super) ready: Duration,
}

/// A call that asks one server to decide checks.
struct ServerCall<'a> {
    shard: Arc<ShardHealth>,
    checks: SmallVec<[Check<'a>; 1]>,
    /// For each check, the turn in which it charges a part of a check on several servers. `None` for a whole check, and
    /// for the preview of a part.
    turns: SmallVec<[Option<PartTurn>; 1]>,
}

/// Returns what is left of `time` after `spent`. `None` if all of it is spent.
fn time_left(time: Duration, spent: Duration) -> Option<Duration> {
    if spent.is_zero() {
        return Some(time);
    }
    time.checked_sub(spent).filter(|left| !left.is_zero())
}

impl Shared {
    pub(super) fn new(parts: SharedParts) -> Shared {
        let SharedParts { store, local, clock, observers, deadlines, instances, .. } = parts;
        let deny_cache = parts.has_deny_cache.then(DenyCache::default);
        let announcing = Announcing::new(parts.announces);
        let (denied_parts, late_calls, health) = (DeniedParts::default(), LateCalls::default(), Health::default());
        let is_finding_ban = AtomicBool::new(false);
        Shared {
            store,
            local,
            clock,
            observers,
            deny_cache,
            denied_parts,
            late_calls,
            pending: Arc::default(),
            is_finding_ban,
            health,
            deadlines,
            instances,
            announcing,
        }
    }

    /// Returns the number of instances among which a quota is divided while the store does not answer: the configured
    /// one, else the last known number of those that share the store, else 1.
    pub(super) fn instances(&self) -> u32 {
        self.instances.unwrap_or_else(|| self.announcing.live_instances())
    }

    /// Returns the memory store that holds this instance's shares.
    pub(super) fn local(&self) -> &MemoryStore {
        &self.local
    }

    pub(super) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    pub(super) fn health(&self) -> &Health {
        &self.health
    }

    /// Decides the checks by the deny cache, else by one call to the store, else by the failure policies of `options`.
    /// Returns one result per check, in order.
    ///
    /// The store has the time `deadline` to answer, less [`CheckOptions::spent`]. Refundable checks, and those with
    /// `count_denied`, do not use the deny cache. Calls to the store are counted in `counters`, decisions are not.
    pub(super) async fn check_batch(
        self: &Arc<Self>,
        checks: &[Check<'_>],
        options: &CheckOptions<'_>,
        deadline: Duration,
        counters: &Arc<Counters>,
    ) -> Vec<Result<Decision, Unavailable>> {
        announcing::start(self);
        let budget = time_left(deadline, options.spent);
        let sent = self.clock.now();
        let cache_for = |check: &Check<'_>| {
            let lasts = !options.refundable && !check.demands().iter().any(|demand| demand.limit.count_denied());
            self.deny_cache.as_ref().filter(|_| lasts)
        };
        let recall = |check: &Check<'_>| cache_for(check).and_then(|cache| cache.recall(check, sent, options.may_omit));
        let recalled = checks.iter().map(|check| recall(check).map(Ok));
        let mut answers: Vec<Option<Result<Decision, Unavailable>>> = recalled.collect();
        let unknown: SmallVec<[Check<'_>; 1]> =
            checks.iter().zip(&answers).filter(|(_, answer)| answer.is_none()).map(|(check, _)| *check).collect();
        if unknown.is_empty() {
            return answers.into_iter().flatten().collect();
        }

        let asked = match self.store.atomicity() {
            Atomicity::Check => {
                let shard = self.health.of(parts::location_of(&unknown[0], &*self.store).shard, &*self.store);
                let turns = unknown.iter().map(|_| None).collect();
                let call = ServerCall { shard, checks: unknown.clone(), turns };
                let asked = self.ask_shard(&call, sent, budget, counters).await;
                asked.into_iter().map(|asked| asked.map(Answer::Whole)).collect()
            }
            _ if unknown.iter().any(has_several_subjects) => {
                let checks: Vec<OwnedCheck> = unknown.iter().map(OwnedCheck::of).collect();
                let (shared, counters) = (self.clone(), counters.clone());
                // A caller that is gone must not leave the charge of one part of a check that another part denies.
                let asked = async move {
                    let demands: SmallVec<[_; 1]> = checks.iter().map(OwnedCheck::demands).collect();
                    let checks: SmallVec<[Check<'_>; 1]> =
                        demands.iter().map(|demands| Check::of_distinct(demands)).collect();
                    shared.ask_by_parts(&checks, sent, budget, &counters).await
                };
                RunToCompletion::new(self.pending.clone(), asked).await
            }
            _ => self.ask_by_parts(&unknown, sent, budget, counters).await,
        };
        let call = CallSpan { sent, received: self.clock.now().max(sent) };
        let mut fresh = unknown.iter().zip(asked).map(|(check, asked)| match asked {
            Ok(Answer::Whole(decision)) => {
                if let Some(cache) = cache_for(check) {
                    cache.learn(check, &decision, call);
                    if decision.ban.is_some() && has_several_subjects(check) {
                        self.find_banned_subjects(check);
                    }
                }
                Ok(decision)
            }
            Ok(Answer::Combined(decision)) => {
                if let Some(cache) = cache_for(check) {
                    cache.learn_own(check, &decision, options.each, call);
                }
                Ok(decision)
            }
            Err(failure) => self.degraded(check, options, failure),
        });
        answers.iter_mut().filter(|answer| answer.is_none()).for_each(|answer| *answer = fresh.next());
        answers.into_iter().flatten().collect()
    }

    /// Asks one server to decide checks, unless its breaker is open. Returns one result per check, in order.
    ///
    /// If the call fails as a whole, or is not made, the result of every check is that failure.
    async fn ask_shard(
        self: &Arc<Self>,
        call: &ServerCall<'_>,
        sent: Timestamp,
        budget: Option<Duration>,
        counters: &Counters,
    ) -> Vec<Result<Decision, Unavailable>> {
        let asked = match call.shard.breaker.admit_call(sent) {
            Some(phase) => self.ask_store(call, phase, sent, budget, counters).await,
            None => Err(call.shard.last_failure()),
        };
        asked.unwrap_or_else(|failure| call.checks.iter().map(|_| Err(failure.clone())).collect())
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
    ) -> Vec<Result<Answer, Unavailable>> {
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

    /// Refunds charges for checks that were decided otherwise. A refund that fails is not repeated.
    async fn refund_charges<'a>(&self, charges: impl Iterator<Item = (&'a OwnedCheck, &'a Decision)>) {
        let refund = |(check, decision): (&'a OwnedCheck, &'a Decision)| async move {
            let demands = check.demands();
            let check = check.borrow(&demands);
            let refund = async { self.store.refund(&check, decision).await };
            if let Some(call) = self.begin(Call::Refund, 1, (LATE_MAX, ShardId::default()), refund) {
                let _ = call.await;
            }
            // A denial that was cached in the meantime may be due to the refunded units.
            self.forget(&check);
        };
        join_all(charges.map(refund)).await;
    }

    /// Awaits the reply to a call that has missed its deadline, and refunds what it has charged, because its checks were
    /// decided by the failure policy. If the call fails, does nothing: it is unknown whether it was executed.
    async fn refund_late(
        self: Arc<Self>,
        call: impl Future<Output = Result<Vec<Result<Decision, StoreError>>, StoreError>>,
        checks: Arc<[OwnedCheck]>,
        turns: SmallVec<[Option<PartTurn>; 1]>,
    ) {
        let Ok(answers) = call.await else { return };
        let now = self.clock.now();
        for (turn, answer) in turns.iter().zip(&answers) {
            if let (Some(turn), Ok(decision)) = (turn, answer)
                && !decision.allowed()
            {
                turn.turn.learn(turn.part, decision, now);
            }
        }
        let decided = checks.iter().zip(&answers).filter_map(|(check, answer)| Some((check, answer.as_ref().ok()?)));
        self.refund_charges(decided.filter(|(check, decision)| decision.allowed() && check.charges())).await;
    }

    /// Decides checks by a call that does not borrow from its caller. See [`Shared::decide`].
    async fn decide_owned(
        self: Arc<Self>,
        checks: Arc<[OwnedCheck]>,
    ) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let demands: SmallVec<[_; 1]> = checks.iter().map(OwnedCheck::demands).collect();
        let checks: SmallVec<[Check<'_>; 1]> =
            checks.iter().zip(&demands).map(|(check, demands)| check.borrow(demands)).collect();
        self.decide(&checks).await
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
    async fn for_each_part<'a, F, Fut, T>(&self, check: &Check<'a>, call: F) -> Result<SmallVec<[T; 1]>, StoreError>
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

    /// Refunds a decision in the store or, for [`Source::Local`], in the local share. Other sources refund nothing.
    ///
    /// A refund in the store removes the counters of the check from the deny cache, and fails at once while the breaker
    /// is open. One in the local share fails only if the memory store panics.
    pub(super) async fn refund(self: &Arc<Self>, check: &Check<'_>, decision: &Decision) -> Result<(), StoreError> {
        match decision.source {
            Source::Store => {
                self.forget(check);
                let refunds = self.for_each_part(check, |part| async move {
                    let decision = part.decision(decision);
                    self.call(Call::Refund, 1, async { self.store.refund(&part.check(), &decision).await }).await
                });
                let refunded = refunds.await;
                // Forgets a denial that was cached during the refund.
                self.forget(check);
                refunded.map(drop)
            }
            Source::Local => {
                let demands = self.local_demands(check);
                match Check::new(&demands) {
                    Ok(check) => catch_panic(|| self.local.refund(&check, decision)).ok_or_else(panicked),
                    Err(_) => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Charges `check`, which holds the units that were used beyond a decision of this source.
    ///
    /// Its limits must have `count_denied`, so that they are charged whether or not they fit. Does nothing for a source
    /// other than the store and the local share. A charge in the store fails at once while the breaker is open.
    pub(super) async fn charge(&self, check: &Check<'_>, source: Source) -> Result<(), StoreError> {
        match source {
            Source::Store => {
                let charges = self.for_each_part(check, |part| async move {
                    self.call(Call::Settle, 1, async { self.store.decide(&[part.check()]).await }).await
                });
                charges.await.map(drop)
            }
            Source::Local => match self.check_local(check).source {
                Source::Local => Ok(()),
                _ => Err(panicked()),
            },
            _ => Ok(()),
        }
    }

    /// Corrects the charge of a decision in the store or, for [`Source::Local`], in the local share, once for all calls
    /// with this `id`. Other sources charged nothing. `decision` must have a status, and `actual` a cost, for each limit
    /// of the check.
    ///
    /// The deny cache and the breaker are used as in [`Shared::refund`].
    pub(super) async fn redeem(
        self: &Arc<Self>,
        id: ReceiptId,
        check: &Check<'_>,
        decision: &Decision,
        actual: &[Cost],
    ) -> Result<Redeemed, StoreError> {
        match decision.source {
            Source::Store => {
                if Difference::between(check, decision, actual).is_none() {
                    return Ok(Redeemed::Done);
                }
                self.forget(check);
                // Each partition marks the id, also one without a difference, so that it takes effect once in each.
                let redemptions = self.for_each_part(check, |part| async move {
                    let actual: SmallVec<[Cost; 2]> = part.indices.iter().map(|&index| actual[index]).collect();
                    let (check, own) = (part.check(), part.decision(decision));
                    let Some(difference) = Difference::between(&check, &own, &actual) else {
                        return Ok(Redeemed::Done);
                    };
                    let difference = difference.redeemable_as(decision);
                    let redemption = difference.redemption(id);
                    self.call(Call::Settle, 1, async { self.store.redeem(&redemption).await }).await
                });
                let redeemed = redemptions.await;
                // Forgets a denial that was cached during the redemption.
                self.forget(check);
                // The partition of the first limit decides which of several calls has used the id.
                redeemed.map(|outcomes| outcomes.first().copied().unwrap_or(Redeemed::Done))
            }
            Source::Local => match Check::new(&self.local_demands(check)) {
                Ok(check) => redeem_in_memory(&self.local, id, &check, decision, actual),
                Err(_) => Ok(Redeemed::Done),
            },
            _ => Ok(Redeemed::Done),
        }
    }

    pub(super) async fn reset(self: &Arc<Self>, demand: &Demand<'_>) -> Result<(), StoreError> {
        let local = Demand { limit: local_share(&demand.limit, self.instances()), ..*demand };
        catch_panic(|| self.local.reset(&local));
        let check = Check::one(demand);
        self.forget(&check);
        let reset = self.call(Call::Reset, 0, async { self.store.reset(demand).await }).await;
        self.forget(&check);
        reset
    }

    pub(super) async fn ban(&self, subject: &[u8], duration: Option<Duration>) -> Result<(), StoreError> {
        self.forget_ban(subject);
        let banned = self.call(Call::Ban, 0, async { self.store.ban(subject, duration).await }).await;
        self.forget_ban(subject);
        banned
    }

    pub(super) async fn unban(&self, subject: &[u8]) -> Result<bool, StoreError> {
        self.forget_ban(subject);
        let was_banned = self.call(Call::Ban, 0, async { self.store.unban(subject).await }).await;
        // Forgets a ban that was cached during the call.
        self.forget_ban(subject);
        was_banned
    }

    pub(super) async fn ban_of(&self, subject: &[u8]) -> Result<Option<Wait>, StoreError> {
        self.call(Call::Ban, 0, async { self.store.ban_of(subject).await }).await
    }

    pub(super) async fn list_ban(&self, entry: &str, duration: Option<Duration>) -> Result<bool, StoreError> {
        self.call(Call::Ban, 0, async { self.store.list_ban(entry, duration).await }).await
    }

    pub(super) async fn unlist_ban(&self, entry: &str) -> Result<bool, StoreError> {
        self.call(Call::Ban, 0, async { self.store.unlist_ban(entry).await }).await
    }

    pub(super) async fn listed_bans(&self) -> Result<BanListing, StoreError> {
        let listed = self.call(Call::Ban, 0, async { self.store.listed_bans(None).await }).await;
        listed.map(Option::unwrap_or_default)
    }

    /// Returns the ban list if its version is not `known`. No request waits for it, so it has the deadline of a probe.
    #[cfg(feature = "rules")]
    pub(super) async fn changed_bans(&self, known: Option<u64>) -> Result<Option<BanListing>, StoreError> {
        let deadline = probing::deadline(self.deadlines.check);
        match self.within(deadline, ShardId::default(), async { self.store.listed_bans(known).await }) {
            Some(call) => call.await,
            None => Err(StoreError::new(Kind::Unreachable, NO_TIMER)),
        }
    }

    /// Asks the store in the background which subjects of a refused check are banned, and caches their bans. Does
    /// nothing while such a task is running.
    fn find_banned_subjects(self: &Arc<Self>, check: &Check<'_>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.is_finding_ban.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut subjects: Vec<Vec<u8>> = check.demands().iter().map(|demand| demand.key.subject().to_vec()).collect();
        subjects.sort_unstable();
        subjects.dedup();
        let shared = self.clone();
        runtime.spawn(async move {
            for subject in subjects {
                let sent = shared.clock.now();
                let ban = shared.ban_of(&subject).await;
                if let (Ok(Some(ban)), Some(cache)) = (ban, &shared.deny_cache) {
                    cache.learn_ban_of(&subject, ban, CallSpan { sent, received: shared.clock.now().max(sent) });
                }
            }
            shared.is_finding_ban.store(false, Ordering::Relaxed);
        });
    }

    /// Removes the ban on a subject from the deny cache.
    fn forget_ban(&self, subject: &[u8]) {
        self.deny_cache.iter().for_each(|cache| cache.forget_ban(subject));
    }

    /// Removes the counters of a check from the deny cache.
    fn forget(&self, check: &Check<'_>) {
        if let Some(cache) = &self.deny_cache {
            check.demands().iter().for_each(|demand| cache.forget(demand));
        }
    }

    pub(super) async fn inspect(self: &Arc<Self>, demand: &Demand<'_>) -> Result<LimitStatus, StoreError> {
        self.call(Call::Inspect, 1, async { self.store.inspect(demand).await }).await
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

    /// Calls the store for decisions, within `budget`, and reports the result to the breaker. Without a budget, the
    /// caller has used up the deadline, and the store is not called.
    ///
    /// `phase` is the breaker's phase that admitted the call, `sent` the current time. Returns one result per check, in
    /// order. If the call is not answered within `budget`, a task waits for its reply and refunds what it has charged; see
    /// `late_calls.rs`.
    ///
    /// A failure that opens the breaker is logged, and starts the probe. Timeouts of a process that was short of
    /// CPU time, those that are not [conclusive](Shared::is_conclusive), and foreign data under a key do not count
    /// against the store. If the future is dropped before it completes, nothing is reported to the breaker.
    ///
    /// # Errors
    /// Returns an error if the call failed for all checks, or was not made: nothing is left of the deadline, or there
    /// is no tokio timer.
    async fn ask_store(
        self: &Arc<Self>,
        ServerCall { shard, checks, turns }: &ServerCall<'_>,
        phase: Phase,
        sent: Timestamp,
        budget: Option<Duration>,
        counters: &Counters,
    ) -> Result<Vec<Result<Decision, Unavailable>>, Unavailable> {
        let Some(deadline) = budget else {
            let failure = Unavailable::new(Kind::TimedOut, "the deadline passed before the store was called");
            if self.is_conclusive(Duration::ZERO, shard.id) {
                self.report_failure(shard, phase, sent, &failure);
            }
            return Err(failure);
        };
        let owned: Arc<[OwnedCheck]> = checks.iter().map(OwnedCheck::of).collect();
        let mut decide = Box::pin(self.clone().decide_owned(owned.clone())).fuse();
        let Some(call) = self.begin(Call::Decide, checks.len(), (deadline, shard.id), &mut decide) else {
            // The store was not called, so this says nothing about it.
            return Err(Unavailable::new(Kind::Unreachable, NO_TIMER));
        };
        add(&counters.store_calls);
        let begun = Instant::now();
        let error = match call.await {
            Ok(answers) => {
                // An answer that only `until_ready` could wait for does not show that checks would get one in time.
                let is_in_time = deadline <= self.deadlines.check || begun.elapsed() <= self.deadlines.check;
                if is_in_time {
                    add(&counters.store_answers);
                }
                if is_in_time && shard.breaker.succeeded(phase) {
                    self.report_recovery(shard);
                }
                let undecided = |error: StoreError| {
                    log_failure(&error, "the store did not decide one of several checks");
                    Unavailable::from(&error)
                };
                return Ok(answers.into_iter().map(|answer| answer.map_err(undecided)).collect());
            }
            Err(error) => error,
        };
        if error.kind() == Kind::TimedOut && !decide.is_terminated() {
            self.late_calls.spawn(checks.len(), self.clone().refund_late(decide, owned, turns.clone()));
        }
        add(&counters.store_failures);
        log_failure(&error, "the store did not decide");
        let failure = Unavailable::from(&error);
        // A deadline that this process noticed late says nothing about the store. If the store is down, the next error
        // of the connection opens the breaker.
        let was_starved = begun.elapsed() > deadline + LATENESS_MAX;
        let is_inconclusive =
            error.kind() == Kind::TimedOut && (was_starved || !self.is_conclusive(deadline, shard.id));
        if !is_of_its_counters(&error) && !is_inconclusive {
            self.report_failure(shard, phase, sent, &failure);
        }
        Err(failure)
    }

    /// Returns whether a check that got no answer from a server in the time `waited` shows that the server does not
    /// answer within the deadline of checks.
    ///
    /// A lookup of a plan or a key leaves a check only a part of the deadline. Half of it is enough: a lookup in the
    /// same store that was answered within the other half shows that an answer takes no longer. With less, it depends on
    /// the other calls to the server, such as that lookup: one of them must have been waiting for the whole deadline. An
    /// eighth is left for the time between the start of a lookup and its call.
    fn is_conclusive(&self, waited: Duration, shard: ShardId) -> bool {
        let deadline = self.deadlines.check;
        waited >= deadline / 2 || self.store.unanswered_for(shard).is_some_and(|time| time >= deadline / 8 * 7)
    }

    /// Reports a failed call to the breaker of its server. If that opens it, logs it and starts the probe.
    ///
    /// `phase` is the breaker's phase that admitted the call, `sent` the time at which it was sent.
    fn report_failure(
        self: &Arc<Self>,
        shard: &Arc<ShardHealth>,
        phase: Phase,
        sent: Timestamp,
        failure: &Unavailable,
    ) {
        if shard.breaker.failed(phase, sent, self.clock.now()) {
            let kind = failure.kind().as_str();
            tracing::warn!(kind, error = %failure, "the store is not called until a probe succeeds");
            shard.opened(failure);
            self.observers.breaker_changed(true);
            probing::start(self, shard);
        }
    }

    /// Calls the store and validates its reply: one result per check, and one status per limit of each check.
    ///
    /// Without that, a limit that the store did not decide would pass.
    ///
    /// # Errors
    /// Returns the error of the call, or an error of the kind `Protocol` if the reply is not valid. If every result is
    /// an error, returns one of them.
    pub(super) async fn decide(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let mut answers = self.store.decide_each(checks).await?;
        let is_whole = |(check, answer): (&Check<'_>, &Result<Decision, StoreError>)| {
            answer.as_ref().map_or(true, |decision| decision.limits.len() == check.demands().len())
        };
        if answers.len() != checks.len() || !checks.iter().zip(&answers).all(is_whole) {
            return Err(StoreError::new(Kind::Protocol, "the store returned the wrong number of results"));
        }
        if answers.iter().all(Result::is_err)
            && let Some(Err(error)) = answers.pop()
        {
            return Err(error);
        }
        Ok(answers)
    }

    /// Awaits a call to the store, at most for the deadline of its kind and up to 25 ms more, and reports it to the
    /// observers.
    ///
    /// `checks` is the number of checks that is reported. The breaker is neither consulted nor changed. If the future
    /// is dropped before it completes, nothing is reported.
    ///
    /// # Errors
    /// Returns the error of the call; or one of the kind `TimedOut` after the deadline, `Protocol` for a panic, or
    /// `Unreachable` without a tokio timer.
    pub(super) async fn call<T>(
        &self,
        kind: Call,
        checks: usize,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let deadline = if kind == Call::Probe { probing::deadline(self.deadlines.check) } else { self.deadlines.check };
        match self.begin(kind, checks, (deadline, ShardId::default()), call) {
            Some(call) => call.await,
            None => Err(StoreError::new(Kind::Unreachable, NO_TIMER)),
        }
    }

    /// Returns a future that awaits a call to the store, with a deadline from now on, and reports it to the observers.
    /// The message of a timeout names the server, unless it is 0.
    ///
    /// Returns `None`, and `call` is not polled, without a tokio timer. See [`Shared::within`] for the errors that it
    /// adds. If the future is dropped before it completes, nothing is reported.
    fn begin<T>(
        &self,
        kind: Call,
        checks: usize,
        (deadline, shard): (Duration, ShardId),
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<impl Future<Output = Result<T, StoreError>>> {
        let call = self.within(deadline, shard, call)?;
        Some(async move {
            let begun = self.observers.begin(&*self.clock);
            let answered = call.await;
            let result = answered.as_ref().map(drop).map_err(StoreError::kind);
            self.observers.store_called(begun, &*self.clock, (kind, checks), result);
            answered
        })
    }

    /// Returns a future that awaits `call`, with a deadline. Returns `None`, and `call` is not polled, without a tokio
    /// timer.
    ///
    /// The deadline counts from this call, not from the first poll. The future may exceed it by up to 25 ms to find a
    /// reply that has already arrived; see [`answer_by`]. It resolves to an error of the kind `TimedOut` at the
    /// deadline, and of the kind `Protocol` if `call` panics.
    pub(super) fn within<T>(
        &self,
        deadline: Duration,
        shard: ShardId,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<impl Future<Output = Result<T, StoreError>>> {
        let timer = timer(deadline)?;
        let answer = AssertUnwindSafe(answer_by(timer, &*self.store, call)).catch_unwind();
        Some(async move {
            match answer.await {
                Ok(Some(answer)) => answer,
                Ok(None) => {
                    let address = self.address_of(shard).or_else(|| self.store.address());
                    let store = address.map_or("the store".to_owned(), |url| format!("the store {url}"));
                    let message = format!("{store} did not answer within the deadline of {deadline:?}");
                    Err(StoreError::new(Kind::TimedOut, message))
                }
                Err(_panic) => Err(StoreError::new(Kind::Protocol, "the store panicked")),
            }
        })
    }

    /// Returns the address of a server of the store, or `None` if it is not known.
    fn address_of(&self, id: ShardId) -> Option<String> {
        self.store.shards().into_iter().find(|shard| shard.id == id).and_then(|shard| shard.address)
    }

    /// Returns an error if the breaker of a server is open, so that callers do not wait for a server that is down.
    fn fail_if_open(&self, shard: ShardId) -> Result<(), StoreError> {
        if self.health.of(shard, &*self.store).breaker.is_open() {
            Err(StoreError::new(Kind::Unreachable, NOT_ASKED))
        } else {
            Ok(())
        }
    }

    /// Logs that a server of the store is responding again, and reports to the observers whether a breaker is still open.
    pub(super) fn report_recovery(&self, shard: &ShardHealth) {
        shard.probed(&Ok(()));
        match self.address_of(shard.id) {
            Some(address) => tracing::info!(address, "the store is responding again"),
            None => tracing::info!("the store is responding again"),
        }
        self.observers.breaker_changed(self.health.is_any_open());
    }

    /// Decides a check without the store, by the failure policy of each limit: limits with `local` by this instance's
    /// share, those with `allow` are omitted.
    ///
    /// If no limit is `local`, or the memory store panics, the result is an uncounted admission.
    ///
    /// # Errors
    /// Returns `failure` if the policy of a limit is `deny`.
    fn degraded(
        &self,
        check: &Check<'_>,
        options: &CheckOptions<'_>,
        failure: Unavailable,
    ) -> Result<Decision, Unavailable> {
        if options.denies_on_failure(check) {
            return Err(failure);
        }
        let policies = || options.policies(check).enumerate();
        let local = policies().filter(|(_, policy)| *policy == OnFailure::Local);
        let local: SmallVec<[Demand<'_>; 2]> = local.map(|(index, _)| check.demands()[index]).collect();
        let Ok(local) = Check::new(&local) else { return Ok(Decision::uncounted(self.clock.now())) };
        let mut decision = self.check_local(&local);
        if decision.source == Source::Local {
            let omitted = policies().filter(|(_, policy)| *policy != OnFailure::Local);
            decision.omitted = omitted.map(|(index, _)| index).collect();
        }
        Ok(decision)
    }

    /// Decides a check by this instance's share of each limit, and charges the shares. If the memory store panics,
    /// admits the check uncounted.
    ///
    /// The decision has [`Source::Local`], and waits of [`local_wait`]. An uncounted admission has [`Source::None`].
    pub(super) fn check_local(&self, check: &Check<'_>) -> Decision {
        let demands = self.local_demands(check);
        let decided = Check::new(&demands).ok().and_then(|local| catch_panic(|| self.local.check(&local)));
        let Some(mut decision) = decided else { return Decision::uncounted(self.clock.now()) };
        decision.source = Source::Local;
        for (demand, status) in check.demands().iter().zip(&mut decision.limits) {
            status.retry_after = local_wait(status.retry_after, demand);
        }
        decision
    }

    /// Returns the demands of a check, with this instance's share of each limit.
    fn local_demands<'a>(&self, check: &Check<'a>) -> SmallVec<[Demand<'a>; 2]> {
        let instances = self.instances();
        let share = |demand: &Demand<'a>| Demand { limit: local_share(&demand.limit, instances), ..*demand };
        check.demands().iter().map(share).collect()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.announcing.withdraw_in_background(&self.store);
    }
}

/// Logs `what` and the error of a store: at error level for [`Kind::Script`], a bug in Tidegate, and for
/// [`Kind::Unsupported`], which only a change of the configuration fixes; otherwise at debug level.
fn log_failure(error: &StoreError, what: &'static str) {
    match error.kind() {
        Kind::Script | Kind::Unsupported => tracing::error!(kind = error.kind().as_str(), %error, "{what}"),
        _ => tracing::debug!(kind = error.kind().as_str(), %error, "{what}"),
    }
}

/// Returns whether the error concerns the check's counters and does not count against the server: there is foreign data
/// under a key, or the counters are being moved to another server.
pub(super) fn is_of_its_counters(error: &StoreError) -> bool {
    matches!(error.kind(), Kind::Foreign | Kind::ForeignInPart | Kind::Relocating)
}
