#!/usr/bin/env bash
# Runs each fuzz target for the given number of seconds, from the committed corpus.
# New inputs go to fuzz/found, which is not in git. Copy the ones worth keeping to fuzz/corpus.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
export PATH="$PWD/.tools/bin:$PATH"

fail() {
    printf 'fuzz: %s\n' "$@" >&2
    exit 1
}

command -v cargo-fuzz >/dev/null || fail "cargo-fuzz is missing: cargo install --locked --root .tools cargo-fuzz"
rustup run nightly rustc --version >/dev/null 2>&1 || fail "a nightly toolchain is missing: rustup toolchain install nightly"

for target in fuzz/fuzz_targets/*.rs; do
    name=$(basename "$target" .rs)
    echo "fuzz: $name for $seconds s"
    mkdir -p "fuzz/found/$name"
    cargo +nightly fuzz run "$name" "fuzz/found/$name" "fuzz/corpus/$name" -- -max_total_time="$seconds" -timeout=10
done
