//! The real binary from outside. One test binary, so that it is linked once; the chaos campaign has its own, because it
//! raises the process's limit of open files.

mod admin;
mod bans;
mod clients;
mod command;
mod doors;
mod instances;
mod life;
mod operate;
mod reload;
mod schemathesis;
mod secrets;
mod serving;
mod tls;
mod traces;
mod unheard;
