//! Logs a warning when the memory for counters, or for used receipts, runs out.

use std::time::Duration;

use tidegate::engine::Engine;
use tidegate::{MemoryStore, UsedReceiptStats};
use tokio::time::Instant;

/// The interval between two readings.
const INTERVAL: Duration = Duration::from_secs(10);
/// The interval at which the warning is repeated while the memory stays nearly full.
const REPEAT: Duration = Duration::from_secs(600);

/// Logs warnings when the memory for counters is nearly full, or that for used receipts is full. Never returns.
///
/// Every 10 s, first after 10 s, reads the memory of the limiter's counters, and of those of shield rules. Logs a warning when 90 % is used, and when it is full, so that new keys share counters. Repeats it every
/// 10 minutes while that lasts. Does the same when used receipts were dropped before they expired.
pub async fn watch_memory(engine: Engine) {
    let (mut limits, mut shield) = (Warnings::default(), Warnings::default());
    let (mut receipts, mut shield_receipts) = (ReceiptWarnings::default(), ReceiptWarnings::default());
    loop {
        tokio::time::sleep(INTERVAL).await;
        let stats = engine.limiter().stats();
        let usage = MemoryUsage {
            bytes: stats.memory_bytes,
            max_bytes: stats.memory_max_bytes,
            overflow_keys: stats.memory_overflow_keys,
        };
        limits.warn_if_due("limits", usage);
        receipts.warn_if_due("limits", stats.used_receipts);
        shield.warn_if_due("shield", MemoryUsage::of(engine.shield()));
        shield_receipts.warn_if_due("shield", engine.shield().used_receipts());
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

#[derive(Default)]
struct ReceiptWarnings {
    /// The number of dropped blocks at the last warning.
    dropped_blocks: u64,
    last_at: Option<Instant>,
}

impl ReceiptWarnings {
    /// Logs a warning about the used receipts of this kind if one is [due](Self::is_due).
    fn warn_if_due(&mut self, kind: &'static str, stats: UsedReceiptStats) {
        let UsedReceiptStats { bytes, max_bytes, dropped_blocks, expired_early, .. } = stats;
        if self.is_due(dropped_blocks) {
            tracing::warn!(
                kind,
                bytes,
                max_bytes,
                dropped_blocks,
                expired_early,
                "the memory for used receipts is full: receipts expire early, and their refunds are refused; use Redis"
            );
        }
    }

    /// Returns whether blocks were dropped since the last warning and that is at least ten minutes ago. Then records this
    /// as the last warning.
    fn is_due(&mut self, dropped_blocks: u64) -> bool {
        let now = Instant::now();
        let is_due = dropped_blocks > self.dropped_blocks && self.last_at.is_none_or(|at| now - at >= REPEAT);
        if is_due {
            (self.dropped_blocks, self.last_at) = (dropped_blocks, Some(now));
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_warning_is_logged_when_used_receipts_were_dropped_and_at_most_every_ten_minutes() {
        let mut warnings = ReceiptWarnings::default();
        assert!(!warnings.is_due(0));
        assert_eq!([warnings.is_due(3), warnings.is_due(4)], [true, false]);
        tokio::time::advance(REPEAT).await;
        assert_eq!([warnings.is_due(4), warnings.is_due(4)], [true, false]);
        tokio::time::advance(REPEAT).await;
        assert!(!warnings.is_due(4));
    }

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
