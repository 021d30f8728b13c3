//! Looking at what another process does. It tells nobody when it is ready, so between looks there is a pause.

use std::fmt::Debug;
use std::thread;
use std::time::Duration;

/// 6,000 looks, 5 ms apart, are half a minute on an idle machine. Nothing that is waited for takes this long, unless it never comes.
const LOOKS_MAX: usize = 6_000;
const PAUSE: Duration = Duration::from_millis(5);

/// Looks until it is as expected, and says what was seen then.
///
/// # Panics
/// When it never is.
pub fn eventually<T: Debug>(what: &str, mut look: impl FnMut() -> T, holds: impl Fn(&T) -> bool) -> T {
    let mut seen = look();
    let is_so = holds(&seen)
        || poll(|| {
            seen = look();
            holds(&seen)
        });
    assert!(is_so, "it never came to pass: {what}; last seen: {seen:?}");
    seen
}

/// Looks until it is so; false when it never was.
pub fn poll(mut is_so: impl FnMut() -> bool) -> bool {
    (0..LOOKS_MAX).any(|_| {
        let is_so = is_so();
        if !is_so {
            thread::sleep(PAUSE);
        }
        is_so
    })
}
