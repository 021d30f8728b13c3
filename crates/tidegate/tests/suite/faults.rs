//! Faults of a real server, during which the limiter keeps deciding.
//!
//! Each test breaks a real process, or the network in front of it, and heals it again. Nothing on our side is restarted.
//! What must hold within a time is tested in virtual time (`round_trips/outages.rs`).

mod clock;
mod matching;
mod network;
mod node;
mod refusing;
mod secrets;
mod start_up;
mod starved;
