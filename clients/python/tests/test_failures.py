"""Servers that are killed, stopped, slow or unreachable: `on_error` answers within bounds."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import (
    DECISION,
    GENEROUS,
    Caller,
    FakeService,
    RedisServer,
    TidegateService,
    encode_answer,
    free_port,
    wait_until,
)

from tidegate import AsyncTidegate, Tidegate, TidegateError, Unavailable
from tidegate.failure import FailurePolicy
from tidegate.redis import AsyncRedisLimiter, RedisLimiter

DEADLINE = 0.2
#: Many times the deadline: a busy machine does not fail the test, a client that hangs does.
BOUND = 25 * DEADLINE


def service_client(kind: str, url: str, **options: Any) -> Caller:
    options = {"deadline": DEADLINE, **options}
    return Caller((Tidegate if kind == "blocking" else AsyncTidegate)(url, **options))


def redis_limiter(kind: str, server: RedisServer, **options: Any) -> Caller:
    options = {"deadline": DEADLINE, **options}
    if kind == "blocking":
        return Caller(RedisLimiter(server.client(), **options))
    return Caller(AsyncRedisLimiter(server.async_client(), **options))


def bounded(call: Callable[[], Any]) -> Any:
    """Returns the result of a call, which must not take much longer than the deadline."""
    started = time.monotonic()
    try:
        return call()
    finally:
        assert time.monotonic() - started < BOUND


def check_all_policies(client: Callable[[str], Caller], caplog: pytest.LogCaptureFixture) -> None:
    """Checks that each `on_error` gives its answer while the server does not answer."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tidegate"):
        allowed = bounded(lambda: client("allow").check("k", "10/min"))
        denied = bounded(lambda: client("deny").check("k", "10/min"))
    assert (allowed.allowed, allowed.source, allowed.status) == (True, "none", 200)
    assert isinstance(allowed.error, Unavailable)
    assert allowed.headers == {}, "no quota is claimed"
    assert (denied.allowed, denied.status, denied.retry_after) == (False, 503, 1.0)
    assert denied.refusal().headers["retry-after"] == "1"
    with pytest.raises(Unavailable):
        bounded(lambda: client("raise").check("k", "10/min"))
    effects = [record.getMessage() for record in caplog.records]
    assert len(effects) == 2
    assert "the request is allowed" in effects[0]
    assert "the request is denied" in effects[1]


def heals(client: Caller) -> None:
    wait_until(lambda: client.check("k", "1000000/min").error is None, "the client heals by itself")


def test_killed_service(
    kind: str, own_service: TidegateService, caplog: pytest.LogCaptureFixture
) -> None:
    client = service_client(kind, own_service.url)
    heals(client)
    own_service.kill()
    assert bounded(lambda: client.check("k", "10/min")).error is not None
    check_all_policies(lambda on: service_client(kind, own_service.url, on_error=on), caplog)
    own_service.start()
    heals(client)


def test_stopped_service(
    kind: str, own_service: TidegateService, caplog: pytest.LogCaptureFixture
) -> None:
    client = service_client(kind, own_service.url)
    heals(client)
    own_service.pause()
    assert bounded(lambda: client.check("k", "10/min")).error is not None, "on an open connection"
    check_all_policies(lambda on: service_client(kind, own_service.url, on_error=on), caplog)
    own_service.resume()
    heals(client)


