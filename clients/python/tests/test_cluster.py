"""The limiters on clients of a Redis Cluster, with three masters."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import redis
import redis.asyncio
from conftest import GENEROUS, Caller, Cluster, wait_until
from traces import VECTORS, replay

from tidegate import InvalidInput, Unavailable
from tidegate.keys import subject_start
from tidegate.redis import AsyncRedisLimiter, RedisLimiter

#: Enough that each master has some of them.
SUBJECTS = 40


def limiter_of(kind: str, cluster: Cluster, **options: Any) -> Caller:
    """Returns a limiter that raises errors, and an asyncio limiter with a generous deadline."""
    options = {"on_error": "raise", **options}
    port = cluster.ports[0]
    if kind == "blocking":
        return Caller(RedisLimiter(redis.RedisCluster(host="127.0.0.1", port=port), **options))
    client = redis.asyncio.RedisCluster(host="127.0.0.1", port=port)
    return Caller(AsyncRedisLimiter(client, **{"deadline": GENEROUS, **options}))


def replay_all(kind: str, cluster: Cluster, prefix: str) -> None:
    limiter = limiter_of(kind, cluster, prefix=prefix)
    for number, trace in enumerate(VECTORS["traces"]):
        replay(trace, limiter, f":{number}", cluster=True)
    for master in cluster.masters():
        assert next(master.scan_iter(match=f"{prefix}:*", count=1000), None), "a master has no keys"


def test_traces_have_the_same_verdicts(kind: str, redis_cluster: Cluster) -> None:
    replay_all(kind, redis_cluster, f"traces-{kind}")


def test_traces_have_the_same_verdicts_on_valkey(valkey_cluster: Cluster) -> None:
    replay_all("blocking", valkey_cluster, "traces")


def test_all_methods_work_for_keys_of_all_masters(kind: str, redis_cluster: Cluster) -> None:
    limiter = limiter_of(kind, redis_cluster, prefix=f"methods-{kind}")
    limits = ["2/min", "9/h token-bucket"]
    for number in range(SUBJECTS):
        key = f"a b{{c}}{number}"
        decisions = [limiter.check(key, limits) for _ in range(3)]
        assert [decision.allowed for decision in decisions] == [True, True, False]
        assert limiter.refund(decisions[0])
        assert [status.remaining for status in limiter.peek(key, limits).limits] == [1, 8]
        assert limiter.reset(key, limits) == 2
        limiter.ban(key, 60)
        assert limiter.check(key, limits).banned
        assert 0 < limiter.ban_of(key) <= 60
        assert limiter.unban(key)
        assert limiter.peek(key, limits).remaining == 2


@pytest.mark.parametrize("on_error", ["allow", "raise"])
def test_check_of_several_keys_is_invalid_input(
    kind: str, redis_cluster: Cluster, on_error: str
) -> None:
    limiter = limiter_of(kind, redis_cluster, on_error=on_error, prefix="several")
    checks = [(f"several:{number}", "9/min") for number in range(10)]
    with pytest.raises(InvalidInput, match="all limits of a check must have the same key"):
        limiter.check_all(checks)
    for key, limit in checks:
        assert limiter.peek(key, limit).remaining == 9, "nothing is charged"


def test_script_is_sent_once_to_each_master(kind: str, redis_cluster: Cluster) -> None:
    limiter = limiter_of(kind, redis_cluster, prefix=f"sent-{kind}")
    for master in redis_cluster.masters():
        master.script_flush()
        master.config_resetstat()
    for expected in (8, 7):
        for number in range(SUBJECTS):
            assert limiter.check(f"s{number}", "9/h").remaining == expected
    for master in redis_cluster.masters():
        assert master.info("commandstats")["cmdstat_eval"]["calls"] == 1


def test_counters_follow_a_slot_that_moves(
    kind: str, redis_cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    subject = f"moving-{kind}"
    limiter = limiter_of(kind, redis_cluster)
    assert limiter.check(subject, "9/h").remaining == 8
    hash_tag = f"{{{subject}}}"
    redis_cluster.run("begin-move", hash_tag)
    # The node has the counter, but not the key of the ban: it rejects the call with TRYAGAIN.
    with pytest.raises(Unavailable):
        limiter.check(subject, "9/h")
    with caplog.at_level(logging.WARNING):
        passed = limiter_of(kind, redis_cluster, on_error="allow").check(subject, "9/h")
    assert (passed.allowed, passed.source) == (True, "none")
    assert subject not in caplog.text
    redis_cluster.run("end-move", hash_tag)
    # The masters learn of the new owner from each other.
    wait_until(lambda: limiter.peek(subject, "9/h").source == "store", "a decision")
    assert limiter.check(subject, "9/h").remaining == 7, "calls without a verdict charge nothing"


def test_slot_without_a_master_is_unavailable(kind: str, redis_cluster: Cluster) -> None:
    subject = f"dropped-{kind}"
    limiter = limiter_of(kind, redis_cluster)
    assert limiter.check(subject, "9/h").allowed
    denying = limiter_of(kind, redis_cluster, on_error="deny")
    assert denying.peek(subject, "9/h").allowed
    redis_cluster.run("drop-slot", f"{{{subject}}}")
    with pytest.raises(Unavailable):
        limiter.check(subject, "9/h")
    denied = denying.check(subject, "9/h")
    assert (denied.allowed, denied.status) == (False, 503)
    assert limiter.check(f"other-{kind}", "9/h").allowed
    redis_cluster.run("restore-slot", f"{{{subject}}}")
    assert limiter.check(subject, "9/h").remaining == 7


def test_call_with_a_lost_reply_is_not_repeated(
    kind: str, redis_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = limiter_of(kind, redis_cluster, prefix=f"lost-{kind}")
    assert limiter.check("k", "9/h").remaining == 8
    if kind == "blocking":
        node = redis.connection.AbstractConnection
        real = node.read_response

        def lose(connection: Any, *arguments: Any, **options: Any) -> Any:
            real(connection, *arguments, **options)
            monkeypatch.undo()
            raise redis.exceptions.ConnectionError("reset by the test")

    else:
        node = redis.asyncio.connection.AbstractConnection
        real = node.read_response

        async def lose(connection: Any, *arguments: Any, **options: Any) -> Any:
            await real(connection, *arguments, **options)
            monkeypatch.undo()
            raise redis.exceptions.ConnectionError("reset by the test")

    monkeypatch.setattr(node, "read_response", lose)
    with pytest.raises(Unavailable, match="reset by the test"):
        limiter.check("k", "9/h")
    assert limiter.peek("k", "9/h").remaining == 7, "charged once"


def test_layout_is_read_although_it_takes_longer_than_the_deadline(
    redis_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = redis.asyncio.cluster.NodesManager.initialize

    async def read_slowly(manager: Any, *arguments: Any, **options: Any) -> None:
        await asyncio.sleep(0.5)
        await real(manager, *arguments, **options)

    monkeypatch.setattr(redis.asyncio.cluster.NodesManager, "initialize", read_slowly)
    limiter = limiter_of("asyncio", redis_cluster, deadline=0.3, on_error="allow")
    assert limiter.check("k", "9/h").source == "none"
    wait_until(lambda: limiter.peek("k", "9/h").source == "store", "a decision")


def test_layout_is_read_again_after_a_call_that_took_too_long(
    redis_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = limiter_of("asyncio", redis_cluster, deadline=0.3, on_error="allow")
    wait_until(lambda: limiter.peek("k", "9/h").source == "store", "a decision")
    readings = []
    real = redis.asyncio.cluster.NodesManager.initialize

    async def count(manager: Any, *arguments: Any, **options: Any) -> None:
        readings.append(manager)
        await real(manager, *arguments, **options)

    async def hang(*arguments: Any, **options: Any) -> None:
        await asyncio.sleep(GENEROUS)

    monkeypatch.setattr(redis.asyncio.cluster.NodesManager, "initialize", count)
    with monkeypatch.context() as hanging:
        hanging.setattr(redis.asyncio.cluster.ClusterNode, "execute_command", hang)
        assert limiter.check("k", "9/h").source == "none"
    wait_until(lambda: limiter.peek("k", "9/h").source == "store" and readings, "a decision")


def test_error_of_a_client_of_one_node_names_cluster_clients(redis_cluster: Cluster) -> None:
    errors = []
    for master in redis_cluster.masters():
        try:
            RedisLimiter(master, deadline=GENEROUS, on_error="raise").check("k", "9/h")
        except Unavailable as error:
            errors.append(str(error))
    assert len(errors) == 2, "one of three masters has the key"
    for error in errors:
        assert "use a cluster client" in error
        assert subject_start("tidegate", b"k") not in error


def test_deadline_of_a_blocking_cluster_client_is_invalid_input(redis_cluster: Cluster) -> None:
    client = redis.RedisCluster(host="127.0.0.1", port=redis_cluster.ports[0])
    with pytest.raises(InvalidInput, match="deadline=None"):
        RedisLimiter(client, deadline=1)
