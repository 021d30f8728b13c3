//! `tollgate gateway` in front of real servers: what reaches the upstream, and what reaches the client.

mod forwarding;
mod process;
mod upstream;

pub(crate) use process::GatewayProcess;
pub(crate) use upstream::{Recorded, Upstream};
