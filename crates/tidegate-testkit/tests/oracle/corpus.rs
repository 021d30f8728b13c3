//! Replays the fuzzing corpus without the fuzzer.

use tidegate_testkit::fuzz;

#[test]
fn limit_text_corpus_passes() {
    fuzz::replay("limit_text", fuzz::limit_text);
}

#[test]
fn decision_corpus_passes() {
    fuzz::replay("decision", fuzz::decision);
}
