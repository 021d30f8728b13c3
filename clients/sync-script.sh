#!/usr/bin/env bash
# Copies the Lua script into the client packages, each of which ships it. A test of each package compares its copy.
set -euo pipefail
cd "$(dirname "$0")"
for copy in go/tollgate.lua node/lua/tollgate.lua php/src/tollgate.lua python/src/tollgate/tollgate.lua; do
    cp ../crates/tollgate-redis/lua/tollgate.lua "$copy"
done
