//! `tidegate gateway` in front of real servers: what reaches the upstream, and what reaches the client.

mod availability;
mod balancer;
mod configuration;
mod evasion;
mod forwarding;
mod hostile;
mod protocols;
mod services;
mod slots;
mod websocket;
