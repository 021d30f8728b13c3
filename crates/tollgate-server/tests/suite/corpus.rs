//! What fuzzing has found worth keeping, without the fuzzer.

use tollgate_server::doors::resp;
use tollgate_testkit::fuzz;

#[test]
fn kept_streams_hold() {
    fuzz::replay("resp", resp::fuzz::any_bytes);
}
