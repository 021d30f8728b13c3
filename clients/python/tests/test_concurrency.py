"""200 parallel calls, connection reuse, and leaks. TIDEGATE_LONG=1 runs 100,000 calls."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import GENEROUS, FakeService, RedisServer, TidegateService

from tidegate import AsyncTidegate, Tidegate
from tidegate.redis import AsyncRedisLimiter, RedisLimiter

PARALLEL = 200
CALLS = 100_000 if os.environ.get("TIDEGATE_LONG") else 5_000
OPTIONS: dict[str, Any] = {"deadline": 6 * GENEROUS, "on_error": "raise"}


def in_threads(call: Callable[[int], Any], threads: int, calls: int) -> list[Any]:
    """Returns the results of `calls` calls of each of `threads` threads, which start together."""
    results: list[Any] = []
    barrier = threading.Barrier(threads)

    def work(number: int) -> None:
        barrier.wait()
        for _ in range(calls):
            try:
                results.append(call(number))
            except BaseException as error:
                results.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == threads * calls
    return results


async def in_tasks(call: Callable[[int], Any], tasks: int, calls: int) -> list[Any]:
    async def work(number: int) -> list[Any]:
        return [await call(number) for _ in range(calls)]

    lists = await asyncio.gather(*(work(number) for number in range(tasks)))
    return [result for results in lists for result in results]


def test_200_threads_reuse_their_connections(fake: FakeService) -> None:
    with Tidegate(fake.url, max_idle_connections=PARALLEL, **OPTIONS) as client:
        results = in_threads(lambda _: client.check("k", "10/min").allowed, PARALLEL, 5)
    assert results == [True] * PARALLEL * 5
    assert len(fake.requests) == PARALLEL * 5
    assert fake.connections <= PARALLEL


def test_200_tasks_reuse_their_connections(fake: FakeService) -> None:
    async def run() -> None:
        async with AsyncTidegate(fake.url, max_idle_connections=PARALLEL, **OPTIONS) as client:
            decisions = await in_tasks(lambda _: client.check("k", "10/min"), PARALLEL, 5)
            assert all(decision.allowed for decision in decisions)

    asyncio.run(run())
    assert len(fake.requests) == PARALLEL * 5
    assert fake.connections <= PARALLEL


def test_sequential_calls_use_one_connection(fake: FakeService) -> None:
    with Tidegate(fake.url, **OPTIONS) as client:
        for _ in range(50):
            client.check("k", "10/min")
    assert (len(fake.requests), fake.connections) == (50, 1)


def test_idle_connections_are_bounded(fake: FakeService) -> None:
    with Tidegate(fake.url, max_idle_connections=3, **OPTIONS) as client:
        in_threads(lambda _: client.check("k", "10/min"), 20, 1)
        assert len(client._idle) <= 3


def test_quota_is_exact_with_200_threads_on_the_service(service: TidegateService, key: str) -> None:
    with Tidegate(service.url, **OPTIONS) as client:
        results = in_threads(lambda _: client.check(key, "300/h").allowed, PARALLEL, 2)
    assert (results.count(True), results.count(False)) == (300, 100)


def test_quota_is_exact_with_200_threads_on_redis(redis_server: RedisServer, key: str) -> None:
    limiter = RedisLimiter(redis_server.client(), **OPTIONS)
    results = in_threads(lambda _: limiter.check(key, ["300/h", "900/day"]).allowed, PARALLEL, 2)
    assert (results.count(True), results.count(False)) == (300, 100)
    assert limiter.peek(key, "900/day").remaining == 600, "a denial charges nothing"
    limiter.close()


def test_quota_is_exact_with_200_tasks_on_redis(redis_server: RedisServer, key: str) -> None:
    async def run() -> None:
        limiter = AsyncRedisLimiter(redis_server.async_client(), **OPTIONS)
        decisions = await in_tasks(lambda _: limiter.check(key, "300/h"), PARALLEL, 2)
        assert sum(decision.allowed for decision in decisions) == 300
        await limiter.close()

    asyncio.run(run())


@contextmanager
def no_leak() -> Iterator[None]:
    """Fails if file descriptors or megabytes of memory are left behind."""
    gc.collect()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 32 * 1024


def test_many_calls_leak_nothing_on_the_service(service: TidegateService, key: str) -> None:
    with Tidegate(service.url, **OPTIONS) as client:
        client.check(key, "10/min")
        with no_leak():
            for number in range(CALLS // 2):
                client.check(f"{key}{number % 1000}", "1000000/min")

    async def run() -> None:
        async with AsyncTidegate(service.url, **OPTIONS) as client:
            await client.check(key, "10/min")
            with no_leak():
                for number in range(CALLS // 2):
                    await client.check(f"{key}{number % 1000}", "1000000/min")

    asyncio.run(run())


def test_many_calls_leak_nothing_on_redis(redis_server: RedisServer, key: str) -> None:
    limiter = RedisLimiter(redis_server.client(), **OPTIONS)
    limiter.check(key, "10/min")
    with no_leak():
        for number in range(CALLS // 2):
            decision = limiter.check(f"{key}{number % 1000}", "1000000/min")
            if number % 10 == 0:
                limiter.refund(decision)
    limiter.close()

    async def run() -> None:
        limiter = AsyncRedisLimiter(redis_server.async_client(), **OPTIONS)
        await limiter.check(key, "10/min")
        with no_leak():
            for number in range(CALLS // 2):
                await limiter.check(f"{key}{number % 1000}", "1000000/min")
        await limiter.close()

    asyncio.run(run())


def test_failed_calls_leak_nothing(own_redis: RedisServer) -> None:
    limiter = RedisLimiter(own_redis.client(), deadline=0.05)
    service = Tidegate(f"http://127.0.0.1:{own_redis.port}", deadline=0.05)
    own_redis.kill()
    with no_leak():
        for _ in range(CALLS // 10):
            assert limiter.check("k", "10/min").error is not None
            assert service.check("k", "10/min").error is not None
    limiter.close()
