//! The inputs that fuzzing has found worth keeping, without the fuzzer.

use tollgate_testkit::fuzz;

#[test]
fn kept_limit_texts_hold() {
    fuzz::replay("limit_text", fuzz::limit_text);
}

#[test]
fn kept_traces_hold() {
    fuzz::replay("decision", fuzz::decision);
}
