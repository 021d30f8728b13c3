//! The inputs that fuzzing has found worth keeping, without the fuzzer.

use tollgate_testkit::fuzz::replay;

#[test]
fn kept_paths_hold() {
    replay("path", tollgate::rules::fuzz::any_path);
}

#[test]
fn kept_forwarding_headers_hold() {
    replay("forwarded", tollgate::fuzz::forwarded);
}

#[test]
fn kept_tokens_hold() {
    replay("token", tollgate::fuzz::token);
}

#[test]
fn kept_configurations_hold() {
    replay("configuration", tollgate::fuzz::configuration);
}
