//! Tests of how long a packed state lasts, which the conformance suite does not observe.

use super::*;
use crate::check::Cost;
use crate::key::Key;

fn charge(state: &mut State, limit: &Limit, now: Timestamp, cost: u32) -> LimitStatus {
    let demand = Demand { limit: *limit, key: Key::new("k").unwrap(), cost: Cost::new(cost) };
    decide(now, &[demand], std::slice::from_mut(state)).limits[0]
}

#[test]
fn bucket_lasts_until_it_is_empty_or_up_to_a_quarter_longer() {
    let now = Timestamp::from_micros(1_700_000_000_123_456);
    for text in ["1/400day", "10000000/400day", "100/min", "3/7ms", "10000000/1ms", "100000/day", "10000000/day"] {
        for algorithm in ["token-bucket", "leaky-bucket"] {
            let limit: Limit = format!("{text} {algorithm}").parse().unwrap();
            for cost in [1, 2, limit.cost_max() / 3, limit.cost_max()] {
                let mut state = State::default();
                let status = charge(&mut state, &limit, now, cost.clamp(1, limit.cost_max()));
                let whole_us = status.reset_after.as_micros().unwrap();
                let kept_us = state.packed.ends_at_us() - now.as_micros();
                // No lifetime is shorter than 33 ms.
                let kept_max_us = whole_us.max(1 << 15) / 4 * 5;
                assert!((whole_us..=kept_max_us).contains(&kept_us), "{limit} {cost}: {kept_us}, {whole_us}");
            }
        }
    }
}

#[test]
fn level_that_leaks_after_the_latest_timestamp_never_expires() {
    let (mut state, limit) = (State::default(), "1/400day token-bucket burst=10000000".parse().unwrap());
    assert!(charge(&mut state, &limit, Timestamp::from_micros(1_700_000_000_000_000), 10_000_000).allowed);
    assert!(state.packed.ends_at_us() > Timestamp::MAX.as_micros());
}

#[test]
fn denied_bucket_lasts_as_long_as_the_slower_limit_requires() {
    let now = Timestamp::from_micros(1_700_000_000_000_000);
    for (quick, slow) in [
        ("7/10s token-bucket", "1/10s token-bucket"),
        ("10/s token-bucket", "10/min token-bucket"),
        ("10/min token-bucket", "9/min token-bucket burst=10000000"),
        ("10/ms token-bucket", "2/400day token-bucket"),
    ] {
        let [quick, slow]: [Limit; 2] = [quick, slow].map(|text| text.parse().unwrap());
        let mut state = State::default();
        charge(&mut state, &quick, now, 1);
        let until_us = state.packed.ends_at_us();
        let before = state.clone();
        assert!(!charge(&mut state, &slow, now, slow.cost_max()).allowed);
        let longer_us = state.packed.ends_at_us();
        assert!(longer_us > until_us, "{slow}");
        let leaks_us = before.look(&slow, now, 0).reset_after.as_micros().unwrap();
        assert!(longer_us >= now.as_micros() + leaks_us, "{slow}");
        assert!(!charge(&mut state, &quick, now, quick.cost_max()).allowed);
        assert_eq!(state.packed.ends_at_us(), longer_us, "{quick}");
        assert_eq!(state.look(&quick, now, 0), before.look(&quick, now, 0), "an unchanged bucket keeps its scale");
    }
}
