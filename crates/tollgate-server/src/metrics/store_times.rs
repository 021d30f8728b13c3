//! How long the shared store takes.

use tollgate::observe::{Observer, StoreCall, StoreCallKind};

use super::histogram::{Histogram, Snapshot};

const KINDS: [StoreCallKind; 6] = [
    StoreCallKind::Decide,
    StoreCallKind::Refund,
    StoreCallKind::Settle,
    StoreCallKind::Reset,
    StoreCallKind::Inspect,
    StoreCallKind::Probe,
];

/// Watches a limiter: how long each call of its store took, by what it was for.
#[derive(Debug, Default)]
pub struct StoreTimes([Histogram; KINDS.len()]);

impl StoreTimes {
    /// One for deciding, and one for whatever else was ever done.
    pub(super) fn read(&self) -> Vec<(&'static str, Snapshot)> {
        let histograms = KINDS.into_iter().zip(&self.0).map(|(kind, times)| (kind.name(), times.read()));
        histograms.filter(|(call, times)| times.count > 0 || *call == StoreCallKind::Decide.name()).collect()
    }
}

impl Observer for StoreTimes {
    fn store_called(&self, call: &StoreCall) {
        if let Some(kind) = KINDS.iter().position(|kind| *kind == call.kind) {
            self.0[kind].record(call.took);
        }
    }
}
