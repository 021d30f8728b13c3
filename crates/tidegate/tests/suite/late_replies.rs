//! Replies of the store that arrive after the deadline, in virtual time.
//!
//! The store is simulated. It decides checks at once, and its reply takes a time that the test sets: as with a real
//! store, a call whose future is dropped was executed. It executes a refund after that time.

use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tidegate::config::{Config, Format};
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::rules::RequestView;
use tidegate::{
    Atomicity, Check, CheckOptions, Decision, Demand, Key, LimitStatus, Limiter, LimiterBuilder, Location, MemoryStore,
    OnFailure, ShardId, Source, Store, StoreFuture,
};
use tidegate_testkit::simulated::VirtualClock;
use tokio::time::{Instant, sleep};

use super::round_trips::ms;

const DEADLINE: Duration = Duration::from_millis(25);
/// The longest time for which a late reply is waited for.
const LATE_MAX: Duration = Duration::from_secs(10);

/// Returns the time after which call number n, from 0, for a subject is answered; `None` for never.
type ReplyAfter = Box<dyn Fn(u64, &[u8]) -> Option<Duration> + Send>;

/// A store that decides at once and replies later.
struct LateStore {
    inner: MemoryStore,
    reply_after: Mutex<ReplyAfter>,
    calls: AtomicU64,
    /// The subjects of the refunds that were executed.
    refunded: Mutex<Vec<String>>,
    atomicity: Atomicity,
}

impl LateStore {
    /// Returns a limiter on a store whose subjects are on the servers that their first bytes name.
    fn limiter(configure: impl FnOnce(LimiterBuilder) -> LimiterBuilder, atomicity: Atomicity) -> (Limiter, Arc<Self>) {
        let clock = VirtualClock::start();
        let store = Arc::new(LateStore {
            inner: MemoryStore::builder().clock(clock.clone()).build(),
            reply_after: Mutex::new(Box::new(|_, _| Some(Duration::ZERO))),
            calls: AtomicU64::new(0),
            refunded: Mutex::default(),
            atomicity,
        });
        let builder = Limiter::builder().store(store.clone()).clock(clock).announce(false);
        (configure(builder).build(), store)
    }

    fn reply_after(&self, after: impl Fn(u64, &[u8]) -> Option<Duration> + Send + 'static) {
        *self.reply_after.lock().unwrap() = Box::new(after);
    }

    async fn reply<T>(&self, subject: &[u8], reply: T) -> T {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        let after = (self.reply_after.lock().unwrap())(number, subject);
        match after {
            Some(Duration::ZERO) => {}
            Some(after) => sleep(after).await,
            None => pending().await,
        }
        reply
    }

    fn remaining(&self, demand: &Demand<'_>) -> u32 {
        self.inner.inspect(demand).remaining
    }

    fn refunded(&self) -> Vec<String> {
        self.refunded.lock().unwrap().clone()
    }
}

impl Store for LateStore {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        Box::pin(async {
            let decisions = self.inner.check_batch(checks);
            Ok(self.reply(checks[0].demands()[0].key.subject(), decisions).await)
        })
    }
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Box::pin(async {
            let subject = check.demands()[0].key.subject();
            self.reply(subject, ()).await;
            self.inner.refund(check, decision);
            self.refunded.lock().unwrap().push(String::from_utf8(subject.to_vec()).unwrap());
            Ok(())
        })
    }
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Store::reset(&self.inner, demand)
    }
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Store::inspect(&self.inner, demand)
    }
    fn atomicity(&self) -> Atomicity {
        self.atomicity
    }
    fn locate(&self, subject: &[u8]) -> Location {
        let server = u32::from(subject[0]);
        Location::new(server, ShardId::new(server))
    }
}

fn demand<'a>(limit: &str, subject: &'a str) -> Demand<'a> {
    Demand::new(limit.parse().unwrap(), Key::new(subject).unwrap())
}

