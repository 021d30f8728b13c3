//! Round trips, deadlines and numbers of callers: who decides, and in how many calls.

use std::sync::Arc;
use std::time::Duration;

use tollgate::{Check, Clock, Demand, Key, Limit, Limiter, Source};
use tollgate_testkit::conformance::Random;
use tollgate_testkit::history::{Bounds, History};
use tollgate_testkit::simulated::{SimulatedRedis, VirtualClock};

use super::{connected, ms};

/// How soon a caller asks again after an answer.
#[derive(Clone, Copy, Debug)]
enum Pace {
    AtOnce,
    /// After a random pause of up to a round trip, so that callers do not move in step.
    Random,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    callers: usize,
    round_trip: Duration,
    deadline: Duration,
    pace: Pace,
}

#[derive(Debug)]
struct Outcome {
    decisions: u64,
    by_store: u64,
    /// Decisions in each call.
    calls: Vec<usize>,
}

impl Outcome {
    fn share_by_store(&self) -> f64 {
        self.by_store as f64 / self.decisions as f64
    }

    fn decisions_per_call(&self) -> f64 {
        self.calls.iter().sum::<usize>() as f64 / self.calls.len() as f64
    }
}

/// Runs a case to its end, judges its history, and returns what came of it.
async fn run(case: Case, rounds: u64) -> Outcome {
    let clock = VirtualClock::start();
    let server = SimulatedRedis::new(clock.clone());
    let store = connected(&server, |builder| builder).await;
    server.set_round_trip(case.round_trip);
    let limiter = Limiter::builder()
        .store(Arc::new(store))
        .clock(clock.clone())
        .deadline(case.deadline)
        .deny_cache(false)
        .build();
    // Less than 64 callers ask for, so that there are denials.
    let limit: Limit = "2000/s".parse().unwrap();
    let callers: Vec<_> = (0..case.callers)
        .map(|caller| {
            let (limiter, clock) = (limiter.clone(), clock.clone());
            tokio::spawn(async move {
                let (mut history, mut random) = (History::new([limit]), Random::new(caller as u64 + 1));
                let (demand, mut by_store) = (Demand::new(limit, Key::new("shared").unwrap()), 0);
                for _ in 0..rounds {
                    if let Pace::Random = case.pace {
                        let pause_us = random.below(case.round_trip.as_micros() as u64);
                        tokio::time::sleep(Duration::from_micros(pause_us)).await;
                    }
                    let sent_us = clock.now().as_micros();
                    let decision = limiter.check(&Check::one(&demand)).await.unwrap();
                    by_store += u64::from(decision.source == Source::Store);
                    history.note(&[0], sent_us, clock.now().as_micros(), &decision);
                }
                (history, by_store)
            })
        })
        .collect();
    let (mut history, mut by_store) = (History::new([limit]), 0);
    for caller in callers {
        let (theirs, theirs_by_store) = caller.await.unwrap();
        history.merge(theirs);
        by_store += theirs_by_store;
    }
    // The witness needs every charge; a decision that the store made and nobody received is not in the history.
    let decisions = case.callers as u64 * rounds;
    if by_store == decisions {
        history.verify(Bounds::default()).expect_clean();
    }
    Outcome { decisions, by_store, calls: server.calls() }
}

#[tokio::test(start_paused = true)]
async fn store_decides_while_the_round_trip_is_at_most_seven_tenths_of_the_deadline() {
    let mut failed = Vec::new();
    for deadline_ms in [25.0, 50.0, 100.0] {
        for part in [0.3, 0.7] {
            for callers in [1, 4, 16, 64] {
                for pace in [Pace::AtOnce, Pace::Random] {
                    let (round_trip, deadline) = (ms(deadline_ms * part), ms(deadline_ms));
                    let case = Case { callers, round_trip, deadline, pace };
                    let outcome = run(case, 1_600 / callers as u64).await;
                    let (share, per_call) = (outcome.share_by_store(), outcome.decisions_per_call());
                    println!("{case:?}: {share:.4} by the store, {per_call:.1} decisions per call");
                    if share < 0.999 {
                        failed.push((case, share));
                    }
                }
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[tokio::test(start_paused = true)]
async fn callers_share_calls_at_every_distance() {
    let deadline = ms(100.0);
    for (round_trip_ms, callers, per_call_min) in [(0.0, 64, 30.0), (1.0, 64, 20.0), (5.0, 64, 8.0), (15.0, 64, 8.0)] {
        let case = Case { callers, round_trip: ms(round_trip_ms), deadline, pace: Pace::AtOnce };
        let outcome = run(case, 100).await;
        let per_call = outcome.decisions_per_call();
        println!("{case:?}: {per_call:.1} decisions per call");
        assert_eq!(outcome.by_store, outcome.decisions, "{case:?}");
        assert!(per_call >= per_call_min, "{case:?}: {per_call}");
    }
}

/// Waits as each remembered denial says, then asks again. Some calls are slow and the next ones are quick, so a wait that counts from the
/// wrong end of a call would be too short.
#[tokio::test(start_paused = true)]
async fn a_client_that_waits_as_a_remembered_denial_says_is_admitted() {
    let clock = VirtualClock::start();
    let server = SimulatedRedis::new(clock.clone());
    let store = connected(&server, |builder| builder).await;
    let limiter = Limiter::builder().store(Arc::new(store)).clock(clock.clone()).deadline(ms(100.0)).build();
    let limit: Limit = "1/400ms".parse().unwrap();
    let demand = Demand::new(limit, Key::new("shared").unwrap());
    let mut history = History::new([limit]);
    let mut ask = async |round_trip_ms: f64| {
        server.set_round_trip(ms(round_trip_ms));
        let sent_us = clock.now().as_micros();
        let decision = limiter.check(&Check::one(&demand)).await.unwrap();
        history.note(&[0], sent_us, clock.now().as_micros(), &decision);
        decision
    };
    for round_trip_ms in [0.0, 2.0, 20.0, 40.0, 60.0] {
        assert!(ask(round_trip_ms).await.allowed());
        for pause_ms in [1.0, 30.0, 100.0] {
            tokio::time::sleep(ms(pause_ms)).await;
            let denied = ask(0.0).await;
            assert_eq!((denied.allowed(), denied.source), (false, Source::DenyCache));
        }
        let told = ask(0.0).await.retry_after().as_duration().unwrap();
        tokio::time::sleep(told).await;
        assert!(ask(0.0).await.allowed(), "after a call of {round_trip_ms} ms");
        tokio::time::sleep(ms(500.0)).await;
    }
    history.verify(Bounds::default()).expect_clean();
}

#[tokio::test(start_paused = true)]
async fn a_check_that_needs_no_wait_is_ready_however_far_the_store_is() {
    for (round_trip_ms, wait_max_ms) in [(1.0, 0.0), (15.0, 0.0), (15.0, 5.0)] {
        let server = SimulatedRedis::new(VirtualClock::start());
        let store = connected(&server, |builder| builder).await;
        server.set_round_trip(ms(round_trip_ms));
        let limiter = Limiter::builder().store(Arc::new(store)).build();
        let demand = Demand::new("1/h".parse().unwrap(), Key::new("work").unwrap());
        let check = Check::one(&demand);
        let ready = limiter.until_ready(&check, ms(wait_max_ms)).await;
        assert!(ready.is_ok(), "{round_trip_ms} ms away, {wait_max_ms} ms to wait: {ready:?}");
        assert!(limiter.until_ready(&check, ms(wait_max_ms)).await.is_err(), "its unit is taken");
    }
}
