"""The limiters on a Redis client, with a real server."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from conftest import GENEROUS, Caller, RedisServer, wait_until

from tidegate import (
    Decision,
    ForeignValue,
    InvalidInput,
    PermissionDenied,
    ProtocolError,
    TidegateError,
    Unavailable,
    script,
)
from tidegate.redis import AsyncRedisLimiter, RedisLimiter


def limiter_of(kind: str, server: RedisServer, client: dict[str, Any], **options: Any) -> Caller:
    """Returns a limiter that raises errors and has a generous deadline."""
    options = {"deadline": GENEROUS, "on_error": "raise", **options}
    if kind == "blocking":
        return Caller(RedisLimiter(server.client(**client), **options))
    return Caller(AsyncRedisLimiter(server.async_client(**client), **options))


@pytest.fixture(params=[{}, {"decode_responses": True}, {"protocol": 2}], ids=["", "str", "resp2"])
def limiter(kind: str, redis_server: RedisServer, request: pytest.FixtureRequest) -> Caller:
    return limiter_of(kind, redis_server, request.param)


def test_quota_is_enforced(limiter: Caller, key: str) -> None:
    decisions = [limiter.check(key, "2/min") for _ in range(3)]
    assert [decision.allowed for decision in decisions] == [True, True, False]
    assert [decision.remaining for decision in decisions] == [1, 0, 0]
    denied = decisions[2]
    assert 0 < denied.retry_after <= 60
    assert 0 < denied.reset_after <= 60
    assert (denied.limit, denied.status, denied.source) == (2, 429, "store")


def test_several_limits_are_decided_together(limiter: Caller, key: str) -> None:
    assert limiter.check(key, ["1/min", "5/h token-bucket burst=3"]).allowed
    denied = limiter.check(key, ["1/min", "5/h token-bucket burst=3"])
    assert [status.allowed for status in denied.limits] == [False, True]
    assert limiter.peek(key, "5/h token-bucket burst=3").remaining == 2, "a denial charges nothing"
    assert not limiter.check_all([(key, "1/min"), (key + "x", "9/min", 4)]).allowed
    assert limiter.peek(key + "x", "9/min").remaining == 9


def test_refund_gives_units_back_once(limiter: Caller, key: str) -> None:
    limits = ["5/min", "9/h token-bucket", "9/h sliding-counter"]
    decision = limiter.check(key, limits, 3)
    assert limiter.refund(decision) is True
    assert limiter.refund(decision) is False
    assert [status.remaining for status in limiter.peek(key, limits).limits] == [5, 9, 9]
    limiter.check(key, "5/min", 5)
    denied = limiter.check(key, "5/min")
    assert limiter.refund(denied) is False, "a denial charged nothing"
    assert limiter.refund(limiter.peek(key, "5/min")) is False
    assert limiter.peek(key, "5/min").remaining == 0


def test_concurrent_refunds_give_units_back_once(redis_server: RedisServer, key: str) -> None:
    limiter = RedisLimiter(redis_server.client(), deadline=GENEROUS, on_error="raise")
    limiter.check(key, "10/min", 4)
    decision = limiter.check(key, "10/min", 3)
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(limiter.refund(decision))) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 19 + [True]
    assert limiter.peek(key, "10/min").remaining == 6


def test_reset_deletes_the_counters(limiter: Caller, key: str) -> None:
    limiter.check(key, ["1/min", "1/h"])
    assert limiter.reset(key, ["1/min", "1/h", "1/day"]) == 2
    assert limiter.check(key, ["1/min", "1/h"]).allowed


def test_ban_refuses_checks_but_not_peeks(limiter: Caller, key: str) -> None:
    assert limiter.ban_of(key) is None
    limiter.ban(key, 60)
    assert 0 < limiter.ban_of(key) <= 60
    banned = limiter.check(key, "1/min")
    assert (banned.allowed, banned.banned, banned.status) == (False, True, 403)
    assert 0 < banned.retry_after <= 60
    assert banned.headers == {}
    assert limiter.peek(key, "1/min").allowed
    limiter.ban(key)
    assert limiter.ban_of(key) == float("inf")
    assert limiter.check(key, "1/min").retry_after is None
    assert limiter.unban(key) is True
    assert limiter.unban(key) is False
    assert limiter.check(key, "1/min").allowed, "a ban charges nothing"


@pytest.mark.parametrize("seconds", [0, -1, 1e12, "1", True, float("nan")])
def test_malformed_ban_is_invalid_input(limiter: Caller, key: str, seconds: Any) -> None:
    with pytest.raises(InvalidInput):
        limiter.ban(key, seconds)


def test_bytes_and_text_are_the_same_key(limiter: Caller, key: str) -> None:
    limiter.check(key, "2/min")
    assert limiter.check(key.encode(), "2/min").remaining == 0


@pytest.mark.parametrize("key", ["a b", "{x}", "}{", "nul\0", "ü", "", "%", "x" * 65536, b"\xff\0"])
def test_any_key_is_accepted(kind: str, redis_server: RedisServer, key: Any) -> None:
    limiter = limiter_of(kind, redis_server, {})
    limiter.reset(key, "2/min")
    assert limiter.check(key, "2/min").remaining == 1
    assert limiter.check(key, "2/min").remaining == 0


def test_script_is_sent_once_and_again_after_a_flush(kind: str, own_redis: RedisServer) -> None:
    limiter = limiter_of(kind, own_redis, {})
    admin = own_redis.client()
    for _ in range(2):
        for _ in range(3):
            assert limiter.check("k", "100/min").allowed
        stats = admin.info("commandstats")
        assert stats["cmdstat_eval"]["calls"] == 1
        admin.script_flush()
        admin.config_resetstat()


def test_counters_are_those_of_the_documented_keys(
    kind: str, redis_server: RedisServer, key: str
) -> None:
    limiter = limiter_of(kind, redis_server, {}, prefix="shop:eu")
    subject = hashlib.sha256(key.encode()).hexdigest()
    limiter.check(subject, ["3/min", "3/h token-bucket"], 2)
    found = sorted(redis_server.client().scan_iter(match=f"*{subject}*"))
    start = f"shop:eu:tg2:{{{subject}}}:"
    names = [f"{start}sliding:60000000", f"{start}token-bucket:3600000000"]
    assert found == [name.encode() for name in names]


def test_clients_own_connections_are_not_changed(redis_server: RedisServer) -> None:
    client = redis_server.client(socket_timeout=7, client_name="mine", db=3)
    limiter = RedisLimiter(client, deadline=GENEROUS, on_error="raise")
    limiter.check("k", "10/min")
    assert client.connection_pool.connection_kwargs["socket_timeout"] == 7
    own = [each for each in redis_server.client().client_list() if each["name"] == "mine"]
    assert [each["db"] for each in own] == ["3"], "the limiter uses the settings of the client"
    limiter.close()
    admin = redis_server.client()
    wait_until(
        lambda: not [each for each in admin.client_list() if each["name"] == "mine"], "closed"
    )


def test_without_a_deadline_the_client_itself_is_used(redis_server: RedisServer, key: str) -> None:
    client = redis_server.client(client_name=f"itself-{abs(hash(key))}")
    RedisLimiter(client, deadline=None, on_error="raise").check(key, "10/min")
    name = client.client_getname()
    names = [each["name"] for each in redis_server.client().client_list()]
    assert names.count(name if isinstance(name, str) else name.decode()) == 1


def test_foreign_value_is_a_typed_error(kind: str, redis_server: RedisServer, key: str) -> None:
    limiter = limiter_of(kind, redis_server, {})
    subject = hashlib.sha256(key.encode()).hexdigest()
    admin = redis_server.client()
    admin.hset(f"tidegate:tg2:{{{subject}}}:sliding:60000000", "a", "b")
    admin.set(f"tidegate:tg2:{{{subject}}}:token-bucket:60000000", "not a bucket")
    for limit in ("10/min", "10/min token-bucket", ["10/min", "10/h"]):
        with pytest.raises(ForeignValue) as raised:
            limiter.check(subject, limit)
        assert subject not in str(raised.value), "an error contains no key"
    with pytest.raises(TidegateError):
        limiter_of(kind, redis_server, {}, prefix="p").check(subject, "bad")


def test_user_without_permission_is_a_typed_error(kind: str, own_redis: RedisServer) -> None:
    admin = own_redis.client()
    users = {"noscript": "+@all -@scripting", "noread": "+@all -llen -lindex -rpush -lrange"}
    for name, rules in users.items():
        admin.execute_command("ACL", "SETUSER", name, "on", ">secret", "~*", *rules.split())
    admin.execute_command("ACL", "SETUSER", "nokeys", "on", ">secret", "~other:*", "+@all")
    for name in (*users, "nokeys"):
        limiter = limiter_of(kind, own_redis, {"username": name, "password": "secret"})
        with pytest.raises(PermissionDenied):
            limiter.check("k", "10/min")
    for wrong in ({"username": "noscript", "password": "wrong"}, {"username": "nobody"}):
        limiter = limiter_of(kind, own_redis, {"password": "x", **wrong})
        with pytest.raises((PermissionDenied, Unavailable)):
            limiter.check("k", "10/min")


@pytest.mark.parametrize(
    "source",
    [
        "return 'OK'",
        "return {1}",
        "return {1, 1, 1}",
        "return {1, 2, 1, 1, 1, 1, 1}",
        "return {'a', 1, 1, 1, 1, 1, 1}",
        "return {1, 1, 7, 1, 1, 1, 1}",
        "return {1, 1, 1, -1, 1, 1, 1}",
        "return {-1, 1, 1, 1, 1, 1, 1}",
        "return redis.error_reply('TIDEGATE_ARGUMENT a limit line is …')",
        "return redis.error_reply('TIDEGATE_INTERNAL line 1')",
    ],
)
def test_script_of_another_version_is_a_typed_error(
    kind: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(script, "SOURCE", source)
    monkeypatch.setattr(script, "SHA1", hashlib.sha1(source.encode()).hexdigest())
    with pytest.raises(ProtocolError):
        limiter_of(kind, redis_server, {}).check("k", "10/min")


def test_server_that_cannot_write_is_unavailable(kind: str, own_redis: RedisServer) -> None:
    limiter = limiter_of(kind, own_redis, {})
    limiter.check("k", "10/min")
    own_redis.client().config_set("maxmemory", "1")
    with pytest.raises(Unavailable, match=r"OOM|maxmemory"):
        limiter.check("k", "10/min")


_CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("check", ("k", "10/fortnight")),
    ("check", ("k", None)),
    ("check", ("k", [])),
    ("check", ("k", ["1/s", "2/s"])),
    ("check", ("k", ["1/s"] * 33)),
    ("check", ("k", "10/min", -1)),
    ("check", ("k", "10/min", 2**32)),
    ("check", ("k", "10/min", 2**64)),
    ("check", ("k", "10/min", 0.5)),
    ("check", ("k" * 65537, "10/min")),
    ("check", (None, "10/min")),
    ("check", ("\ud800", "10/min")),
    ("check_all", ([("k", "1/s"), ("k", "2/s", 3)],)),
    ("peek", ("k", "x")),
    ("reset", ("k", "x")),
    ("ban", (7,)),
    ("refund", ("receipt",)),
    ("refund", (Decision(True, receipt="of the service"),)),
]


@pytest.mark.parametrize(("method", "arguments"), _CALLS, ids=range(len(_CALLS)))
def test_malformed_argument_is_invalid_input(
    kind: str, redis_server: RedisServer, method: str, arguments: tuple[Any, ...]
) -> None:
    limiter = limiter_of(kind, redis_server, {}, on_error="allow")
    with pytest.raises(InvalidInput):
        getattr(limiter, method)(*arguments)


@pytest.mark.parametrize("cost", [2**32 - 1, 11])
def test_cost_above_the_quota_is_denied_for_ever(limiter: Caller, key: str, cost: int) -> None:
    denied = limiter.check(key, "10/min", cost)
    assert (denied.allowed, denied.retry_after) == (False, None)


@pytest.mark.parametrize(
    "options", [{"prefix": "a b"}, {"prefix": "{"}, {"prefix": ""}, {"prefix": "x" * 65}]
)
def test_malformed_prefix_is_invalid_input(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        RedisLimiter(redis.Redis(), **options)
    with pytest.raises(InvalidInput):
        AsyncRedisLimiter(redis.asyncio.Redis(), **options)


def test_client_of_the_wrong_kind_is_invalid_input() -> None:
    for client in (None, object(), redis.asyncio.Redis()):
        with pytest.raises(InvalidInput, match=r"redis\.Redis"):
            RedisLimiter(client)
    for client in (None, object(), redis.Redis()):
        with pytest.raises(InvalidInput, match=r"redis\.asyncio"):
            AsyncRedisLimiter(client)


def test_valkey_has_the_same_verdicts(tmp_path: Path, kind: str) -> None:
    server = RedisServer(tmp_path / "valkey", name="valkey-server")
    server.start()
    try:
        limiter = limiter_of(kind, server, {})
        assert [limiter.check("k", "2/min").allowed for _ in range(3)] == [True, True, False]
    finally:
        server.kill()
