//! The deny cache, and the cost of a flood of denied requests.

use super::*;

fn demand<'a>(limit: &str, subject: &'a str) -> Demand<'a> {
    Demand::new(limit.parse::<Limit>().unwrap(), Key::new(subject).unwrap())
}

#[tokio::test(start_paused = true)]
async fn exhausted_limit_that_many_subjects_share_is_answered_from_the_deny_cache() {
    let bench = bench(|builder| builder);
    let subjects: Vec<String> = (0..20).map(|n| format!("user:{n}")).collect();
    for round in 0..2 {
        let before = bench.calls();
        for (n, subject) in subjects.iter().enumerate() {
            let demands = [demand("100/min", subject), demand("1/min", "global")];
            let decision = bench.limiter.check(&Check::new(&demands).unwrap()).await.unwrap();
            assert_eq!(decision.allowed(), (round, n) == (0, 0), "{subject}");
            assert_eq!(decision.limits[0].remaining, if n == 0 { 99 } else { 100 }, "{subject}");
            bench.clock.advance(Duration::from_millis(10));
        }
        assert_eq!(bench.calls() - before, [20, 0][round]);
    }
}
