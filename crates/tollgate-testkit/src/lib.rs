//! What proves Tollgate right.

pub mod conformance;
pub mod fault;
pub mod fuzz;
pub mod history;
pub mod oracle;
pub mod poll;
pub mod server;
pub mod simulated;