def test_slow_service(kind: str, fake: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    is_slow = True

    def drip(connection: socket.socket, answer: bytes) -> None:
        # Each byte comes soon after the one before, so that a timeout per read never expires.
        for at in range(len(answer)):
            connection.sendall(answer[at : at + 1])
            time.sleep(DEADLINE / 10 if is_slow else 0)

    fake.send = drip
    client = service_client(kind, fake.url)
    assert bounded(lambda: client.check("k", "10/min")).error is not None
    check_all_policies(lambda on: service_client(kind, fake.url, on_error=on), caplog)
    is_slow = False
    heals(client)


def test_answer_after_the_deadline_is_not_that_of_the_next_call(
    kind: str, fake: FakeService
) -> None:
    def late(connection: socket.socket, _: bytes) -> None:
        time.sleep(2 * DEADLINE)
        connection.sendall(encode_answer(429, {}, {**DECISION, "allowed": False}))

    in_time = fake.send
    client = service_client(kind, fake.url)
    fake.send = late
    assert client.check("k", "10/min").error is not None
    fake.send = in_time
    time.sleep(2 * DEADLINE)
    heals(client)
    assert client.check("k", "10/min").allowed


def test_unreachable_service(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    closed = f"http://127.0.0.1:{free_port()}"
    # Packets to this network are dropped or rejected (RFC 5737).
    names = ("http://does-not-exist.invalid", f"http://{'a' * 64}.invalid")
    for url in (closed, "http://192.0.2.1:9", *names):
        check_all_policies(lambda on, url=url: service_client(kind, url, on_error=on), caplog)


def test_refund_of_an_unreachable_service_fails_without_an_exception(kind: str) -> None:
    client = service_client(kind, f"http://127.0.0.1:{free_port()}")
    assert bounded(lambda: client.refund("receipt")) is False
    client = service_client(kind, f"http://127.0.0.1:{free_port()}", on_error="raise")
    with pytest.raises(Unavailable):
        client.refund("receipt")


def test_wait_has_the_deadline_after_its_wait(kind: str, fake: FakeService) -> None:
    def late(connection: socket.socket, answer: bytes) -> None:
        time.sleep(3 * DEADLINE)
        connection.sendall(answer)

    fake.send = late
    client = service_client(kind, fake.url, on_error="raise")
    assert client.wait("k", "10/min", max_wait=GENEROUS).allowed
    with pytest.raises(Unavailable, match="within 200 ms"):
        client.wait("k", "10/min", max_wait=0)


def test_killed_redis(kind: str, own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    client = redis_limiter(kind, own_redis)
    heals(client)
    own_redis.kill()
    assert bounded(lambda: client.check("k", "10/min")).error is not None
    check_all_policies(lambda on: redis_limiter(kind, own_redis, on_error=on), caplog)
    with pytest.raises(TidegateError):
        bounded(lambda: client.reset("k", "10/min"))
    own_redis.start()
    heals(client)


def test_stopped_redis(kind: str, own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    client = redis_limiter(kind, own_redis)
    heals(client)
    decision = client.check("refund", "10/min")
    own_redis.pause()
    assert bounded(lambda: client.check("k", "10/min")).error is not None, "on an open connection"
    assert bounded(lambda: client.refund(decision)) is False
    check_all_policies(lambda on: redis_limiter(kind, own_redis, on_error=on), caplog)
    own_redis.resume()
    heals(client)
    # A late reply on a connection must not become the reply of another call.
    quotas = [client.check(f"other:{quota}", f"{quota}/h") for quota in range(1, 50)]
    assert [decision.limit for decision in quotas] == list(range(1, 50))


def test_unavailable_server_is_logged_once_a_second(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = service_client(kind, f"http://127.0.0.1:{free_port()}")
    with caplog.at_level(logging.WARNING, "tidegate"):
        started = time.monotonic()
        for _ in range(50):
            client.check("a-secret-key", "10/min")
        seconds = time.monotonic() - started
    assert 1 <= len(caplog.records) <= seconds + 1
    assert "a-secret-key" not in caplog.text
    assert "cannot reach http://127.0.0.1:" in caplog.text


def test_report_says_how_many_errors_were_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    policy = FailurePolicy("allow")
    with caplog.at_level(logging.WARNING, "tidegate"):
        for _ in range(5):
            policy.decide(Unavailable("down"))
        now = 1.0
        policy.decide(Unavailable("down"))
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].endswith("the request is allowed: down")
    assert messages[1].endswith("down (4 more errors since the last report)")


def test_cancelled_call_does_not_leave_its_answer_to_the_next(fake: FakeService) -> None:
    async def run() -> None:
        async with AsyncTidegate(fake.url, deadline=GENEROUS, on_error="raise") as client:
            await client.check("k", "10/min")
            in_time = fake.send

            def late(connection: socket.socket, _: bytes) -> None:
                time.sleep(DEADLINE)
                connection.sendall(encode_answer(429, {}, {**DECISION, "allowed": False}))

            fake.send = late
            task = asyncio.ensure_future(client.check("k", "10/min"))
            await asyncio.sleep(DEADLINE / 4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            fake.send = in_time
            assert (await client.check("k", "10/min")).allowed

    asyncio.run(run())
