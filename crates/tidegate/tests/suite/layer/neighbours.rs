//! Excess requests of one client do not affect others.

use std::time::Duration;

use super::site::{PEER, Site, policies_of};

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

/// Creates a site with a pro key for the noisy client and for each of the others.
fn site() -> Site {
    let keys: String = (0..=OTHERS).map(|n| format!("[[keys]]\nkey = '{}'\nplan = 'pro'\n", key(n))).collect();
    Site::new(&format!("{PLANS}\n{keys}"))
}

#[tokio::test]
async fn key_with_fifty_thousand_requests_gets_its_quota_and_other_keys_keep_theirs() {
    let site = site();
    let (noisy, mut passed, mut sent_by_others) = (key(0), 0, 0);
    for n in 0..50_000_u32 {
        let status = site.status("/", &[("x-api-key", &noisy)], PEER).await;
        passed += u32::from(status == 200);
        assert!(status == 200 || status == 429);
        // All requests are within one minute.
        site.clock.advance(Duration::from_micros(1_100));
        if n % 100 == 99 {
            // The others take turns, from the same address and from their own.
            let other = 1 + sent_by_others % OTHERS;
            sent_by_others += 1;
            let round = (sent_by_others - 1) / OTHERS;
            let peer = if other.is_multiple_of(2) { PEER } else { [198, 51, 100, other as u8] };
            let response = site.send("/", &[("x-api-key", &key(other))], peer).await;
            assert_eq!(response.status(), 200, "client {other}");
            let remaining: Vec<i64> = policies_of(&response).iter().map(|policy| policy.remaining).collect();
            assert_eq!(remaining, [599 - round as i64, 99_999 - round as i64], "client {other}");
        }
    }
    assert_eq!(passed, 600);
    // Requests with a known key are not charged to their address.
    let anonymous = site.send("/", &[], PEER).await;
    assert_eq!(policies_of(&anonymous)[0].remaining, 29);
    // A minute after the first request its unit expires.
    site.clock.advance(Duration::from_micros(60_000_000 - 50_000 * 1_100));
    assert_eq!(site.status("/", &[("x-api-key", &noisy)], PEER).await, 200);
}

#[tokio::test]
async fn unknown_keys_share_the_anonymous_quota_of_their_address() {
    let site = site();
    let mut passed = 0;
    for n in 0..10_000 {
        let invented = format!("invented-{n}");
        let header =
            if n % 2 == 0 { ("x-api-key", invented.clone()) } else { ("authorization", format!("Bearer {invented}")) };
        passed += u32::from(site.status("/", &[(header.0, &header.1)], PEER).await == 200);
        site.clock.advance(Duration::from_millis(5));
    }
    assert_eq!(passed, 30);
    assert_eq!(site.status("/", &[], PEER).await, 429, "a request without a key shares it, too");
    assert_eq!(site.status("/", &[("x-api-key", &key(1))], PEER).await, 200, "a known key does not");
    assert_eq!(
        site.status("/", &[("x-api-key", "invented-0")], [203, 0, 113, 10]).await,
        200,
        "nor does another address"
    );
}
