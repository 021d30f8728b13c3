//! Benchmarks of Tidegate and its alternatives.
//!
//! - [`traffic`]: sequences of requests, each with a key.
//! - [`contestant`]: one check by Tidegate, governor or throttlecrab, each called as in a service.
//! - [`endpoint`]: server processes under load, and their CPU time per response.
//! - [`measure`]: timing, medians and tables.
//!
//! `bench/README.md` describes each benchmark and shows results.

pub mod contestant;
pub mod endpoint;
pub mod measure;
pub mod traffic;
#[cfg(test)]
mod window;
