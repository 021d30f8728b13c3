//! Replays the fuzzing corpus.

use tidegate_server::listeners::{http, resp};
use tidegate_testkit::fuzz;

#[test]
fn the_http_corpus_passes() {
    fuzz::replay("http", http::fuzz::any_bytes);
}

#[test]
fn the_resp_corpus_passes() {
    fuzz::replay("resp", resp::fuzz::any_bytes);
}
