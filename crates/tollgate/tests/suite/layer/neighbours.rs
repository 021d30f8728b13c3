//! One caller's excess is nobody else's trouble.

use std::time::Duration;

use super::site::{HERE, Site, told_by};

const PLANS: &str = r#"
[plans.anonymous]
limits = ["30/min"]
[plans.default]
limits = ["60/min"]
[plans.pro]
limits = ["600/min", "100000/day"]

[[rules]]
name = "api"
by = ["caller"]
limits = "plan"
"#;

const OTHERS: usize = 20;

fn key(n: usize) -> String {
    format!("pro-key-number-{n:04}")
}

/// The plans, and a pro key for the noisy one and each of the others.
fn site() -> Site {
    let keys: String = (0..=OTHERS).map(|n| format!("[[keys]]\nkey = '{}'\nplan = 'pro'\n", key(n))).collect();
    Site::new(&format!("{PLANS}\n{keys}"))
}

#[tokio::test]
async fn fifty_thousand_requests_of_one_key_get_its_six_hundred_and_the_others_notice_nothing() {
    let site = site();
    let (noisy, mut passed, mut sent_by_others) = (key(0), 0, 0);
    for n in 0..50_000_u32 {
        let status = site.status("/", &[("x-api-key", &noisy)], HERE).await;
        passed += u32::from(status == 200);
        assert!(status == 200 || status == 429);
        // All of it within one minute.
        site.clock.advance(Duration::from_micros(1_100));
        if n % 100 == 99 {
            // In turn, from the same address and from their own.
            let other = 1 + sent_by_others % OTHERS;
            sent_by_others += 1;
            let round = (sent_by_others - 1) / OTHERS;
            let peer = if other.is_multiple_of(2) { HERE } else { [198, 51, 100, other as u8] };
            let response = site.send("/", &[("x-api-key", &key(other))], peer).await;
            assert_eq!(response.status(), 200, "neighbour {other} is let pass");
            let told: Vec<i64> = told_by(&response).into_iter().map(|told| told.remaining).collect();
            assert_eq!(told, [599 - round as i64, 99_999 - round as i64], "and has what it has not used itself");
        }
    }
    assert_eq!(passed, 600);
    // The address itself was never charged for what came with a known key.
    let anonymous = site.send("/", &[], HERE).await;
    assert_eq!(told_by(&anonymous)[0].remaining, 29);
    // A minute after the first of them the window begins to move.
    site.clock.advance(Duration::from_micros(60_000_000 - 50_000 * 1_100));
    assert_eq!(site.status("/", &[("x-api-key", &noisy)], HERE).await, 200);
}

#[tokio::test]
async fn ten_thousand_invented_keys_share_the_anonymous_budget_of_their_address() {
    let site = site();
    let mut passed = 0;
    for n in 0..10_000 {
        let invented = format!("invented-{n}");
        let header =
            if n % 2 == 0 { ("x-api-key", invented.clone()) } else { ("authorization", format!("Bearer {invented}")) };
        passed += u32::from(site.status("/", &[(header.0, &header.1)], HERE).await == 200);
        site.clock.advance(Duration::from_millis(5));
    }
    assert_eq!(passed, 30);
    assert_eq!(site.status("/", &[], HERE).await, 429, "a caller without a key is one of them");
    assert_eq!(site.status("/", &[("x-api-key", &key(1))], HERE).await, 200, "a known key is not");
    assert_eq!(site.status("/", &[("x-api-key", "invented-0")], [203, 0, 113, 10]).await, 200, "nor another address");
}
