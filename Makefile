# CI runs `make test` and nothing else.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup run quick test clients lint doc features bench chaos gateway failover fuzz long deny package

export PATH := $(CURDIR)/.tools/bin:$(PATH)

FUZZ_SECONDS ?= 60

# All targets that run tests use the same packages and features. With others, cargo would build the workspace again.
# These are all features, so that no test depends on a default.
WORKSPACE := --workspace --all-features --locked
CARGO_TEST := cargo test $(WORKSPACE)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install the programs that the tests need and that are missing
	@scripts/setup.sh

run: ## run the optimised `tidegate` (ARGS="…" are its arguments)
	cargo run --release -- $(ARGS)

# `--test oracle` is the conformance suite on the memory store, in the testkit.
quick: setup ## check the format, and run clippy, the unit tests and the conformance tests on memory
	cargo fmt --all --check
	cargo clippy $(WORKSPACE) --all-targets -- -D warnings
	$(CARGO_TEST) --lib --test oracle

test: setup lint doc ## run all checks that a change must pass
	$(CARGO_TEST)
	@scripts/test-clients.sh

clients: setup ## run the tests of the client packages
	cargo build --workspace --all-features --locked
	@scripts/test-clients.sh

lint: ## check the format, and run clippy with warnings denied
	cargo fmt --all --check
	cargo clippy $(WORKSPACE) --all-targets -- -D warnings
	cargo clippy -p tidegate --locked -- -D warnings
	cargo clippy -p tidegate --no-default-features --locked -- -D warnings

# The same targets and features as clippy, so that dependencies are checked only once. Cargo includes the features of
# dev-dependencies only with `--examples`.
doc: ## build the documentation; broken links are errors
	RUSTDOCFLAGS="-D warnings" cargo doc $(WORKSPACE) --no-deps --lib --bins --examples

features: ## run clippy on the library with each feature alone
	@for feature in redis rules jwt yaml notify schema tower axum; do \
		echo "tidegate with $$feature"; \
		cargo clippy -p tidegate --no-default-features --features $$feature --locked -- -D warnings || exit 1; \
	done

bench: ## run the benchmarks of Tidegate and its alternatives
	@scripts/setup.sh bench
	cargo bench -p tidegate-bench

chaos: setup ## run the chaos scenarios in full and print figures (TIDEGATE_CHAOS_SEED=N replays a run)
	TIDEGATE_CHAOS=long TIDEGATE_CHAOS_SEED=$${TIDEGATE_CHAOS_SEED:-$$(date +%s)} \
		$(CARGO_TEST) --test chaos -- --nocapture --test-threads=1

gateway: setup ## attack the gateway beside a healthy client, send large bodies and requests that end in random ways, and print figures
	TIDEGATE_CHAOS=long $(CARGO_TEST) --test chaos -- gateway:: --nocapture --test-threads=1
	TIDEGATE_GATEWAY_BODY_MIB=1024 TIDEGATE_GATEWAY_ENDINGS=10000 $(CARGO_TEST) --test suite -- --nocapture --test-threads=1 \
		large_bodies_are_streamed requests_are_charged_exactly

failover: setup ## repeat failovers with Sentinels and print how soon the store decides again (TIDEGATE_FAILOVERS sets how many)
	TIDEGATE_FAILOVERS=$${TIDEGATE_FAILOVERS:-20} $(CARGO_TEST) --test suite -- sentinel:: --nocapture --test-threads=1

fuzz: ## run each fuzz target for FUZZ_SECONDS (default: 60)
	@scripts/fuzz.sh $(FUZZ_SECONDS)

long: setup ## run the tests with many more random traces, which takes hours
	TIDEGATE_TRACES=100000 TIDEGATE_DECISIONS=100000000 TIDEGATE_SHARED_DECISIONS=20000000 TIDEGATE_SHARED_LIMIT_ROUNDS=100 \
		TIDEGATE_GATEWAY_BODY_MIB=1024 TIDEGATE_GATEWAY_ENDINGS=10000 $(CARGO_TEST)

deny: ## check licences, sources and advisories of the dependencies
	@command -v cargo-deny >/dev/null || { echo "deny: cargo-deny is missing: cargo install --locked --root .tools cargo-deny" >&2; exit 1; }
	cargo deny check

# Together, because each needs the ones before it, which a registry may not have yet.
package: ## package the published crates, and compile each from its package
	cargo package --locked -p tidegate-core -p tidegate-config -p tidegate-redis -p tidegate -p tidegate-server -p tidegate-cli
