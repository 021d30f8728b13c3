//! Polling for a condition in another process or thread, with a pause between attempts.

use std::fmt::Debug;
use std::thread;
use std::time::Duration;

/// Number of attempts: 6,000 at intervals of 5 ms are 30 seconds, far longer than any condition takes to become true.
const ATTEMPTS_MAX: usize = 6_000;
const PAUSE: Duration = Duration::from_millis(5);

/// Calls `read` until `holds` is true of its result, and returns that result.
///
/// Gives up after about 30 seconds. `what` describes the condition in the panic message.
///
/// # Panics
/// If the condition does not become true.
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

/// Calls `holds` until it returns `true`. Returns `false` if it did not within about 30 seconds.
pub fn poll(mut holds: impl FnMut() -> bool) -> bool {
    (0..ATTEMPTS_MAX).any(|_| {
        let holds = holds();
        if !holds {
            thread::sleep(PAUSE);
        }
        holds
    })
}

/// Waits until `holds` returns `true`, without blocking the runtime.
///
/// Gives up after about 30 seconds. `what` describes the condition in the panic message.
///
/// # Panics
/// If the condition does not become true, or outside a tokio runtime.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..ATTEMPTS_MAX {
        if holds() {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("timed out waiting for: {what}");
}
