//! Decisions while the store does not answer.

use futures_util::FutureExt;

use tidegate_core::{OmittedLimits, Redeemed};

use super::*;
use OnFailure::{Allow, Deny, Local};

fn demand(limit: &str, subject: &'static str) -> Demand<'static> {
    Demand::new(limit.parse::<Limit>().unwrap(), Key::new(subject).unwrap())
}

/// Returns the options of limits with these failure policies.
fn with_policies(policies: &[OnFailure]) -> Vec<LimitOptions> {
    policies.iter().map(|&policy| LimitOptions { on_failure: Some(policy), ..LimitOptions::default() }).collect()
}

#[tokio::test(start_paused = true)]
async fn decision_that_omits_a_limit_has_the_statuses_of_the_others_and_can_be_refunded_and_settled() {
    let bench = bench(|builder| builder);
    bench.behaviour(FAILS);
    let demands = [demand("5/min", "a"), demand("3/min leaky-bucket", "b"), demand("7/min", "c")];
    let check = Check::new(&demands).unwrap();
    let each = with_policies(&[Allow, Local, Local]);
    let options = CheckOptions { each: &each, refundable: true, ..CheckOptions::default() };
    let _ = bench.limiter.check_with(&check, options).await.unwrap();
    let decision = bench.limiter.check_with(&check, options).await.unwrap();
    assert_eq!(decision.omitted, OmittedLimits::from_iter([0]));
    assert_eq!((decision.allowed(), decision.source), (true, Source::Local));
    let statuses: Vec<_> = decision.limits.iter().map(|status| (status.quota, status.remaining)).collect();
    assert_eq!(statuses, [(3, 2), (7, 5)]);
    assert_eq!(decision.retry_after().as_secs_ceil(), Some(20), "the wait of the decided limits is reported");

    let left = async || {
        let peeks = demands.map(|demand| demand.cost(0));
        let decision = bench.limiter.check(&Check::new(&peeks).unwrap()).await.unwrap();
        decision.limits.iter().map(|status| status.remaining).collect::<Vec<_>>()
    };
    bench.limiter.refund(&Check::new(&demands[1..]).unwrap(), &decision).await.unwrap();
    assert_eq!(left().await, [5, 2, 5], "the decision is not on this check");
    bench.limiter.refund(&check, &decision).await.unwrap();
    assert_eq!(left().await, [5, 3, 6]);
    let decision = bench.limiter.check_with(&check, options).await.unwrap();
    bench.limiter.settle_each(&check, &decision, &[4.into(), 0.into(), 3.into()]).await.unwrap();
    assert_eq!(left().await, [5, 3, 3]);
    let decision = bench.limiter.check_with(&check, options).await.unwrap();
    let id = bench.limiter.receipt_id(&check);
    for expected in [Redeemed::Done, Redeemed::AlreadyUsed] {
        assert_eq!(bench.limiter.redeem(id, &check, &decision, &[2.into(), 0.into()]).await.unwrap(), expected);
        assert_eq!(left().await, [5, 3, 2], "the third limit keeps its charge");
    }
}

#[tokio::test(start_paused = true)]
async fn limit_without_a_failure_policy_has_that_of_the_limiter() {
    let demands = [demand("5/min", "a"), demand("1/min", "b")];
    let check = Check::new(&demands).unwrap();
    for (own, policies, is_covered) in [
        (Local, &[Allow][..], Some([false, true])),
        (Local, &[], Some([true, true])),
        (Allow, &[], Some([false, false])),
        (Allow, &[Local], Some([true, false])),
        (Deny, &[Allow], None),
        (Deny, &[Allow, Allow, Deny], Some([false, false])),
    ] {
        let bench = bench(|builder| builder.on_failure(own));
        bench.behaviour(FAILS);
        let each = with_policies(policies);
        let answer = bench.limiter.check_with(&check, CheckOptions { each: &each, ..CheckOptions::default() }).await;
        let is_decided = answer.as_ref().ok().map(|decision| [0, 1].map(|index| !decision.omitted.contains(index)));
        assert_eq!(is_decided, is_covered, "{own:?} {policies:?}");
        let is_complete = answer.as_ref().is_ok_and(|decision| decision.omitted.is_empty());
        assert_eq!(is_complete, is_covered == Some([true, true]), "{own:?} {policies:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn cost_above_the_share_but_within_the_limit_has_a_finite_retry_after() {
    let bench = bench(|builder| builder.instances(4));
    bench.behaviour(FAILS);
    for (cost, wait) in [(2, Some(0)), (3, Some(60)), (8, Some(60)), (9, None)] {
        let demand = demand("8/min", "a").cost(cost);
        let decision = bench.limiter.check(&Check::one(&demand)).await.unwrap();
        assert_eq!((decision.source, decision.retry_after().as_secs_ceil()), (Source::Local, wait), "{cost}");
    }
}

#[test]
fn check_without_a_runtime_or_timer_is_decided_by_the_policy_and_does_not_count_against_the_store() {
    let bench = bench(|builder| builder);
    for _ in 0..5 {
        let answered = bench.ask("10/min", "a").now_or_never().expect("it does not wait");
        assert_eq!(answered.unwrap().source, Source::Local);
    }
    let demand = demand("10/min", "a");
    let inspected = bench.limiter.inspect(&demand).now_or_never().expect("it does not wait");
    assert!(inspected.is_err_and(|error| error.is_unexecuted()));

    let builder = || tokio::runtime::Builder::new_current_thread();
    let timeless = builder().build().unwrap();
    for _ in 0..5 {
        assert_eq!(timeless.block_on(bench.ask("10/min", "a")).unwrap().source, Source::Local);
    }
    let stats = bench.limiter.stats();
    assert_eq!((bench.calls(), stats.store_calls, stats.store_failures, stats.breaker_opened), (0, 0, 0, 0));
    let timed = builder().enable_time().build().unwrap();
    assert_eq!(timed.block_on(bench.ask("10/min", "a")).unwrap().source, Source::Store);
}

/// A clock, and so a store in process, that panics.
struct Broken;

impl Clock for Broken {
    fn now(&self) -> Timestamp {
        panic!("a bug in a clock");
    }
}

#[tokio::test(start_paused = true)]
async fn panic_of_the_in_process_store_is_handled_by_the_failure_policy() {
    let memory = || MemoryStore::builder().clock(Arc::new(Broken)).build();
    let shared = bench(|builder| builder.memory(memory()));
    let demand = demand("10/min", "a");
    let check = Check::one(&demand);
    let admitted = shared.limiter.check(&check).await.unwrap();
    let by_node = Decision { source: Source::Local, ..admitted };
    shared.behaviour(FAILS);
    assert_eq!(shared.ask("10/min", "a").await.unwrap().source, Source::None);
    let alone = Limiter::builder().memory(memory()).build();
    for limiter in [&shared.limiter, &alone] {
        assert!(limiter.refund(&check, &by_node).await.is_err());
        assert!(limiter.settle(&check, &by_node, 0.into()).await.is_err());
        assert!(limiter.settle(&check, &by_node, 5.into()).await.is_err());
    }
    assert_eq!(alone.check(&check).await.unwrap().source, Source::None);
    assert!(alone.inspect(&demand).await.is_err());
}
