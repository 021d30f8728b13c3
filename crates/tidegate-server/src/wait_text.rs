//! Waits as text for operators.

use std::time::Duration;

use tidegate::Wait;

/// Formats a wait, such as `59m 50s`, `250ms`, `0s` or `never`.
///
/// A wait of a second or more is rounded up to whole seconds, a shorter one to whole milliseconds.
pub fn format_wait(wait: Wait) -> String {
    let rounded = match wait.as_millis_ceil() {
        None => return "never".to_owned(),
        Some(ms @ ..1_000) => Duration::from_millis(ms),
        Some(ms) => Duration::from_secs(ms.div_ceil(1_000)),
    };
    humantime::format_duration(rounded).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_have_minutes_and_seconds() {
        for (us, expected) in [
            (0, "0s"),
            (1, "1ms"),
            (250_000, "250ms"),
            (999_001, "1s"),
            (1_000_000, "1s"),
            (1_000_001, "2s"),
            (3_589_506_000, "59m 50s"),
            (3_600_000_000, "1h"),
            (90_061_000_000, "1day 1h 1m 1s"),
        ] {
            assert_eq!(format_wait(Wait::from_micros(us)), expected, "{us}");
        }
        assert_eq!(format_wait(Wait::NEVER), "never");
    }
}
