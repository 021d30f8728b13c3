//! One check in process memory against a batch of one: two ways to the same decision.

use parking_lot::Mutex;

use super::*;
use crate::observe::DecidedCheck;

/// Records what it observes.
#[derive(Default)]
struct Recorder(Mutex<Vec<String>>);

impl Observer for Recorder {
    fn decided(&self, decided: &DecidedCheck<'_>) {
        let demands = decided.check.demands().len();
        self.0.lock().push(format!("{demands} {:?} {:?} {:?}", decided.result, decided.outcome(), decided.took));
    }
}

/// A clock that panics when it is read at or after a time.
struct PanicsFrom(Arc<ManualClock>, Timestamp);

impl Clock for PanicsFrom {
    fn now(&self) -> Timestamp {
        let now = self.0.now();
        assert!(now < self.1, "planted");
        now
    }
}

/// Both sides decide the same checks. From the given step on, the store panics.
#[tokio::test]
async fn check_equals_a_batch_of_one_in_decision_statistics_and_observation() {
    const STEPS: u64 = 60;
    for (on_failure, panics_at) in [
        (None, STEPS),
        (None, 30),
        (Some(OnFailure::Allow), 30),
        (Some(OnFailure::Deny), 30),
        (Some(OnFailure::Local), 30),
    ] {
        let start = Timestamp::from_micros(1_700_000_000_000_000);
        let clock = Arc::new(ManualClock::new(start));
        let side = || {
            let panicking = Arc::new(PanicsFrom(clock.clone(), start.plus_micros(panics_at * 100_000)));
            let recorder = Arc::new(Recorder::default());
            let builder = Limiter::builder().memory(MemoryStore::builder().clock(panicking).build());
            (builder.clock(clock.clone()).observer(recorder.clone()).build(), recorder)
        };
        let ((one, one_recorder), (batch, batch_recorder)) = (side(), side());
        let limits: Vec<Limit> =
            ["3/s", "5/2s token-bucket", "4/s fixed-window"].map(|text| text.parse().unwrap()).into();
        let options = CheckOptions { on_failure, ..CheckOptions::default() };
        let mut refused = 0;
        for step in 0..STEPS {
            let demand = |limit: &Limit| Demand::new(*limit, Key::new("k").unwrap()).cost((step % 4) as u32);
            let demands: Vec<Demand<'_>> = limits.iter().take(1 + step as usize % 3).map(demand).collect();
            let check = Check::new(&demands).unwrap();
            let by_batch = batch.check_batch(&[check], options).await.remove(0);
            let by_one = match on_failure {
                None => one.check(&check).await,
                Some(on_failure) if step % 2 == 0 => {
                    let each =
                        vec![LimitOptions { on_failure: Some(on_failure), ..LimitOptions::default() }; demands.len()];
                    one.check_with(&check, CheckOptions { each: &each, ..CheckOptions::default() }).await
                }
                Some(_) => one.check_with(&check, options).await,
            };
            refused += u64::from(!by_one.as_ref().is_ok_and(Decision::allowed));
            assert_eq!(by_one.map_err(|error| error.to_string()), by_batch.map_err(|error| error.to_string()));
            assert_eq!(one.stats(), batch.stats(), "step {step}");
            clock.advance(Duration::from_millis(100));
        }
        assert!((5..STEPS - 5).contains(&refused), "{refused} of {STEPS} refused");
        assert_eq!(*one_recorder.0.lock(), *batch_recorder.0.lock());
        assert_eq!(one_recorder.0.lock().len(), STEPS as usize);
    }
}
