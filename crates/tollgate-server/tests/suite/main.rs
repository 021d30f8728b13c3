//! The doors from outside: bytes over a socket, on a clock in the test's hand.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

mod admin_access;
mod behind_doors;
mod conformance;
mod corpus;
mod ended;
mod http_subject;
mod leaving;
mod operator;
mod resp_subject;
mod site;
mod throttle;
mod tls_end;
mod watching;
