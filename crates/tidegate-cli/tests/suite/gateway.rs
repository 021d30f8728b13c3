//! `tidegate gateway` in front of real servers: what reaches the upstream, and what reaches the client.

mod availability;
mod balancer;
mod configuration;
mod forwarding;
mod hostile;
mod process;
mod protocols;
mod services;
mod upstream;
mod websocket;

pub(crate) use process::GatewayProcess;
pub(crate) use upstream::Upstream;
