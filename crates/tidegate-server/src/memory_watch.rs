//! Logs a warning when the memory for counters runs out.

use std::time::Duration;

use tidegate::engine::Engine;
use tidegate::{Limiter, MemoryStore};
use tokio::time::Instant;

/// The interval between two readings.
const INTERVAL: Duration = Duration::from_secs(10);
/// The interval at which the warning is repeated while the memory stays nearly full.
const REPEAT: Duration = Duration::from_secs(600);

/// Logs warnings when the memory for counters is nearly full. Never returns.
///
/// Every 10 s, first after 10 s, reads the memory of the limiter's counters, and of those of shield rules if there is
/// an engine. Logs a warning when 90 % is used, and when it is full, so that new keys share counters. Repeats it every
/// 10 minutes while that lasts.
pub async fn watch_memory(limiter: Limiter, engine: Option<Engine>) {
    let (mut limits, mut shield) = (Warnings::default(), Warnings::default());
    loop {
        tokio::time::sleep(INTERVAL).await;
        let stats = limiter.stats();
        let usage = MemoryUsage {
            bytes: stats.memory_bytes,
            max_bytes: stats.memory_max_bytes,
            overflow_keys: stats.memory_overflow_keys,
        };
        limits.warn_if_due("limits", usage);
        if let Some(engine) = &engine {
            shield.warn_if_due("shield", MemoryUsage::of(engine.shield()));
        }
    }
}

#[derive(Clone, Copy)]
struct MemoryUsage {
    bytes: u64,
    max_bytes: u64,
    overflow_keys: u64,
}

impl MemoryUsage {
    fn of(store: &MemoryStore) -> MemoryUsage {
        let [bytes, max_bytes, overflow_keys] =
            [store.bytes_used(), store.max_bytes(), store.overflow_len()].map(|number| number as u64);
        MemoryUsage { bytes, max_bytes, overflow_keys }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
enum UsageLevel {
    #[default]
    Low,
    NearlyFull,
    Full,
}

#[derive(Default)]
struct Warnings {
    /// The level of the last warning, and when it was logged.
    last: Option<(UsageLevel, Instant)>,
}

impl Warnings {
    /// Logs a warning about the memory named `kind` if one is [due](Self::due).
    fn warn_if_due(&mut self, kind: &'static str, usage: MemoryUsage) {
        let MemoryUsage { bytes, max_bytes, overflow_keys } = usage;
        match self.due(usage) {
            None | Some(UsageLevel::Low) => {}
            Some(UsageLevel::NearlyFull) => {
                tracing::warn!(kind, bytes, max_bytes, "90% of the memory for counters is used; raise --memory");
            }
            Some(UsageLevel::Full) => tracing::warn!(
                kind,
                bytes,
                max_bytes,
                overflow_keys,
                "the memory for counters is full: new keys share counters and may be denied early; raise --memory"
            ),
        }
    }

    /// Returns the level to warn of, and records it as the last warning.
    ///
    /// A memory is full if it has overflow keys, and nearly full from 90 % on.
    ///
    /// Returns `None` if the level is low, or not higher than that of a warning in the last ten minutes.
    fn due(&mut self, usage: MemoryUsage) -> Option<UsageLevel> {
        let level = match usage {
            MemoryUsage { overflow_keys: 1.., .. } => UsageLevel::Full,
            MemoryUsage { bytes, max_bytes, .. } if bytes >= max_bytes / 10 * 9 => UsageLevel::NearlyFull,
            _ => UsageLevel::Low,
        };
        let now = Instant::now();
        if self.last.is_some_and(|(last, at)| level <= last && now - at < REPEAT) {
            return None;
        }
        self.last = (level > UsageLevel::Low).then_some((level, now));
        self.last.map(|(level, _)| level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_warning_is_logged_when_the_level_rises_and_every_ten_minutes_after_that() {
        let mut warnings = Warnings::default();
        let mut due = |bytes, overflow_keys| warnings.due(MemoryUsage { bytes, max_bytes: 1_000, overflow_keys });
        assert_eq!([due(0, 0), due(899, 0)], [None, None]);
        assert_eq!([due(900, 0), due(950, 0)], [Some(UsageLevel::NearlyFull), None]);
        // A table that would have to be moved to grow may leave more than a tenth of the memory unused.
        assert_eq!([due(850, 3), due(850, 4), due(950, 0)], [Some(UsageLevel::Full), None, None]);
        tokio::time::advance(REPEAT).await;
        assert_eq!([due(950, 0), due(950, 0)], [Some(UsageLevel::NearlyFull), None]);
        tokio::time::advance(REPEAT).await;
        assert_eq!([due(100, 0), due(900, 0)], [None, Some(UsageLevel::NearlyFull)]);
    }
}
