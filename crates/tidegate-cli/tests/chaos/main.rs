//! The chaos campaign: the real binary and a real Redis under hostile clients, slow networks and careless deploys.
//!
//! Each module is one scenario. `cargo test` runs the short form, which asserts only what holds on any machine: counts,
//! verdicts and bounds. `make chaos` runs the long form and also records latencies and rates, as lines that begin
//! with `chaos:`. Random choices come from one seed, which every run prints, so that a failure can be replayed:
//! `TIDEGATE_CHAOS_SEED=7 make chaos`.
#![allow(clippy::unwrap_used)] // a failed step fails its test
#![allow(clippy::disallowed_methods)] // real time is recorded here, not asserted

mod bursts;
mod campaign;
mod gateway;
mod headers;
mod latency;
mod memory_time;
mod paths;
mod probes;
mod protocols;
mod refunds;
mod refusals;
mod reloads;
mod restarts;
mod script_time;
mod used_receipts;
