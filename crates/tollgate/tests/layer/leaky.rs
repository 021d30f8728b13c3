//! Whom a leaky bucket holds, and for how long.

use std::time::Duration;

use tokio::time::Instant;

use super::site::{HERE, Site, told_by};

const RULES: &str = r#"
[[rules]]
name = "jobs"
by = ["ip"]
limits = ["60/min leaky-bucket queue=60", "1000/day"]
"#;

// The limiter's clock stands still, tokio's jumps to whoever waits next.
#[tokio::test(start_paused = true)]
async fn requests_wait_as_they_are_told_and_who_would_wait_too_long_is_refused_and_not_charged() {
    let site = Site::new(RULES).layered(|layer| layer.wait_at_most(Duration::from_secs(3)));
    for seconds in 0..=3 {
        let begun = Instant::now();
        assert_eq!(site.status("/", &[], HERE).await, 200);
        assert_eq!(begun.elapsed().as_secs(), seconds);
    }
    for _ in 0..10 {
        let begun = Instant::now();
        let refused = site.send("/", &[], HERE).await;
        assert_eq!((refused.status().as_u16(), begun.elapsed()), (429, Duration::ZERO));
        assert_eq!(refused.headers()["retry-after"], "1", "then the wait is three seconds again");
        assert_eq!(told_by(&refused)[1].remaining, 996, "nobody was charged");
    }
    site.clock.advance(Duration::from_secs(1));
    assert_eq!(site.status("/", &[], HERE).await, 200, "as it was told");
}
