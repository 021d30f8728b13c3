//! Test tools of Tidegate: oracle, conformance suite, history checker, real and simulated servers, fault injection.

pub mod certificates;
pub mod conformance;
pub mod fake_sentinel;
pub mod fault;
pub mod fuzz;
pub mod history;
pub mod http;
pub mod oracle;
pub mod poll;
pub mod program;
pub mod server;
pub mod simulated;
pub mod unreachable;
