#!/usr/bin/env bash
# Runs the tests of the client packages and of the examples that use them, for each language that is on this machine, and
# then all packages on one Redis at the same time. The tests use the binaries `tidegate` and `tidegate-test-cluster` of the
# debug build, and start their own servers.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.tools/bin:$PATH"
export TIDEGATE_BIN="${TIDEGATE_BIN:-$PWD/target/debug/tidegate}"
for binary in "$TIDEGATE_BIN" target/debug/tidegate-test-cluster; do
    [ -x "$binary" ] || { echo "clients: $binary is missing: cargo build --workspace --all-features --locked" >&2; exit 1; }
done

not_run=() failed=()

# language NAME PROGRAM COMMAND…: runs the tests of a language if its program is on this machine.
language() {
    local name=$1 program=$2
    shift 2
    if ! command -v "$program" >/dev/null; then
        not_run+=("$name ($program is not installed)")
        return
    fi
    echo "clients: $name"
    "$@" || failed+=("$name")
}

python_tests() { PYTHONPATH=.tools/python python3 -m pytest -q -p no:cacheprovider clients/python examples/flask-plans; }
node_tests() { npm test --silent --prefix clients/node && hono_shortener; }
# suite DIRECTORY: prints the path of the test binary of a crate. The features are those of `make test`, so that nothing is
# built again.
suite() {
    cargo test --workspace --all-features --locked --no-run --test suite --message-format=json 2>/dev/null | python3 -c '
import json, sys
for message in map(json.loads, sys.stdin):
    target = message.get("target", {})
    if message.get("executable") and target["name"] == "suite" and f"/{sys.argv[1]}/" in target["src_path"]:
        print(message["executable"])' "$1"
}
# The outside tests of the Rust shortener, on the Hono one.
hono_shortener() {
    local suite
    suite=$(suite examples/shortener)
    (cd examples/shortener && SHORTENER_COMMAND="$(command -v node) $PWD/../shortener-hono/src/server.js" "$suite")
}
php_tests() { (cd clients/php && phpunit) && (cd examples/php-plans && phpunit PlansTest.php); }
# The module `tidegate` and the nested one are one workspace.
go_tests() { (cd clients/go && go vet tidegate/... && go test tidegate/...) && (cd examples/go-plans && go test ./...); }

language python python3 python_tests
language node node node_tests
language php php php_tests
language go go go_tests

# All languages on one Redis. The test itself reports those that are missing.
mixed_run() {
    local suite
    suite=$(suite crates/tidegate-cli)
    (cd crates/tidegate-cli && "$suite" mixed:: --ignored --nocapture)
}
echo "clients: all packages, the service and the library on one Redis"
mixed_run || failed+=("mixed run")

for reason in "${not_run[@]}"; do echo "clients: not run: $reason"; done
if [ "${#failed[@]}" -gt 0 ]; then
    echo "clients: failed: ${failed[*]}" >&2
    exit 1
fi
