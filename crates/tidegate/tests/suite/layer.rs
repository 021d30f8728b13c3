//! The Tower layer as its users meet it.

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
