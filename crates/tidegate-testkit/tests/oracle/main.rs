//! The oracle, the memory store and the history checker. One test binary, so that it is linked once.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

mod conformance;
mod corpus;
mod history;
mod properties;
mod reported;