#[tokio::test(start_paused = true)]
async fn late_charge_is_refunded_once_whatever_the_failure_policy() {
    for policy in [OnFailure::Local, OnFailure::Allow, OnFailure::Deny] {
        let (limiter, store) = LateStore::limiter(|builder| builder.on_failure(policy), Atomicity::Check);
        store.reply_after(|_, _| Some(ms(100.0)));
        // One limit with the charge of denials among them: the decision without the store has charged it, too.
        let demands = [demand("10/h", "a"), demand("20/min count_denied=true", "a")];
        let begun = Instant::now();
        let decided = limiter.check(&Check::new(&demands).unwrap()).await;
        assert_eq!(begun.elapsed(), DEADLINE, "{policy:?}");
        let source = decided.ok().map(|decision| decision.source);
        let expected = [Some(Source::Local), Some(Source::None), None];
        assert_eq!(source, expected[policy as usize], "{policy:?}");
        sleep(ms(74.0)).await;
        assert_eq!(demands.each_ref().map(|demand| store.remaining(demand)), [9, 19], "{policy:?}: no reply yet");
        sleep(LATE_MAX).await;
        assert_eq!(demands.each_ref().map(|demand| store.remaining(demand)), [10, 20], "{policy:?}");
        assert_eq!(store.refunded(), ["a"], "{policy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn only_the_charged_checks_of_a_late_batch_are_refunded() {
    let (limiter, store) = LateStore::limiter(|builder| builder, Atomicity::Check);
    store.reply_after(|_, _| Some(ms(100.0)));
    let demands = [
        demand("1/h", "a"),
        demand("1/h", "a"),
        demand("2/h count_denied=true", "b").cost(2),
        demand("9/h", "c").cost(0),
    ];
    let used = demand("2/h count_denied=true", "b");
    assert!(store.inner.check(&Check::one(&used)).allowed());
    let checks: Vec<Check<'_>> = demands.iter().map(Check::one).collect();
    limiter.check_batch(&checks, CheckOptions::default()).await;
    sleep(LATE_MAX).await;
    assert_eq!(store.refunded(), ["a"], "a denial and a peek charged nothing that could be refunded");
    assert_eq!((store.remaining(&demands[0]), store.remaining(&demands[2])), (1, 0), "the denial stays charged");
}

#[tokio::test(start_paused = true)]
async fn late_parts_of_a_check_are_refunded_like_those_in_time() {
    // Which parts reply late, and which limit is used up before.
    for (late, used) in [("b", ""), ("a", ""), ("ab", ""), ("b", "a"), ("a", "a"), ("ab", "b")] {
        let (limiter, store) = LateStore::limiter(|builder| builder, Atomicity::Subject);
        let demands = [demand("1/h", "a"), demand("1/min", "b")];
        for demand in demands.iter().filter(|demand| demand.key.subject() == used.as_bytes()) {
            assert!(store.inner.check(&Check::one(demand)).allowed());
        }
        let remaining = || demands.each_ref().map(|demand| store.remaining(demand));
        let before = remaining();
        store.reply_after(move |_, subject| {
            Some(if late.as_bytes().contains(&subject[0]) { ms(100.0) } else { ms(5.0) })
        });
        let begun = Instant::now();
        let decision = limiter.check(&Check::new(&demands).unwrap()).await.unwrap();
        assert_eq!((begun.elapsed(), decision.source), (DEADLINE, Source::Local), "late {late}, used up {used}");
        sleep(LATE_MAX).await;
        assert_eq!(remaining(), before, "late {late}, used up {used}");
        let mut refunded = store.refunded();
        refunded.sort();
        let charged: Vec<&str> = ["a", "b"].into_iter().filter(|subject| *subject != used).collect();
        assert_eq!(refunded, charged, "late {late}, used up {used}");
    }
}

#[tokio::test(start_paused = true)]
async fn refund_that_outlasts_the_deadline_delays_no_decision_and_is_completed() {
    for (refunded_after, remaining) in [(Some(ms(100.0)), 9), (None, 8)] {
        let (limiter, store) = LateStore::limiter(|builder| builder, Atomicity::Subject);
        let demands = [demand("9/h", "a"), demand("1/min", "b").cost(2)];
        // The first two calls are the parts, the third is the refund.
        store.reply_after(move |number, _| if number < 2 { Some(ms(5.0)) } else { refunded_after });
        let begun = Instant::now();
        let decision = limiter.check(&Check::new(&demands).unwrap()).await.unwrap();
        assert_eq!((begun.elapsed(), decision.allowed(), decision.source), (DEADLINE, false, Source::Store));
        sleep(LATE_MAX).await;
        assert_eq!(store.remaining(&demands[0]), remaining, "{refunded_after:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn reply_that_never_arrives_is_waited_for_at_most_ten_seconds() {
    let (limiter, store) = LateStore::limiter(|builder| builder, Atomicity::Check);
    store.reply_after(|_, _| None);
    let demand = demand("10/h", "a");
    for _ in 0..1_000 {
        limiter.check(&Check::one(&demand)).await.unwrap();
        sleep(ms(10.0)).await;
    }
    let in_flight = Arc::strong_count(&store);
    assert!(in_flight < 50, "{in_flight}: the breaker is open, and only probes call the store");
    drop(limiter);
    sleep(LATE_MAX).await;
    assert_eq!(Arc::strong_count(&store), 1, "nothing waits for the store any more");
    assert!(store.refunded().is_empty());
}

#[tokio::test(start_paused = true)]
async fn number_of_calls_that_are_waited_for_after_their_deadline_is_bounded() {
    const LATE_CHECKS_MAX: usize = 4_096;
    let (limiter, store) = LateStore::limiter(|builder| builder, Atomicity::Check);
    store.reply_after(|_, _| Some(ms(100.0)));
    let (limit, extra) = ("10000/h", 10);
    let demand = demand(limit, "a");
    let check = Check::one(&demand);
    let decisions = join_all((0..LATE_CHECKS_MAX + extra).map(|_| limiter.check(&check))).await;
    assert!(decisions.iter().all(|decision| decision.as_ref().unwrap().source == Source::Local));
    sleep(LATE_MAX).await;
    assert_eq!(store.refunded().len(), LATE_CHECKS_MAX);
    assert_eq!(store.remaining(&demand), 10_000 - extra as u32, "the others stay charged");
}

#[tokio::test(start_paused = true)]
async fn check_whose_future_is_dropped_before_the_deadline_stays_charged() {
    let (limiter, store) = LateStore::limiter(|builder| builder, Atomicity::Check);
    store.reply_after(|_, _| Some(ms(20.0)));
    let demand = demand("10/h", "a");
    let check = Check::one(&demand);
    assert!(tokio::time::timeout(ms(10.0), limiter.check(&check)).await.is_err());
    sleep(LATE_MAX).await;
    assert_eq!((store.remaining(&demand), store.refunded().len()), (9, 0));
}

/// A caller gives up while both parts of its check are in flight. One of them is denied, so the other one is refunded.
#[tokio::test(start_paused = true)]
async fn denied_check_on_several_servers_keeps_no_charge_after_its_future_is_dropped() {
    let (limiter, store) = LateStore::limiter(|builder| builder, Atomicity::Subject);
    let demands = [demand("1/h", "a"), demand("9/h", "b")];
    assert!(store.inner.check(&Check::one(&demands[0])).allowed());
    store.reply_after(|_, _| Some(ms(20.0)));
    let check = Check::new(&demands).unwrap();
    assert!(tokio::time::timeout(ms(10.0), limiter.check(&check)).await.is_err());
    assert_eq!(store.remaining(&demands[1]), 8, "the part is charged");
    sleep(LATE_MAX).await;
    assert_eq!((store.remaining(&demands[1]), store.refunded()), (9, vec!["b".to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn denial_that_was_cached_because_of_a_late_charge_is_forgotten_with_it() {
    let (limiter, store) = LateStore::limiter(|builder| builder, Atomicity::Check);
    let demand = demand("1/h", "a");
    let check = Check::one(&demand);
    // The reply arrives after 100 ms, and its charge is refunded 100 ms later.
    store.reply_after(|number, _| Some(if number < 2 { ms(100.0) } else { Duration::ZERO }));
    assert_eq!(limiter.check(&check).await.unwrap().source, Source::Local);
    sleep(ms(125.0)).await;
    for source in [Source::Store, Source::DenyCache] {
        let denied = limiter.check(&check).await.unwrap();
        assert_eq!((denied.allowed(), denied.source), (false, source));
    }
    sleep(ms(51.0)).await;
    let admitted = limiter.check(&check).await.unwrap();
    assert_eq!((admitted.allowed(), admitted.source), (true, Source::Store));
}

#[tokio::test(start_paused = true)]
async fn late_replies_are_waited_for_before_a_process_ends() {
    let (limiter, store) = LateStore::limiter(|builder| builder, Atomicity::Check);
    let rules = "[[rules]]\nname = 'own'\nby = ['ip']\nlimits = ['10/h']\n";
    let engine = Engine::new(limiter, Config::from_text(rules, Format::Toml).unwrap().rules);
    store.reply_after(|_, _| Some(ms(100.0)));
    let (request, begun) = (http::Request::get("/").body(()).unwrap(), Instant::now());
    let outcome = engine.check(&RequestView::of(&request), [203, 0, 113, 9].into(), RequestOptions::default()).await;
    let Outcome::Admitted(permit) = outcome else { panic!("{outcome:?}") };
    assert_eq!((permit.decision().unwrap().source, begun.elapsed()), (Source::Local, DEADLINE));
    engine.wait_for_pending().await;
    assert_eq!((store.refunded().len(), begun.elapsed()), (1, ms(200.0)), "the reply, and that to the refund");
    engine.wait_for_pending().await;
    assert_eq!(begun.elapsed(), ms(200.0), "nothing is left");
}

/// A client over its own limit keeps 128 requests in flight, and replies of one server or of both are late. It must not
/// hold more than one unit of a limit that it shares, however late the replies are.
#[tokio::test(start_paused = true)]
async fn client_over_its_own_limit_holds_one_unit_of_a_shared_limit_with_late_replies() {
    const SHARED: u32 = 100_000;
    let shared_limit = format!("{SHARED}/h");
    for (late_subjects, late_percent) in [("o", 100), ("s", 100), ("os", 100), ("os", 50)] {
        let (limiter, store) = LateStore::limiter(|builder| builder, Atomicity::Subject);
        store.reply_after(move |number, subject| {
            // Mixes the bits of the number, so that which replies are late has no period.
            let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32) % 100;
            let is_late = late_subjects.as_bytes().contains(&subject[0]) && mixed < late_percent;
            Some(ms(if is_late && !subject.ends_with(b"pulse") { 400.0 } else { 4.0 }))
        });
        let (own, shared) = (demand("10/h", "own"), demand(&shared_limit, "shared"));
        assert!(store.inner.check(&Check::one(&own.cost(10))).allowed());
        let demands = [own, shared];
        let check = Check::new(&demands).unwrap();
        let attack = join_all((0..128).map(|_| async {
            loop {
                limiter.check(&check).await.unwrap();
                sleep(ms(1.0)).await;
            }
        }));
        // Replies in time to other callers keep the breakers closed.
        let pulses = ["own-pulse", "shared-pulse"].map(|subject| demand("1000000/h", subject));
        let others = async {
            loop {
                join_all(pulses.each_ref().map(|pulse| limiter.check_key(&pulse.limit, pulse.key.subject()))).await;
                sleep(ms(1.0)).await;
            }
        };
        let watch = async {
            // The requests that were in flight when its first denial arrived have been refunded.
            sleep(Duration::from_secs(2)).await;
            let mut held_max = 0;
            for _ in 0..3_000 {
                held_max = held_max.max(SHARED - store.remaining(&shared));
                sleep(ms(1.0)).await;
            }
            held_max
        };
        let what = format!("replies of {late_subjects}, {late_percent} % late");
        let calls = store.calls.load(Ordering::SeqCst);
        tokio::select! {
            held_max = watch => assert!(held_max <= 1, "{what}: {held_max} units held"),
            _ = attack => unreachable!("the client never stops"),
            () = others => unreachable!("the other clients never stop"),
        }
        assert_eq!(limiter.stats().breaker_opened, 0, "{what}");
        assert!(store.calls.load(Ordering::SeqCst) > calls + 1_000, "{what}");
    }
}
