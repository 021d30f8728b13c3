//! The listeners: each translates a protocol into checks, and decisions back into the protocol.

pub mod admin;
pub(crate) mod described;
pub mod gateway;
pub mod http;
pub(crate) mod io;
pub mod resp;

use crate::listener::ListenerKind;

/// All listeners, in the order of help texts and of the lines that are printed at the start.
pub static LISTENERS: &[&ListenerKind] = &[&http::HTTP, &resp::RESP, &gateway::GATEWAY, &admin::ADMIN];
