//! The library as its users call it, against real and simulated servers. One test binary, so that it is linked once.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

mod calls;
mod cluster;
mod denials;
mod distributed;
mod exports;
mod faults;
mod guide;
mod instances;
mod key_hash;
mod late_replies;
mod layer;
mod manifests;
mod observers;
mod plan_hash;
mod round_trips;
mod sentinel;
mod settings;
mod settle;
mod shared_limit;
mod unusable_stores;
mod vectors;
