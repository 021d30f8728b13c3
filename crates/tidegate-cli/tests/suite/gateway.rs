//! `tidegate gateway` in front of real servers: what reaches the upstream, and what reaches the client.

mod availability;
mod balancer;
mod configuration;
mod evasion;
mod forwarding;
mod frames;
mod hostile;
mod process;
mod protocols;
mod services;
mod slots;
mod upstream;
mod websocket;

pub(crate) use process::GatewayProcess;
pub(crate) use upstream::Upstream;
