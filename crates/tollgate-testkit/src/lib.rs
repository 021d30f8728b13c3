//! What proves Tollgate right.

pub mod conformance;
pub mod fault;
pub mod fuzz;
pub mod history;
pub mod look;
pub mod oracle;
pub mod server;
pub mod simulated;
