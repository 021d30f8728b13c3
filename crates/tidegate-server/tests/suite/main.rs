//! Tests of the listeners from outside: bytes over a socket, on a clock that the test moves.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

mod admin_access;
mod conformance;
mod corpus;
mod deployment;
mod ended_tasks;
mod fixture;
mod gateway;
mod http_subject;
mod metrics;
mod operator;
mod reload_parts;
mod resp_subject;
mod same_answer;
mod settings;
mod shutdown;
mod site;
mod throttle;
mod tls_end;

mod watching;
