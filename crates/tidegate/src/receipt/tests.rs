use std::sync::Arc;

use tidegate_core::ManualClock;

use super::*;
use crate::config::{Config, Format};
use crate::engine::{Engine, Outcome, RequestOptions};
use crate::limiter::CheckOptions;
use crate::rules::{Lookups, RequestView};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn limiter(clock: &Arc<ManualClock>) -> Limiter {
    Limiter::builder().clock(clock.clone()).build()
}

/// Charges `cost` units of `limit` to `key`, and returns the receipt after it was encoded and decoded.
async fn charge(limiter: &Limiter, key: &[u8], limit: &str, cost: u32) -> Receipt {
    let demand = Demand::new(limit.parse().unwrap(), Key::new(key).unwrap()).cost(cost);
    let check = Check::one(&demand);
    let options = CheckOptions { refundable: true, ..CheckOptions::default() };
    let decision = limiter.check_with(&check, options).await.unwrap();
    let receipt = limiter.receipt(&check, &decision).expect("an admission");
    assert_eq!(Receipt::decode(&receipt.encode()), Ok(receipt.clone()));
    receipt
}

async fn remaining(limiter: &Limiter, key: &[u8], limit: &str) -> u32 {
    let demand = Demand::new(limit.parse().unwrap(), Key::new(key).unwrap());
    limiter.inspect(&demand).await.unwrap().remaining
}

#[tokio::test]
async fn receipt_of_an_explicit_check_is_settled_once_on_every_algorithm() {
    for algorithm in tidegate_core::Algorithm::ALL {
        let limit = format!("10/min {}", algorithm.as_str());
        for (number, (settlement, used)) in [
            (Settlement::Refund, 0),
            (Settlement::Used(Cost::new(1)), 1),
            (Settlement::Used(Cost::new(4)), 4),
            (Settlement::Used(Cost::new(7)), 7),
            (Settlement::Used(Cost::new(99)), 99),
            // Limits of explicit checks have no `charge`.
            (Settlement::Ended(Ending::Success), 4),
            (Settlement::Ended(Ending::Failure), 4),
        ]
        .into_iter()
        .enumerate()
        {
            let limiter = limiter(&Arc::new(ManualClock::new(START)));
            // Any bytes can be a key.
            let key = [b"user:42".as_slice(), &[0, 0xff, b'"', b'{', number as u8]].concat();
            let receipt = charge(&limiter, &key, &limit, 4).await;
            assert!(!receipt.is_refunded_on(Ending::Success) && !receipt.is_refunded_on(Ending::Failure));
            assert_eq!(limiter.redeem_receipt(&receipt, settlement).await.unwrap(), Redeemed::Done);
            for again in [settlement, Settlement::Refund] {
                assert_eq!(limiter.redeem_receipt(&receipt, again).await.unwrap(), Redeemed::AlreadyUsed);
            }
            // As if the final cost had been charged, even if it does not fit.
            let charged: Limit = format!("{limit} count_denied=true").parse().unwrap();
            let demand = Demand::new(charged, Key::new("reference").unwrap()).cost(used);
            let _ = limiter.check(&Check::one(&demand)).await.unwrap();
            let expected = remaining(&limiter, b"reference", &limit).await;
            assert_eq!(remaining(&limiter, &key, &limit).await, expected, "{limit}, {settlement:?}");
        }
    }
}

#[tokio::test]
async fn denials_peeks_and_uncounted_admissions_have_no_receipt() {
    let limiter = limiter(&Arc::new(ManualClock::new(START)));
    for cost in [0, 11] {
        let demand = Demand::new("10/min".parse().unwrap(), Key::new("a").unwrap()).cost(cost);
        let check = Check::one(&demand);
        let decision = limiter.check(&check).await.unwrap();
        assert_eq!(limiter.receipt(&check, &decision), None, "cost {cost}");
        assert_eq!(limiter.receipt(&check, &Decision::uncounted(START)), None);
    }
}

#[tokio::test]
async fn late_receipt_changes_nothing() {
    let clock = Arc::new(ManualClock::new(START));
    let limiter = limiter(&clock);
    let receipt = charge(&limiter, b"a", "10/s", 4).await;
    clock.set(START.plus_micros(1_000_000 + 600_000_000));
    assert_eq!(limiter.redeem_receipt(&receipt, Settlement::Used(Cost::new(9))).await.unwrap(), Redeemed::Expired);
    assert_eq!(remaining(&limiter, b"a", "10/s").await, 10);
}

#[tokio::test]
async fn receipt_of_counters_in_memory_is_rejected_by_other_processes() {
    let limiter = limiter(&Arc::new(ManualClock::new(START)));
    let receipt = charge(&limiter, b"a", "10/min", 4).await;
    let other = Receipt { issuer: receipt.issuer.map(|issuer| issuer ^ 1), ..receipt };
    let refused = limiter.redeem_receipt(&other, Settlement::Refund).await;
    assert!(matches!(refused, Err(RedeemError::OtherInstance)), "{refused:?}");
    assert_eq!(remaining(&limiter, b"a", "10/min").await, 6);
}

const RULES: &str = r#"
[[rules]]
name = "shield"
store = "memory"
by = ["ip"]
limits = ["50/min"]
charge = "on_success"

[[rules]]
name = "always"
by = ["ip"]
limits = ["50/min"]

[[rules]]
name = "failures"
by = ["ip"]
limits = ["50/min", "50/day token-bucket"]
charge = "on_failure"
cost = 3

