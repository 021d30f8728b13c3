//! The store on real servers. One binary, so that it is linked once.

mod batches;
mod conformance;
mod faults;
mod on_server;
mod state;
