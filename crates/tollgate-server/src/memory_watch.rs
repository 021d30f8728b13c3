//! Warns when the memory for counters runs out.

use std::time::Duration;

use tokio::time::Instant;
use tollgate::engine::Engine;
use tollgate::{Limiter, MemoryStore};

/// How often the memory is looked at.
const INTERVAL: Duration = Duration::from_secs(10);
/// While the memory stays nearly full, the warning is repeated this often.
const REPEAT: Duration = Duration::from_secs(600);

/// Logs a warning when 90 % of the memory for counters is used, and when it is full so that new keys share counters. Never returns.
pub async fn watch_memory(limiter: Limiter, engine: Option<Engine>) {
    let (mut limits, mut shield) = (Warnings::default(), Warnings::default());
    loop {
        tokio::time::sleep(INTERVAL).await;
        let stats = limiter.stats();
        let usage = Usage {
            bytes: stats.memory_bytes,
            max_bytes: stats.memory_max_bytes,
            overflow_keys: stats.memory_overflow_keys,
        };
        limits.look("limits", usage);
        if let Some(engine) = &engine {
            shield.look("shield", Usage::of(engine.shield()));
        }
    }
}

#[derive(Clone, Copy)]
struct Usage {
    bytes: u64,
    max_bytes: u64,
    overflow_keys: u64,
}

impl Usage {
    fn of(store: &MemoryStore) -> Usage {
        let [bytes, max_bytes, overflow_keys] =
            [store.bytes_used(), store.max_bytes(), store.overflow_len()].map(|number| number as u64);
        Usage { bytes, max_bytes, overflow_keys }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
enum Level {
    #[default]
    Low,
    NearlyFull,
    Full,
}

#[derive(Default)]
struct Warnings {
    /// The level of the last warning, and when it was given.
    given: Option<(Level, Instant)>,
}

impl Warnings {
    /// Logs a warning if one is due.
    fn look(&mut self, kind: &'static str, usage: Usage) {
        let Usage { bytes, max_bytes, overflow_keys } = usage;
        match self.due(usage) {
            None | Some(Level::Low) => {}
            Some(Level::NearlyFull) => {
                tracing::warn!(kind, bytes, max_bytes, "90 % of the memory for counters is used; see --memory");
            }
            Some(Level::Full) => tracing::warn!(
                kind,
                bytes,
                max_bytes,
                overflow_keys,
                "the memory for counters is full: new keys share counters and may be refused early; see --memory"
            ),
        }
    }

    /// Returns the level to warn of, if it is higher than the last one or that warning is long ago.
    fn due(&mut self, usage: Usage) -> Option<Level> {
        let level = match usage {
            Usage { overflow_keys: 1.., .. } => Level::Full,
            Usage { bytes, max_bytes, .. } if bytes >= max_bytes / 10 * 9 => Level::NearlyFull,
            _ => Level::Low,
        };
        let now = Instant::now();
        if self.given.is_some_and(|(given, at)| level <= given && now - at < REPEAT) {
            return None;
        }
        self.given = (level > Level::Low).then_some((level, now));
        self.given.map(|(level, _)| level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_warning_is_given_when_the_level_rises_and_repeated_seldom() {
        let mut warnings = Warnings::default();
        let mut due = |bytes, overflow_keys| warnings.due(Usage { bytes, max_bytes: 1_000, overflow_keys });
        assert_eq!([due(0, 0), due(899, 0)], [None, None]);
        assert_eq!([due(900, 0), due(950, 0)], [Some(Level::NearlyFull), None]);
        // A table that would have to be moved to grow may leave more than a tenth unused.
        assert_eq!([due(850, 3), due(850, 4), due(950, 0)], [Some(Level::Full), None, None]);
        tokio::time::advance(REPEAT).await;
        assert_eq!([due(950, 0), due(950, 0)], [Some(Level::NearlyFull), None]);
        tokio::time::advance(REPEAT).await;
        assert_eq!([due(100, 0), due(900, 0)], [None, Some(Level::NearlyFull)]);
    }
}
