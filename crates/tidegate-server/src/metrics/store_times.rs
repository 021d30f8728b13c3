//! Durations of calls to the shared store.

use tidegate::observe::{Observer, StoreCall, StoreCallKind};

use super::histogram::{Histogram, Snapshot};

const KINDS: [StoreCallKind; 7] = [
    StoreCallKind::Decide,
    StoreCallKind::Refund,
    StoreCallKind::Settle,
    StoreCallKind::Reset,
    StoreCallKind::Inspect,
    StoreCallKind::Ban,
    StoreCallKind::Probe,
];

/// An observer that records how long the calls to the store take, by kind.
///
/// Pass the same value to [`LimiterBuilder::observer`], which fills it, and to
/// [`ServerOptions::store_times`](crate::ServerOptions::store_times), which reports it on `/metrics`.
///
/// [`LimiterBuilder::observer`]: tidegate::LimiterBuilder::observer
#[derive(Debug, Default)]
pub struct StoreTimes([Histogram; KINDS.len()]);

impl StoreTimes {
    /// Returns the durations of calls by kind: those of decisions always, those of other kinds if there were any.
    pub(super) fn read(&self) -> Vec<(&'static str, Snapshot)> {
        let histograms = KINDS.into_iter().zip(&self.0).map(|(kind, times)| (kind.as_str(), times.read()));
        histograms.filter(|(call, times)| times.count > 0 || *call == StoreCallKind::Decide.as_str()).collect()
    }
}

impl Observer for StoreTimes {
    fn store_called(&self, call: &StoreCall) {
        if let Some(kind) = KINDS.iter().position(|kind| *kind == call.kind) {
            self.0[kind].record(call.took);
        }
    }
}
