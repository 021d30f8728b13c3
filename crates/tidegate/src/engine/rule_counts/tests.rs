//! Counts across reloads, and while the store does not answer.

use http::Request;
use tidegate_core::{Check, Decision, Demand, LimitStatus, Store, StoreError, StoreErrorKind, StoreFuture};

use super::*;
use crate::Limiter;
use crate::config::{Config, Format};
use crate::engine::{Engine, Outcome, RequestOptions};
use crate::rules::RequestView;

fn rules(text: &str) -> RuleSet {
    Config::from_text(text, Format::Toml).unwrap_or_else(|report| panic!("{report:?}")).rules
}

async fn passes(engine: &Engine) -> bool {
    let request = Request::get("/").body(()).unwrap();
    let outcome = engine.check(&RequestView::of(&request), [203, 0, 113, 9].into(), RequestOptions::default()).await;
    matches!(outcome, Outcome::Admitted(_))
}

fn one(name: &str, rest: &str) -> String {
    format!("[[rules]]\nname = \"{name}\"\nby = [\"ip\"]\n{rest}\n")
}

#[tokio::test]
async fn counts_of_a_rule_survive_reloads_and_a_change_of_its_mode() {
    let [other, all] = [one("other", "limits = [\"9/h\"]"), one("all", "limits = [\"2/h\"]")];
    let engine = Engine::new(Limiter::memory(), rules(&all));
    for n in 0..3 {
        assert_eq!(passes(&engine).await, n < 2);
    }
    let shadow = one("all", "limits = [\"2/h\"]\nmode = \"shadow\"");
    engine.reload(rules(&format!("{other}{shadow}")));
    assert!(passes(&engine).await);
    let stats: Vec<_> = engine
        .rule_stats()
        .iter()
        .map(|rule| (rule.rule.to_string(), rule.mode, rule.allowed(), rule.denied()))
        .collect();
    let expected = [
        ("other".to_owned(), Mode::Enforce, 1, 0),
        ("all".to_owned(), Mode::Enforce, 2, 1),
        ("all".to_owned(), Mode::Shadow, 0, 1),
    ];
    assert_eq!(stats, expected);
    engine.reload(rules(&other));
    assert_eq!(engine.rule_stats().len(), 1, "the counts of a removed rule are dropped");
}

/// A store that cannot be reached.
struct Away;

impl Store for Away {
    fn decide<'a>(&'a self, _: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        Box::pin(async { Err(StoreError::new(StoreErrorKind::Unreachable, "away")) })
    }

    fn refund<'a>(&'a self, _: &'a Check<'a>, _: &'a Decision) -> StoreFuture<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn reset<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn inspect<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Box::pin(async { Err(StoreError::new(StoreErrorKind::Unreachable, "away")) })
    }
}

#[tokio::test]
async fn each_rule_counts_by_its_own_failure_policy_while_the_store_does_not_answer() {
    let [local, open] =
        ["local", "allow"].map(|word| one(word, &format!("limits = [\"1/h\"]\non_failure = \"{word}\"")));
    let limiter = || Limiter::builder().store(Arc::new(Away)).build();
    let engine = Engine::new(limiter(), rules(&format!("{local}{open}")));
    assert!(passes(&engine).await);
    assert!(!passes(&engine).await, "the local share is used up");
    let by = |rule: &RuleStats| {
        let cells = rule.counts.iter().filter(|cell| cell.count > 0);
        cells.map(|cell| (cell.outcome.as_str(), cell.source.as_str(), cell.count)).collect::<Vec<_>>()
    };
    let stats = engine.rule_stats();
    assert_eq!(by(&stats[0]), [("allow", "local", 1), ("deny", "local", 1)]);
    assert_eq!(by(&stats[1]), [("allow", "none", 2)]);

    let closed = Engine::new(limiter(), rules(&one("closed", "limits = [\"1/h\"]\non_failure = \"deny\"")));
    assert!(!passes(&closed).await);
    assert_eq!(by(&closed.rule_stats()[0]), [("unavailable", "none", 1)]);
}

/// A local share of a leaky bucket leaks more slowly than the whole limit, so a slot may be further away.
#[tokio::test]
async fn request_whose_slot_in_the_local_share_is_beyond_max_wait_is_refused_and_refunded() {
    let limiter = Limiter::builder().store(Arc::new(Away)).instances(4).build();
    let engine = Engine::new(limiter, rules(&one("jobs", "limits = [\"60/min leaky-bucket\"]")));
    let options = RequestOptions { max_wait: Some(std::time::Duration::from_millis(2_500)), ..Default::default() };
    let request = Request::get("/").body(()).unwrap();
    let mut admitted = 0;
    for _ in 0..5 {
        match engine.check(&RequestView::of(&request), [203, 0, 113, 9].into(), options).await {
            Outcome::Admitted(permit) => {
                assert!(Some(permit.wait()) <= options.max_wait, "{:?}", permit.wait());
                admitted += 1;
            }
            Outcome::Refused(refusal) => {
                let retry_after = refusal.decision().unwrap().retry_after().as_duration().unwrap();
                assert!(!retry_after.is_zero() && retry_after < std::time::Duration::from_secs(4), "{retry_after:?}");
            }
        }
    }
    assert_eq!(admitted, 1, "one slot in four seconds");
    assert_eq!((engine.rule_stats()[0].allowed(), engine.rule_stats()[0].denied()), (1, 4));
}
