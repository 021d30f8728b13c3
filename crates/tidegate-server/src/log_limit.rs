//! Limits how often one kind of event is logged.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The least time between two lines of one limit.
const INTERVAL: Duration = Duration::from_secs(10);

/// A limit of one log line in ten seconds, for one kind of event that clients can cause.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<LogState>);

#[derive(Debug, Default)]
struct LogState {
    logged_at: Option<Instant>,
    suppressed: u64,
}

impl LogLimit {
    /// Returns `Some` if this event is to be logged, with the number of events since the last line that were not.
    ///
    /// `None` if a line was logged less than ten seconds ago; the event is then counted as not logged.
    pub(crate) fn admit(&self) -> Option<u64> {
        let now = Instant::now();
        let mut state = self.0.lock();
        if state.logged_at.is_some_and(|logged_at| now - logged_at < INTERVAL) {
            state.suppressed += 1;
            return None;
        }
        state.logged_at = Some(now);
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_event_per_interval_is_logged_with_the_number_of_those_left_out() {
        let limit = LogLimit::default();
        assert_eq!(limit.admit(), Some(0));
        for _ in 0..1_000 {
            assert_eq!(limit.admit(), None);
        }
        tokio::time::advance(INTERVAL).await;
        assert_eq!([limit.admit(), limit.admit()], [Some(1_000), None]);
    }
}
