"""A worker of the mixed run: one of the Python clients, alongside those of the other languages.

The parent, `crates/tidegate-cli/tests/suite/mixed.rs`, describes the arguments, the input and the
records.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "clients/python/src"), str(ROOT / ".tools/python")]

import redis  # noqa: E402

from tidegate import AsyncTidegate, Tidegate  # noqa: E402
from tidegate.redis import AsyncRedisLimiter, RedisLimiter  # noqa: E402

CALLERS = 8


class Work:
    def __init__(self, work: dict[str, Any], records: TextIO) -> None:
        self._work, self._records = work, records
        self._random = random.Random(work["seed"])
        self._lock = threading.Lock()
        self._made = 0
        self.is_over = False

    def next(self) -> tuple[int, str, list[str], int, int]:
        """Returns a random check: its counter, key, limits and cost, and the time."""
        with self._lock:
            counter = self._random.randrange(self._work["keys"])
            cost = self._random.choice([1, 1, 1, 2, 3])
        limits = self._work["limits"]
        limit = [limits[counter % len(limits)], self._work["journal"]]
        return counter, f"client-{counter}", limit, cost, time.time_ns() // 1000

    def note(self, counter: int, cost: int, sent_us: int, decision: Any) -> None:
        received_us = time.time_ns() // 1000
        status, journal = decision.limits
        record = (sent_us, received_us, counter, cost, int(decision.allowed), status.remaining)
        record += (status.retry_after_us, journal.remaining, decision.source)
        with self._lock:
            self._records.write(" ".join(map(str, record)) + "\n")
            self._made += 1
            if self._made == self._work["checks"]:
                print("made", flush=True)

    def begin(self) -> None:
        """Waits for the start, and then for the end in another thread."""
        print("ready", flush=True)
        sys.stdin.readline()
        threading.Thread(target=self._wait_for_end, daemon=True).start()

    def _wait_for_end(self) -> None:
        sys.stdin.read()
        self.is_over = True


def in_threads(work: Work, client: Tidegate | RedisLimiter) -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            while not work.is_over and not errors:
                counter, key, limit, cost, sent_us = work.next()
                work.note(counter, cost, sent_us, client.check(key, limit, cost))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    if errors:
        raise errors[0]


async def in_tasks(work: Work, client: AsyncTidegate | AsyncRedisLimiter) -> None:
    async def call() -> None:
        while not work.is_over:
            counter, key, limit, cost, sent_us = work.next()
            work.note(counter, cost, sent_us, await client.check(key, limit, cost))

    await asyncio.gather(*(call() for _ in range(CALLERS)))
    await client.close()


def main() -> None:
    description = json.loads(sys.argv[1])
    with Path(description["records"]).open("w") as records:
        run(description, Work(description, records))


def run(description: dict[str, Any], work: Work) -> None:
    client, service, port = description["client"], description["service"], description["redis_port"]
    options: dict[str, Any] = {"deadline": 60, "on_error": "raise"}
    work.begin()
    if client == "service":
        in_threads(work, Tidegate(service, **options))
    elif client == "service, asyncio":
        asyncio.run(in_tasks(work, AsyncTidegate(service, **options)))
    elif client == "redis-py":
        in_threads(work, RedisLimiter(redis.Redis(port=port), **options))
    elif client == "redis-py, asyncio":
        asyncio.run(in_tasks(work, AsyncRedisLimiter(redis.asyncio.Redis(port=port), **options)))
    else:
        raise SystemExit(f"unknown client: {client}")


main()
