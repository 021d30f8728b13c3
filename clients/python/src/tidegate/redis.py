"""The limiter on your own Redis client, without the service: the script runs in Redis.

    import redis
    from tidegate.redis import RedisLimiter

    limiter = RedisLimiter(redis.Redis())
    decision = limiter.check("user:42", ["10/min", "1000/day"])

Requires redis-py (`pip install 'redis>=5.2'`) and Redis 7.0 or Valkey 7.2, or a later version.

**The deadline.** redis-py waits 5 seconds for a reply by default and retries failed commands after
a pause. Both are wrong for a decision that a request waits for: a retried check is charged twice.
So a limiter opens connections of its own, with the settings of your client (address, credentials,
TLS, database) except that the deadline is their timeout and that nothing is retried. Your client
and its connections are not changed. With `deadline=None`, or for a Cluster or Sentinel client, the
blocking limiter runs its commands on your client, whose own timeouts then apply. The asyncio
limiter applies its deadline to every kind of client.

**Redis Cluster.** A call is sent to the master of its keys. If its reply is lost, it is not
retried. redis-py follows redirections, because a node that redirects a call has not executed it.
The asyncio limiter reads the layout of the cluster in a separate task, which the deadline of a call
does not cancel. After a call has timed out, it reads the layout again, which redis-py does not do:
another node may have the keys by then.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

try:
    import redis
    import redis.asyncio
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        AuthenticationError,
        ClusterError,
        MovedError,
        NoPermissionError,
        NoScriptError,
        RedisClusterException,
        RedisError,
        SlotNotCoveredError,
    )
    from redis.exceptions import TimeoutError as RedisTimeoutError
except ImportError as missing:
    raise ImportError("tidegate.redis needs redis-py: pip install 'redis>=5.2'") from missing

from ._core import LimitsLike, peek_checks
from .decision import Decision
from .errors import InvalidInput, PermissionDenied, TidegateError, Unavailable, Undecided
from .failure import FailurePolicy, check_deadline, logger
from .keys import KeyLike, ban_key, check_prefix, counter_key, key_bytes
from .limit import parse_limits
from .script import ScriptCall, ScriptReceipt, check_call, error_of
from .service import CheckLike, ParsedCheck, parse_checks, with_limits

T = TypeVar("T")

_DEADLINE = 0.025
#: Settings of a connection that refer to its pool, or that change its timeouts.
_POOL_SETTINGS = ("maint_notifications_pool_handler", "maint_notifications_config")
_POOL_SETTINGS_PREFIX = "orig_"
#: The maximum number of connections of a limiter whose client sets none.
_CONNECTIONS_MAX = 1024
#: The minimum time between two reads of the layout of a cluster after timeouts, in seconds.
_LAYOUT_INTERVAL = 1.0
_FAILURES = (RedisError, RedisClusterException, OSError, asyncio.TimeoutError)


class _Unset:
    """The type of a deadline that was not passed."""


_UNSET = _Unset()


class _LimiterCore:
    """Options, calls and errors of both limiters."""

    def __init__(self, prefix: str, deadline: float | _Unset | None, on_error: str) -> None:
        self.prefix = check_prefix(prefix)
        self.is_deadline_set = not isinstance(deadline, _Unset)
        if isinstance(deadline, _Unset):
            deadline = _DEADLINE
        self.deadline = None if deadline is None else check_deadline(deadline)
        self.failure = FailurePolicy(on_error)

    def check(self, checks: Sequence[ParsedCheck]) -> ScriptCall[Decision]:
        """Returns the call of a check."""
        return check_call(self.prefix, checks)

    def counters(self, key: KeyLike, limit: LimitsLike) -> list[str]:
        """Returns the keys of the counters of one or several limits of a key."""
        subject = key_bytes(key)
        return [counter_key(self.prefix, subject, each) for each in parse_limits(limit)]

    def ban_command(self, key: KeyLike, seconds: float | None) -> tuple[Any, ...]:
        """Returns the command that sets a ban."""
        command = ("SET", ban_key(self.prefix, key_bytes(key)), "1")
        if seconds is None:
            return command
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not 0.001 <= seconds <= 10 * 366 * 86_400:
            raise InvalidInput("a ban must be from 0.001 seconds to 10 years, or None")
        return (*command, "PX", int(seconds * 1000))

    def ban_key(self, key: KeyLike) -> str:
        """Returns the key whose existence bans `key`."""
        return ban_key(self.prefix, key_bytes(key))

    def refund(self, decision: Decision) -> ScriptCall[bool] | None:
        """Returns the call of a refund, or `None` if there is nothing to give back, or no more."""
        if not isinstance(decision, Decision):
            raise InvalidInput("expected a decision of this limiter")
        if isinstance(decision.receipt, ScriptReceipt):
            return decision.receipt.take()
        if decision.receipt is not None:
            raise InvalidInput("expected a decision of this limiter, found one of the service")
        return None

    def refund_failed(self, error: Undecided) -> bool:
        """Logs that a refund failed, or raises its error if `on_error` is `raise`."""
        if self.failure.on_error == "raise":
            raise error
        self.failure.report("units were not given back", error)
        return False

    def error_of(self, error: BaseException) -> TidegateError:
        """Converts an error of the Redis client."""
        if isinstance(error, (RedisTimeoutError, asyncio.TimeoutError, TimeoutError)):
            limit = "its timeout" if self.deadline is None else f"{self.deadline * 1000:.0f} ms"
            return Unavailable(f"Redis did not answer within {limit}")
        # redis-py removes these codes from the messages of the classes that it creates for them.
        if isinstance(error, (NoPermissionError, AuthenticationError)):
            return PermissionDenied(f"Redis does not permit the call: {str(error)[:256]}")
        if (
            isinstance(error, RedisClusterException)
            and "same" in str(error)
            and "slot" in str(error)
        ):
            return error_of("CROSSSLOT")
        if isinstance(error, redis.exceptions.ClusterCrossSlotError):
            return error_of("CROSSSLOT")
        if isinstance(error, MovedError):
            return error_of("MOVED")
        if isinstance(error, (redis.exceptions.ResponseError, ClusterError)):
            return error_of(str(error))
        return Unavailable(f"cannot reach Redis: {str(error)[:256] or type(error).__name__}")


class RedisLimiter:
    """A limiter that runs the script on a blocking redis-py client. Can be used by many threads.

    `client`: a `redis.Redis` or `redis.RedisCluster`.
    `prefix`: the start of all keys. Defaults to `tidegate`.
    `deadline`: seconds for a reply, and for connecting. Defaults to 0.025. `None`: the timeouts of
    the client apply, as they do for Cluster and Sentinel clients.
    `on_error`: what to do if no decision can be made: `allow` (default; logged at most once a
    second), `deny` or `raise`.
    """

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = "tidegate",
        deadline: float | _Unset | None = _UNSET,
        on_error: str = "allow",
    ) -> None:
        self._core = _LimiterCore(prefix, deadline, on_error)
        if not callable(getattr(client, "execute_command", None)) or _is_asyncio(client):
            raise InvalidInput("expected a blocking Redis client, such as redis.Redis()")
        self._own: Any = None
        if self._core.deadline is not None:
            self._own = _own_client(client, self._core.deadline, redis)
            if self._own is None:
                if self._core.is_deadline_set:
                    raise InvalidInput(
                        "a deadline cannot be imposed on this kind of client: set its "
                        "socket_timeout and socket_connect_timeout, and pass deadline=None"
                    )
                self._core.deadline = None
                logger.info("the timeouts of the %s apply to decisions", type(client).__name__)
        self._client = self._own or client

    def check(
        self, key: KeyLike, limit: LimitsLike, cost: int = 1, *, receipt: bool = True
    ) -> Decision:
        """Checks one or several limits of a key: all pass, or none is charged.

        Every admission can be given back by `refund`; `receipt` is accepted for compatibility with
        the client of the service.
        """
        return self._decide(with_limits(key, limit, cost))

    def check_all(self, checks: Sequence[CheckLike], *, receipt: bool = True) -> Decision:
        """Checks limits of several keys: all pass, or none is charged.

        A check is `(key, limit)` or `(key, limit, cost)`. Redis Cluster accepts one key per call.
        """
        return self._decide(parse_checks(checks))

    def peek(self, key: KeyLike, limit: LimitsLike) -> Decision:
        """Reads limits without charging them.

        A peek is never denied, and bans are not read. The `retry_after` of a limit is the wait for
        one unit.
        """
        return self._decide(peek_checks(key, limit))

    def refund(self, decision: Decision) -> bool:
        """Gives the units of an admission back, once per decision.

        Returns whether units were given back.
        """
        call = self._core.refund(decision)
        if call is None:
            return False
        try:
            return self._run(call)
        except Undecided as error:
            return self._core.refund_failed(error)

    def reset(self, key: KeyLike, limit: LimitsLike) -> int:
        """Deletes a key's counters for these limits and returns their number. Raises on failure."""
        return int(self._command("DEL", *self._core.counters(key, limit)))

    def ban(self, key: KeyLike, seconds: float | None = None) -> None:
        """Bans a key for some time, or without an end. Raises on failure."""
        self._command(*self._core.ban_command(key, seconds))

    def unban(self, key: KeyLike) -> bool:
        """Lifts the ban of a key. Returns whether there was one. Raises on failure."""
        return bool(self._command("DEL", self._core.ban_key(key)))

    def ban_of(self, key: KeyLike) -> float | None:
        """Returns the seconds left of a ban; infinity if it has no end, `None` if not banned."""
        return _ban_left(self._command("PTTL", self._core.ban_key(key)))

    def close(self) -> None:
        """Closes the connections that the limiter has opened. Your client stays open."""
        if self._own is not None:
            self._own.connection_pool.disconnect()

    def _decide(self, checks: Sequence[ParsedCheck]) -> Decision:
        call = self._core.check(checks)
        try:
            return self._run(call)
        except Undecided as error:
            return self._core.failure.decide(error)

    def _run(self, call: ScriptCall[T]) -> T:
        started = time.monotonic()
        try:
            try:
                reply = self._client.execute_command(*call.by_sha, **self._route(call))
            except NoScriptError:
                deadline = self._core.deadline
                if deadline is not None and time.monotonic() - started >= deadline:
                    raise RedisTimeoutError from None
                reply = self._client.execute_command(*call.by_source, **self._route(call))
        except _FAILURES as error:
            raise self._core.error_of(error) from error
        return call.decode(reply)

    def _route(self, call: ScriptCall[Any]) -> dict[str, Any]:
        is_cluster = isinstance(self._client, redis.RedisCluster)
        return _route_in_cluster(self._client, call) if is_cluster else {}

    def _command(self, *command: Any) -> Any:
        try:
            return self._client.execute_command(*command)
        except _FAILURES as error:
            raise self._core.error_of(error) from error


