//! Durations of calls to the shared store.

use tollgate::observe::{Observer, StoreCall, StoreCallKind};

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

/// An observer that records how long the calls to the store take, by kind. For [`LimiterBuilder::observer`] and
/// [`ServerOptions::store_times`](crate::ServerOptions::store_times).
///
/// [`LimiterBuilder::observer`]: tollgate::LimiterBuilder::observer
#[derive(Debug, Default)]
pub struct StoreTimes([Histogram; KINDS.len()]);

impl StoreTimes {
    /// Returns the durations of calls that decide, and those of every other kind that was called.
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
