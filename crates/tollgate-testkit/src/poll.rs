//! Polling for a condition in another process or thread, with a pause between attempts.

use std::fmt::Debug;
use std::thread;
use std::time::Duration;

/// Number of attempts: 6,000 at intervals of 5 ms are 30 seconds, far longer than any condition takes to become true.
const LOOKS_MAX: usize = 6_000;
const PAUSE: Duration = Duration::from_millis(5);

/// Calls `look` until `holds` is true of its result, and returns that result.
///
/// Gives up after about 30 seconds. `what` describes the condition in the panic message.
///
/// # Panics
/// If the condition does not become true.
pub fn eventually<T: Debug>(what: &str, mut look: impl FnMut() -> T, holds: impl Fn(&T) -> bool) -> T {
    let mut seen = look();
    let is_so = holds(&seen)
        || poll(|| {
            seen = look();
            holds(&seen)
        });
    assert!(is_so, "timed out waiting for: {what}; last value: {seen:?}");
    seen
}

/// Calls `is_so` until it returns `true`. Returns `false` if it did not within about 30 seconds.
pub fn poll(mut is_so: impl FnMut() -> bool) -> bool {
    (0..LOOKS_MAX).any(|_| {
        let is_so = is_so();
        if !is_so {
            thread::sleep(PAUSE);
        }
        is_so
    })
}
