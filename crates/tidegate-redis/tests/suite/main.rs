//! Tests of the store on real and simulated servers. One binary, so that it is linked once.

#![allow(clippy::unwrap_used)] // all of it is test code

mod ban_list;
mod batches;
mod cluster;
mod commands;
mod conformance;
mod encrypted;
mod fast_paths;
mod faults;
mod instances;
mod lifetime;
mod log_format;
mod on_cluster;
mod on_server;
mod privileges;
mod redemptions;
mod script;
mod sentinel;
mod state;
mod subjects;
mod virtual_time;
