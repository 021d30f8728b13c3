#!/usr/bin/env bash
# Copies the Lua script into the client packages, each of which ships it. A test of each package compares its copy.
set -euo pipefail
cd "$(dirname "$0")"
for copy in go/tidegate.lua node/lua/tidegate.lua php/src/tidegate.lua python/src/tidegate/tidegate.lua; do
    cp ../crates/tidegate-redis/lua/tidegate.lua "$copy"
done
