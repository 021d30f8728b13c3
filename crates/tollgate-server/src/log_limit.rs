//! Limits how often one kind of event is logged.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// At most one line in this time, per limit.
const INTERVAL: Duration = Duration::from_secs(10);

/// Limits the log lines of one kind of event, which a client can cause as often as it likes.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    logged_at: Option<Instant>,
    unlogged: u64,
}

impl LogLimit {
    /// Returns the number of events that were not logged since the last line, or `None` if this event is not logged either.
    pub(crate) fn admit(&self) -> Option<u64> {
        let now = Instant::now();
        let mut state = self.0.lock();
        if state.logged_at.is_some_and(|logged_at| now - logged_at < INTERVAL) {
            state.unlogged += 1;
            return None;
        }
        state.logged_at = Some(now);
        Some(std::mem::take(&mut state.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_line_per_interval_says_how_many_were_left_out() {
        let limit = LogLimit::default();
        assert_eq!(limit.admit(), Some(0));
        for _ in 0..1_000 {
            assert_eq!(limit.admit(), None);
        }
        tokio::time::advance(INTERVAL).await;
        assert_eq!([limit.admit(), limit.admit()], [Some(1_000), None]);
    }
}
