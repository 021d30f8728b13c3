//! The Tower layer as its users meet it.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

mod aborts;
mod bodies;
mod endings;
mod forwarding;
mod grpc;
mod in_code;
mod leaky;
mod limits;
mod neighbours;
mod nested;
mod outage;
mod site;
mod sockets;
