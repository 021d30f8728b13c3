//! What fuzzing has found worth keeping, without the fuzzer.

use tollgate_server::listeners::{http, resp};
use tollgate_testkit::fuzz;

#[test]
fn kept_requests_hold() {
    fuzz::replay("http", http::fuzz::any_bytes);
}

#[test]
fn kept_streams_hold() {
    fuzz::replay("resp", resp::fuzz::any_bytes);
}
