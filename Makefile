# Few targets; CI calls `make test` and nothing else.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup run test lint doc features bench chaos fuzz long deny package

export PATH := $(CURDIR)/.tools/bin:$(PATH)

FUZZ_SECONDS ?= 60

# One set of packages and features for every target that runs tests: another set would build the workspace again. It is all
# of them, so that no test depends on a default.
WORKSPACE := --workspace --all-features --locked
CARGO_TEST := cargo test $(WORKSPACE)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what the tests need and this machine lacks (quick when nothing is missing)
	@scripts/setup.sh

run: ## the product, optimised; arguments by ARGS="…"
	cargo run --release -- $(ARGS)

test: setup lint doc ## everything that must hold before a change lands
	$(CARGO_TEST)

lint: ## format check, and clippy with warnings denied
	cargo fmt --all --check
	cargo clippy $(WORKSPACE) --all-targets -- -D warnings
	cargo clippy -p tollgate --locked -- -D warnings
	cargo clippy -p tollgate --no-default-features --locked -- -D warnings

# The targets and features are those of clippy, so that the dependencies are checked once. Only `--examples` makes cargo
# include the features of dev-dependencies.
doc: ## the documentation; a broken link is an error
	RUSTDOCFLAGS="-D warnings" cargo doc $(WORKSPACE) --no-deps --lib --bins --examples

features: ## the library with each of its features alone
	@for feature in redis rules jwt yaml schema tower axum; do \
		echo "tollgate with $$feature"; \
		cargo clippy -p tollgate --no-default-features --features $$feature --locked -- -D warnings || exit 1; \
	done

bench: setup ## the measurements, beside their peers in the same run
	cargo bench -p tollgate-bench

chaos: setup ## hostile clients, slow networks, careless deploys: the long form, with figures (TOLLGATE_CHAOS_SEED replays)
	TOLLGATE_CHAOS=long TOLLGATE_CHAOS_SEED=$${TOLLGATE_CHAOS_SEED:-$$(date +%s)} \
		$(CARGO_TEST) --test chaos -- --nocapture --test-threads=1

fuzz: ## every fuzz target for FUZZ_SECONDS (60) each
	@scripts/fuzz.sh $(FUZZ_SECONDS)

long: setup ## the tests again, with campaigns that take hours
	TOLLGATE_TRACES=100000 TOLLGATE_DECISIONS=100000000 TOLLGATE_SHARED_DECISIONS=20000000 $(CARGO_TEST)

deny: ## licences, sources and advisories of all dependencies
	@command -v cargo-deny >/dev/null || { echo "cargo-deny is missing: cargo install --locked cargo-deny" >&2; exit 1; }
	cargo deny check

# Together, because each needs the ones before it, which a registry may not have yet.
package: ## the crates as they would be published, each compiled from its package
	cargo package --locked -p tollgate-core -p tollgate-redis -p tollgate -p tollgate-server -p tollgate-cli