[[rules]]
name = "trial"
by = ["ip"]
limits = ["50/min"]
charge = "on_failure"
mode = "shadow"
"#;

/// Returns the units that each rule has left for the client, in the order of `RULES`: its first limit.
async fn left(engine: &Engine) -> Vec<u32> {
    let rules = [("shield", "50/min"), ("always", "50/min"), ("failures", "50/min"), ("trial", "50/min")];
    let mut left = Vec::new();
    for (rule, limit) in rules {
        let key = Key::scoped("ip:203.0.113.9", Scope::rule(rule, "per-minute")).unwrap();
        let demand = Demand::new(limit.parse().unwrap(), key);
        left.push(match rule {
            "shield" => engine.shield().inspect(&demand).remaining,
            _ => engine.limiter().inspect(&demand).await.unwrap().remaining,
        });
    }
    left
}

#[tokio::test]
async fn receipt_by_rules_is_settled_by_the_charge_of_each_rule() {
    let charged = vec![49, 49, 47, 49];
    for (settlement, expected) in [
        (Settlement::Refund, vec![50, 49, 50, 50]),
        (Settlement::Ended(Ending::Success), vec![49, 49, 50, 50]),
        (Settlement::Ended(Ending::Failure), vec![50, 49, 47, 49]),
        (Settlement::Used(Cost::new(2)), vec![48, 49, 48, 48]),
    ] {
        let clock = Arc::new(ManualClock::new(START));
        let rules = Config::from_text(RULES, Format::Toml).unwrap().rules;
        let engine = Engine::on_clock(limiter(&clock), rules, Lookups::new(), clock);
        let request = http::Request::get("/").body(()).unwrap();
        let peer = [203, 0, 113, 9].into();
        let outcome = engine.check(&RequestView::of(&request), peer, RequestOptions::default()).await;
        let Outcome::Admitted(permit) = outcome else { panic!("{outcome:?}") };
        let receipt = permit.receipt().unwrap();
        permit.keep();
        assert!(receipt.is_refunded_on(Ending::Success) && receipt.is_refunded_on(Ending::Failure));
        let receipt = Receipt::decode(&receipt.encode()).unwrap();
        assert_eq!(left(&engine).await, charged);

        // A limiter alone does not have the counters of the shield.
        let alone = engine.limiter().redeem_receipt(&receipt, settlement).await;
        assert!(matches!(alone, Err(RedeemError::OtherInstance)), "{alone:?}");
        assert_eq!(left(&engine).await, charged);

        assert_eq!(engine.redeem(&receipt, settlement).await.unwrap(), Redeemed::Done);
        assert_eq!(engine.redeem(&receipt, Settlement::Refund).await.unwrap(), Redeemed::AlreadyUsed);
        assert_eq!(left(&engine).await, expected, "{settlement:?}");
    }
}

#[tokio::test]
async fn request_that_is_charged_whatever_its_outcome_has_no_receipt() {
    let text = "[[rules]]\nname = \"always\"\nby = [\"ip\"]\nlimits = [\"5/min\", \"60/min leaky-bucket\"]\n";
    let engine = Engine::new(Limiter::memory(), Config::from_text(text, Format::Toml).unwrap().rules);
    let request = http::Request::get("/").body(()).unwrap();
    for max_wait in [None, Some(std::time::Duration::from_secs(1))] {
        let options = RequestOptions { max_wait, ..RequestOptions::default() };
        let outcome = engine.check(&RequestView::of(&request), [203, 0, 113, 9].into(), options).await;
        let Outcome::Admitted(permit) = outcome else { panic!("{outcome:?}") };
        assert_eq!(permit.receipt(), None);
    }
}

#[test]
fn anything_else_is_not_a_receipt() {
    for bytes in [&b""[..], b"{}", b"[]", b"null", br#"{"i":"00","c":[]}"#, b"\xff"] {
        assert_eq!(Receipt::decode(bytes), Err(InvalidReceipt));
    }
    let long = "x".repeat(RECEIPT_SUBJECT_BYTES_MAX + 1);
    let demand = Demand::new("10/min".parse().unwrap(), Key::new(&long).unwrap());
    assert_eq!(ReceiptTooLarge::check(&[demand]), Err(ReceiptTooLarge { bytes: RECEIPT_SUBJECT_BYTES_MAX + 1 }));
    let demand = Demand::new(demand.limit, Key::new(&long[1..]).unwrap());
    assert_eq!(ReceiptTooLarge::check(&[demand]), Ok(()));
}

#[tokio::test]
async fn receipts_of_a_caller_have_consecutive_numbers_and_their_parts_have_streams_of_their_own() {
    let limiter = limiter(&Arc::new(ManualClock::new(START)));
    let receipts = [b"a", b"b", b"a", b"a"].map(|key| charge(&limiter, key, "10/min", 1));
    let receipts = futures_util::future::join_all(receipts).await;
    let [a, b, next, last] = [0, 1, 2, 3].map(|nth: usize| ReceiptId::from_bytes(receipts[nth].id));
    assert_eq!([next, last], [1, 2].map(|nth| ReceiptId::new(a.stream(), a.sequence() + nth)));
    assert_ne!(b.stream(), a.stream());
    let parts = [0, 1, 2].map(|index| receipts[2].part_id(index));
    assert!(parts.iter().all(|part| part.sequence() == next.sequence()));
    assert_eq!(parts.map(ReceiptId::stream), [0, 1, 2].map(|index| next.stream().wrapping_add(index)));
}
