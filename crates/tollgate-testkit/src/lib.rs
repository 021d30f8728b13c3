//! What proves Tollgate right.

pub mod conformance;
pub mod history;
pub mod oracle;
