//! Replays the fuzzing corpus without the fuzzer.

use tollgate_testkit::fuzz::replay;

#[test]
fn path_corpus_passes() {
    replay("path", tollgate::rules::fuzz::any_path);
}

#[test]
fn forwarded_corpus_passes() {
    replay("forwarded", tollgate::fuzz::forwarded);
}

#[test]
fn token_corpus_passes() {
    replay("token", tollgate::fuzz::token);
}

#[test]
fn configuration_corpus_passes() {
    replay("configuration", tollgate::fuzz::configuration);
}
