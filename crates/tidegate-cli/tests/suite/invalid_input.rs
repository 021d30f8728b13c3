//! Invalid and hostile bytes on the HTTP and RESP listeners of the real binary.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

mod http;
mod resp;
