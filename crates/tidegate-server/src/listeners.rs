//! The listeners: each translates a protocol into checks, and decisions back into the protocol.

pub(crate) mod admin;
pub(crate) mod described;
pub mod gateway;
pub mod http;
pub(crate) mod io;
pub mod resp;
