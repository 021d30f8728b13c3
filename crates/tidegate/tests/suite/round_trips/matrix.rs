//! Round trips, deadlines and numbers of callers: how many decisions the store makes, and in how many calls.

use std::sync::Arc;
use std::time::Duration;

use tidegate::{Check, Clock, Demand, Key, Limit, Limiter, Source};
use tidegate_testkit::conformance::Random;
use tidegate_testkit::history::{Bounds, History};
use tidegate_testkit::simulated::{SimulatedRedis, VirtualClock};

use super::{connected, ms};

/// The pause of a caller between two checks.
#[derive(Clone, Copy, Debug)]
enum Pace {
    None,
    /// A random pause of up to a round trip, so that callers do not run in step.
    Random,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    callers: usize,
    round_trip: Duration,
    deadline: Duration,
    pace: Pace,
}

/// How the decisions of a case were made.
#[derive(Debug)]
struct Shares {
    decisions: u64,
    by_store: u64,
    /// The number of decisions in each call.
    calls: Vec<usize>,
}

impl Shares {
    fn share_by_store(&self) -> f64 {
        self.by_store as f64 / self.decisions as f64
    }

    fn decisions_per_call(&self) -> f64 {
        self.calls.iter().sum::<usize>() as f64 / self.calls.len() as f64
    }
}

/// Runs a case and verifies its history.
async fn run(case: Case, rounds: u64) -> Shares {
    let clock = VirtualClock::start();
    let server = SimulatedRedis::new(clock.clone());
    let store = connected(&server, |builder| builder).await;
    server.set_round_trip(case.round_trip);
    let limiter = Limiter::builder()
        .announce(false)
        .store(Arc::new(store))
        .clock(clock.clone())
        .deadline(case.deadline)
        .deny_cache(false)
        .build();
    // Less than 64 callers use, so that there are denials.
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
        let (own, own_by_store) = caller.await.unwrap();
        history.merge(own);
        by_store += own_by_store;
    }
    // The checker needs every charge. A decision of the store that arrived too late is not in the history.
    let decisions = case.callers as u64 * rounds;
    if by_store == decisions {
        history.verify(Bounds::default()).expect_clean();
    }
    Shares { decisions, by_store, calls: server.calls() }
}

#[tokio::test(start_paused = true)]
async fn store_decides_while_the_round_trip_is_at_most_seven_tenths_of_the_deadline() {
    let mut failed = Vec::new();
    for deadline_ms in [25.0, 50.0, 100.0] {
        for part in [0.3, 0.7] {
            for callers in [1, 4, 16, 64] {
                for pace in [Pace::None, Pace::Random] {
                    let (round_trip, deadline) = (ms(deadline_ms * part), ms(deadline_ms));
                    let case = Case { callers, round_trip, deadline, pace };
                    let shares = run(case, 1_600 / callers as u64).await;
                    let (share, per_call) = (shares.share_by_store(), shares.decisions_per_call());
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
        let case = Case { callers, round_trip: ms(round_trip_ms), deadline, pace: Pace::None };
        let shares = run(case, 100).await;
        let per_call = shares.decisions_per_call();
        println!("{case:?}: {per_call:.1} decisions per call");
        assert_eq!(shares.by_store, shares.decisions, "{case:?}");
        assert!(per_call >= per_call_min, "{case:?}: {per_call}");
    }
}

/// Some calls are slow and the next ones are quick, so a wait counted from the wrong end of a call would be too short.
#[tokio::test(start_paused = true)]
async fn client_that_waits_for_the_retry_after_of_a_cached_denial_is_admitted() {
    let clock = VirtualClock::start();
    let server = SimulatedRedis::new(clock.clone());
    let store = connected(&server, |builder| builder).await;
    let limiter =
        Limiter::builder().announce(false).store(Arc::new(store)).clock(clock.clone()).deadline(ms(100.0)).build();
    let limit: Limit = "1/400ms".parse().unwrap();
    let demand = Demand::new(limit, Key::new("shared").unwrap());
    let mut history = History::new([limit]);
    let mut check = async |round_trip_ms: f64| {
        server.set_round_trip(ms(round_trip_ms));
        let sent_us = clock.now().as_micros();
        let decision = limiter.check(&Check::one(&demand)).await.unwrap();
        history.note(&[0], sent_us, clock.now().as_micros(), &decision);
        decision
    };
    for round_trip_ms in [0.0, 2.0, 20.0, 40.0, 60.0] {
        assert!(check(round_trip_ms).await.allowed());
        for pause_ms in [1.0, 30.0, 100.0] {
            tokio::time::sleep(ms(pause_ms)).await;
            let denied = check(0.0).await;
            assert_eq!((denied.allowed(), denied.source), (false, Source::DenyCache));
        }
        let wait = check(0.0).await.retry_after().as_duration().unwrap();
        tokio::time::sleep(wait).await;
        assert!(check(0.0).await.allowed(), "after a call of {round_trip_ms} ms");
        tokio::time::sleep(ms(500.0)).await;
    }
    history.verify(Bounds::default()).expect_clean();
}

#[tokio::test(start_paused = true)]
async fn until_ready_admits_a_check_that_needs_no_wait_at_any_round_trip() {
    for (round_trip_ms, wait_max_ms) in [(1.0, 0.0), (15.0, 0.0), (15.0, 5.0)] {
        let server = SimulatedRedis::new(VirtualClock::start());
        let store = connected(&server, |builder| builder).await;
        server.set_round_trip(ms(round_trip_ms));
        let limiter = Limiter::builder().announce(false).store(Arc::new(store)).build();
        let demand = Demand::new("1/h".parse().unwrap(), Key::new("work").unwrap());
        let check = Check::one(&demand);
        let ready = limiter.until_ready(&check, ms(wait_max_ms)).await;
        assert!(ready.is_ok(), "{round_trip_ms} ms away, {wait_max_ms} ms to wait: {ready:?}");
        assert!(limiter.until_ready(&check, ms(wait_max_ms)).await.is_err(), "its unit is used");
    }
}
