"""Compares this package with `limits` on Redis, in one interleaved run.

    pip install limits redis && PYTHONPATH=src python3 bench/bench.py [--seconds 20] [--keys 100]

Starts a Redis of its own. The contenders take turns of half a second on the same server with the
same keys and quota, so that a busy machine slows all of them alike. Prints the median over the
turns: requests per second of one process, and the CPU time of Redis and its commands per request.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from limits import parse
from limits.storage import RedisStorage
from limits.strategies import (
    FixedWindowRateLimiter,
    MovingWindowRateLimiter,
    SlidingWindowCounterRateLimiter,
)

from tidegate.redis import RedisLimiter

TURN_SECONDS = 0.5
QUOTA = 100
TOOLS = Path(__file__).resolve().parents[3] / ".tools" / "bin"

GUARANTEES = {
    "tidegate sliding": "exact trailing window by Redis' clock; remaining and Retry-After included",
    "tidegate sliding, 2 limits": "both limits or none, exact; one round trip",
    "tidegate token-bucket": "average rate and burst; Retry-After in the reply",
    "tidegate sliding-counter": "approximate; Retry-After in the reply",
    "tidegate fixed-window": "up to twice the quota across a boundary; Retry-After in the reply",
    "limits moving window": "exact trailing window by each client's clock; yes or no only",
    "limits moving window + stats": "the same, with remaining and reset: two calls, not atomic",
    "limits moving window, 2 limits": "not atomic: a denial by the second charges the first",
    "limits sliding counter": "approximate",
    "limits fixed window": "up to twice the quota across a boundary",
}


def contenders(client: redis.Redis, url: str) -> dict[str, Callable[[str], Any]]:
    limiter = RedisLimiter(client, deadline=5, on_error="raise")
    storage = RedisStorage(url)
    moving = MovingWindowRateLimiter(storage)
    counter = SlidingWindowCounterRateLimiter(storage)
    fixed = FixedWindowRateLimiter(storage)
    minute, hour = parse(f"{QUOTA}/minute"), parse(f"{10 * QUOTA}/hour")

    def moving_with_stats(key: str) -> bool:
        allowed = moving.hit(minute, key)
        moving.get_window_stats(minute, key)
        return allowed

    def moving_both(key: str) -> bool:
        return moving.hit(minute, "two", key) and moving.hit(hour, "two", key)

    both = [f"{QUOTA}/min", f"{10 * QUOTA}/h"]
    return {
        "tidegate sliding": lambda key: limiter.check(key, f"{QUOTA}/min"),
        "limits moving window": lambda key: moving.hit(minute, key),
        "limits moving window + stats": moving_with_stats,
        "tidegate sliding, 2 limits": lambda key: limiter.check("two:" + key, both),
        "limits moving window, 2 limits": moving_both,
        "tidegate token-bucket": lambda key: limiter.check(key, f"{QUOTA}/min token-bucket"),
        "tidegate sliding-counter": lambda key: limiter.check(key, f"{QUOTA}/min sliding-counter"),
        "limits sliding counter": lambda key: counter.hit(minute, "counter", key),
        "tidegate fixed-window": lambda key: limiter.check(key, f"{QUOTA}/min fixed-window"),
        "limits fixed window": lambda key: fixed.hit(minute, "fixed", key),
    }


def redis_cost(client: redis.Redis) -> tuple[float, int]:
    """Returns the CPU seconds that Redis has used, and the number of commands of clients."""
    cpu, stats = client.info("cpu"), client.info("stats")
    seconds = cpu["used_cpu_user"] + cpu["used_cpu_sys"]
    return seconds, stats["total_commands_processed"]


def turn(call: Callable[[str], Any], client: redis.Redis, keys: int) -> tuple[float, float, float]:
    """Returns requests per second, CPU microseconds of Redis and commands, per request."""
    cpu, commands = redis_cost(client)
    started, requests = time.perf_counter(), 0
    while time.perf_counter() - started < TURN_SECONDS:
        for _ in range(50):
            call(f"user:{requests % keys}")
            requests += 1
    seconds = time.perf_counter() - started
    cpu_after, commands_after = redis_cost(client)
    # The two INFO commands are not part of the work.
    used_us = (cpu_after - cpu) * 1e6 / requests
    return requests / seconds, used_us, (commands_after - commands - 2) / requests


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=20, help="of the whole run")
    arguments.add_argument("--keys", type=int, default=100, help="number of keys")
    options = arguments.parse_args()
    search = f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}"
    server = shutil.which("redis-server", path=search)
    if server is None:
        raise SystemExit("redis-server is missing; run scripts/setup.sh")
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/redis.sock"
        command = [server, "--port", "0", "--unixsocket", path, "--save", "", "--dir", directory]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            run(path, options.seconds, options.keys)
        finally:
            process.terminate()
            process.wait()


def run(path: str, seconds: float, keys: int) -> None:
    client = redis.Redis(unix_socket_path=path)
    for _ in range(200):
        try:
            client.ping()
            break
        except redis.ConnectionError:
            time.sleep(0.05)
    calls = contenders(client, f"redis+unix://{path}")
    for call in calls.values():
        call("warm-up")
    rounds = max(3, round(seconds / TURN_SECONDS / len(calls)))
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            results[name].append(turn(call, client, keys))
    version = client.info("server")["redis_version"]
    print(f"Redis {version}, {keys} keys, quota {QUOTA} per minute, median of {rounds} turns\n")
    print("| contender | requests/s | Redis CPU per request | commands | guarantee |")
    print("|---|---:|---:|---:|---|")
    for name, turns in results.items():
        rate, cpu, commands = (statistics.median(column) for column in zip(*turns))
        print(f"| {name} | {rate:.0f} | {cpu:.1f} µs | {commands:.1f} | {GUARANTEES[name]} |")


if __name__ == "__main__":
    main()
