//! The doors: each translates a protocol into checks and decisions back into the protocol, and does nothing else.

pub mod http;
pub mod resp;
