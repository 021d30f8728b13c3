//! Measurements of Tollgate beside its peers.
//!
//! - [`traffic`]: which keys are asked for, in which order.
//! - [`contestant`]: one check by Tollgate, governor or throttlecrab, each as a service would call it.
//! - [`door`]: a server process under load, and what each answer costs it.
//! - [`measure`]: rounds, medians, tables.
//!
//! What is measured and what it means: `bench/README.md`.

pub mod contestant;
pub mod door;
pub mod measure;
pub mod traffic;