class AsyncRedisLimiter:
    """A limiter that runs the script on an asyncio client of redis-py.

    `client`: a `redis.asyncio.Redis` or `redis.asyncio.RedisCluster`.
    `prefix`: the start of all keys. Defaults to `tidegate`.
    `deadline`: seconds for a call, including connecting. Defaults to 0.025. `None`: the timeouts of
    the client apply.
    `on_error`: what to do if no decision can be made: `allow` (default; logged at most once a
    second), `deny` or `raise`.
    """

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = "tidegate",
        deadline: float | None = _DEADLINE,
        on_error: str = "allow",
    ) -> None:
        self._core = _LimiterCore(prefix, deadline, on_error)
        if not _is_asyncio(client):
            raise InvalidInput("expected an asyncio Redis client, such as redis.asyncio.Redis()")
        self._template = client
        self._own: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._layout: asyncio.Task[Any] | None = None
        self._layout_after = float("-inf")

    async def check(
        self, key: KeyLike, limit: LimitsLike, cost: int = 1, *, receipt: bool = True
    ) -> Decision:
        """Checks one or several limits of a key: all pass, or none is charged.

        Every admission can be given back by `refund`; `receipt` is accepted for compatibility with
        the client of the service.
        """
        return await self._decide(with_limits(key, limit, cost))

    async def check_all(self, checks: Sequence[CheckLike], *, receipt: bool = True) -> Decision:
        """Checks limits of several keys: all pass, or none is charged.

        A check is `(key, limit)` or `(key, limit, cost)`. Redis Cluster accepts one key per call.
        """
        return await self._decide(parse_checks(checks))

    async def peek(self, key: KeyLike, limit: LimitsLike) -> Decision:
        """Reads limits without charging them.

        A peek is never denied, and bans are not read. The `retry_after` of a limit is the wait for
        one unit.
        """
        return await self._decide(peek_checks(key, limit))

    async def refund(self, decision: Decision) -> bool:
        """Gives the units of an admission back, once per decision.

        Returns whether units were given back.
        """
        call = self._core.refund(decision)
        if call is None:
            return False
        try:
            return await self._run(call)
        except Undecided as error:
            return self._core.refund_failed(error)

    async def reset(self, key: KeyLike, limit: LimitsLike) -> int:
        """Deletes a key's counters for these limits and returns their number. Raises on failure."""
        return int(await self._command("DEL", *self._core.counters(key, limit)))

    async def ban(self, key: KeyLike, seconds: float | None = None) -> None:
        """Bans a key for some time, or without an end. Raises on failure."""
        await self._command(*self._core.ban_command(key, seconds))

    async def unban(self, key: KeyLike) -> bool:
        """Lifts the ban of a key. Returns whether there was one. Raises on failure."""
        return bool(await self._command("DEL", self._core.ban_key(key)))

    async def ban_of(self, key: KeyLike) -> float | None:
        """Returns the seconds left of a ban; infinity if it has no end, `None` if not banned."""
        return _ban_left(await self._command("PTTL", self._core.ban_key(key)))

    async def close(self) -> None:
        """Closes the connections that the limiter has opened. Your client stays open."""
        if self._loop is not asyncio.get_running_loop():
            return
        if self._layout is not None:
            self._layout.cancel()
        if self._own is not None:
            await self._own.connection_pool.disconnect()

    async def _decide(self, checks: Sequence[ParsedCheck]) -> Decision:
        call = self._core.check(checks)
        try:
            return await self._run(call)
        except Undecided as error:
            return self._core.failure.decide(error)

    async def _run(self, call: ScriptCall[T]) -> T:
        return call.decode(await self._within_deadline(self._evaluate(call)))

    async def _evaluate(self, call: ScriptCall[Any]) -> Any:
        client = self._client()
        route = {}
        if isinstance(client, redis.asyncio.RedisCluster):
            if client.get_default_node() is None:
                await asyncio.shield(self._read_layout(client.initialize))
            route = _route_in_cluster(client, call)
        try:
            return await client.execute_command(*call.by_sha, **route)
        except NoScriptError:
            return await client.execute_command(*call.by_source, **route)

    async def _command(self, *command: Any) -> Any:
        return await self._within_deadline(self._client().execute_command(*command))

    async def _within_deadline(self, reply: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(reply, self._core.deadline)
        except (*_FAILURES, RuntimeError) as error:
            if isinstance(error, asyncio.TimeoutError):
                self._refresh_layout()
            # asyncio raises a RuntimeError if a connection belongs to another event loop.
            raise self._core.error_of(error) from error

    def _refresh_layout(self) -> None:
        """Starts to read the layout of a cluster again, at most once a second."""
        client, now = self._template, time.monotonic()
        if isinstance(client, redis.asyncio.RedisCluster) and now >= self._layout_after:
            self._layout_after = now + _LAYOUT_INTERVAL
            self._read_layout(client.nodes_manager.initialize)

    def _read_layout(self, read: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Returns the task that reads the layout of a cluster. Starts it unless it is running."""
        if self._layout is None or self._layout.done():
            self._layout = asyncio.create_task(read())
            # A caller that awaits the task gets its error. Without one, asyncio would log it.
            self._layout.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._layout

    def _client(self) -> Any:
        """Returns the client to use. Connections belong to the event loop that opened them."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._layout = loop, None
            if self._core.deadline is not None:
                self._own = _own_client(self._template, self._core.deadline, redis.asyncio)
        return self._own or self._template


def _route_in_cluster(client: Any, call: ScriptCall[Any]) -> dict[str, Any]:
    """Returns the option that sends a call to the master of its keys.

    If redis-py finds the node itself, it retries a command whose connection was lost, although the
    command may have been executed. It follows redirections in both cases.
    """
    try:
        node = client.get_node_from_key(call.keys[0])
    except SlotNotCoveredError:
        # Any node knows whether the slot has a master by now, and redirects the call to it.
        node = client.get_default_node()
    return {"target_nodes": node}


def _is_asyncio(client: Any) -> bool:
    return inspect.iscoroutinefunction(getattr(client, "execute_command", None))


def _own_client(client: Any, deadline: float, module: Any) -> Any:
    """Returns a client with connections of its own, the settings of `client` and the deadline.

    `module` is `redis` or `redis.asyncio`. Returns `None` if the client has another kind of pool,
    whose connections cannot be created from its settings.
    """
    pool: Any = getattr(client, "connection_pool", None)
    if type(pool) not in (module.ConnectionPool, module.BlockingConnectionPool):
        return None
    settings = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name not in _POOL_SETTINGS and not name.startswith(_POOL_SETTINGS_PREFIX)
    }
    if "maint_notifications_config" in pool.connection_kwargs:
        # During server maintenance, redis-py would raise the timeouts.
        from redis.maint_notifications import MaintNotificationsConfig

        settings["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
    is_asyncio = module is redis.asyncio
    retry = redis.asyncio.retry.Retry if is_asyncio else redis.retry.Retry
    # An asyncio limiter cancels the whole call at its deadline. A timeout of redis-py that expires
    # at the same instant could swallow the cancellation.
    timeout = None if is_asyncio else deadline
    settings.update(
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=retry(NoBackoff(), 0),
        retry_on_error=[],
        health_check_interval=0,
    )
    own = module.BlockingConnectionPool(
        max_connections=min(pool.max_connections, _CONNECTIONS_MAX),
        # Seconds to wait for a free connection.
        timeout=timeout,
        connection_class=pool.connection_class,
        **settings,
    )
    return module.Redis(connection_pool=own)


def _ban_left(milliseconds: Any) -> float | None:
    if milliseconds == -2:
        return None
    return float("inf") if milliseconds < 0 else milliseconds / 1000
