//! A store that goes wrong in every way a real server can, and a limiter that goes on deciding.
//!
//! Each test mistreats a real process, or the network in front of it, and heals it again; nothing on our side is restarted.
//! One binary, so that it is linked once.

mod clock;
mod latency;
mod matching;
mod network;
mod node;
mod refusing;
mod secrets;
mod start_up;
mod starved;
