//! Polling for a condition in another process or thread, with a pause between attempts.

use std::fmt::Debug;
use std::thread;
use std::time::Duration;

/// Number of attempts: 6,000 at intervals of 5 ms are 30 seconds, far longer than any condition takes to become true.
const ATTEMPTS_MAX: usize = 6_000;
const PAUSE: Duration = Duration::from_millis(5);

/// Calls `read` every 5 ms until `holds` returns `true` for its result, and returns that result. Blocks the thread.
///
/// # Panics
/// If that takes longer than about 30 seconds. The message contains `what`, the description of the condition, and the
/// last result.
pub fn eventually<T: Debug>(what: &str, mut read: impl FnMut() -> T, holds: impl Fn(&T) -> bool) -> T {
    let mut last = read();
    let has_held = holds(&last)
        || poll(|| {
            last = read();
            holds(&last)
        });
    assert!(has_held, "timed out waiting for: {what}; last value: {last:?}");
    last
}

/// Calls `holds` every 5 ms until it returns `true`, and returns `true` then. Blocks the thread.
///
/// Returns `false` after about 30 seconds.
pub fn poll(mut holds: impl FnMut() -> bool) -> bool {
    (0..ATTEMPTS_MAX).any(|_| {
        let holds = holds();
        if !holds {
            thread::sleep(PAUSE);
        }
        holds
    })
}

/// Calls `holds` every 5 ms until it returns `true`, without blocking the runtime.
///
/// # Panics
/// If that takes longer than about 30 seconds by tokio's clock, with `what`, the description of the condition; or
/// outside a tokio runtime with timers.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..ATTEMPTS_MAX {
        if holds() {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("timed out waiting for: {what}");
}
