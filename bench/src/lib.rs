//! Measurements of Tollgate's memory store beside its peers.
//!
//! - [`traffic`]: which keys are asked for, in which order.
//! - [`contestant`]: one check by Tollgate, governor or throttlecrab, each as a service would call it.
//! - [`measure`]: rounds, medians, tables.
//!
//! What is measured and what it means: `bench/README.md`.

pub mod contestant;
pub mod measure;
pub mod traffic;
