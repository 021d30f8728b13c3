//! What the doors of the real binary make of bytes that no friend would send.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

mod bad_http;
mod hostile_resp;
