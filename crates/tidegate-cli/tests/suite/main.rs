//! Tests of the real `tidegate` binary. They are one test binary, so that it is linked once. The chaos campaign is a
//! separate one, because it raises the process's limit of open files.
#![allow(clippy::unwrap_used)] // a failed step fails its test

mod admin;
mod bans;
mod client_spellings;
mod clients;
mod cluster;
mod command;
mod console;
mod exposure;
mod forward_auth;
mod gateway;
mod inherited;
mod instances;
mod invalid_input;
mod key;
mod life;
mod mixed;
mod newcomer;
mod operate;
mod ops;
mod receipts;
mod reload;
mod runbooks;
mod schemathesis;
mod secrets;
mod sentinel;
mod shell;
mod store_access;
mod tls;
mod traces;
mod unwritable_output;
mod validation;
mod waits;
