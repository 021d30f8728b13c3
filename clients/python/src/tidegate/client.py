"""The blocking client of `tidegate serve`."""

from __future__ import annotations

import ipaddress
import os
import queue
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

from ._core import Call, LimitsLike, ServiceCore, peek_checks
from .decision import Decision
from .errors import Undecided
from .http1 import Answer, AnswerParser
from .keys import KeyLike
from .service import CheckLike, HeadersLike, parse_checks, with_limits

T = TypeVar("T")
_READ_BYTES = 64 * 1024


class Tidegate:
    """A client of `tidegate serve` over HTTP. Can be used by many threads at once, and across
    `fork`.

    `url`: the address of the HTTP listener, such as `http://127.0.0.1:8080`.
    `token`: the bearer token, if the listener requires one.
    `deadline`: seconds for a call, including connecting. Defaults to 0.05.
    `on_error`: what to do if no decision can be made: `allow` (default; logged at most once a
    second), `deny` or `raise`.
    `max_idle_connections`: connections that are kept open between calls. Defaults to 100.
    `ssl_context`: for `https`. Defaults to that of `ssl.create_default_context`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        deadline: float = 0.05,
        on_error: str = "allow",
        max_idle_connections: int = 100,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._core = ServiceCore(url, token, deadline, on_error, max_idle_connections)
        self._ssl = ssl_context or (
            ssl.create_default_context() if self._core.endpoint.is_tls else None
        )
        self._idle: deque[socket.socket] = deque()
        self._pid = os.getpid()
        self._resolver = _Resolver(self._core.endpoint.host, self._core.endpoint.port)

    def check(
        self, key: KeyLike, limit: LimitsLike, cost: int = 1, *, receipt: bool = False
    ) -> Decision:
        """Checks one or several limits of a key: all pass, or none is charged.

        With `receipt`, the units of an admission can be given back by `refund`.
        """
        return self._decide(self._core.check(with_limits(key, limit, cost), receipt))

    def check_all(self, checks: Sequence[CheckLike], *, receipt: bool = False) -> Decision:
        """Checks limits of several keys: all pass, or none is charged.

        A check is `(key, limit)` or `(key, limit, cost)`.
        """
        return self._decide(self._core.check(parse_checks(checks), receipt))

    def check_request(
        self, method: str, path: str, headers: HeadersLike, peer: str, *, receipt: bool = False
    ) -> Decision:
        """Checks a request by the rules of the service. `peer` is the address of the socket's peer.

        A refusal has a `response` to relay.
        """
        return self._decide(self._core.check_request(method, path, headers, peer, receipt))

    def peek(self, key: KeyLike, limit: LimitsLike) -> Decision:
        """Reads limits without charging them.

        A peek is never denied; the `retry_after` of a limit is the wait for one unit.
        """
        return self._decide(self._core.check(peek_checks(key, limit)))

    def wait(
        self,
        key: KeyLike,
        limit: LimitsLike,
        cost: int = 1,
        *,
        max_wait: float,
        receipt: bool = False,
    ) -> Decision:
        """Checks limits and waits until they pass, for at most `max_wait` seconds (0 to 60).

        If the required wait is longer, the request is denied at once and nothing is charged. The
        deadline of the call begins after `max_wait`.
        """
        return self._decide(self._core.check(with_limits(key, limit, cost), receipt, max_wait))

    def refund(
        self, decision: Decision | str, *, used: int | None = None, status: int | None = None
    ) -> bool:
        """Gives back the units of an admission, once. Returns whether units were given back.

        `decision`: a decision of a check with `receipt=True`, or its receipt. `used`: the units
        that the request actually cost. `status`: the status of the response, for a decision by
        rules. Without either, all units are given back.
        """
        call = self._core.refund(decision, used, status)
        if call is None:
            return False
        try:
            return self._send(call)
        except Undecided as error:
            return self._core.refund_failed(error)

    def close(self) -> None:
        """Closes all idle connections. The client can be used again."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Tidegate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _decide(self, call: Call[Decision]) -> Decision:
        try:
            return self._send(call)
        except Undecided as error:
            return self._core.failure.decide(error)

    def _send(self, call: Call[T]) -> T:
        ends = time.monotonic() + call.deadline
        try:
            connection = self._take()
            if connection is not None:
                answer = self._exchange(connection, call, ends)
                if answer is not None:
                    return call.decode(answer)
            answer = self._exchange(self._connect(ends), call, ends)
        except socket.timeout:
            raise self._core.too_slow(call.deadline) from None
        except OSError as error:
            raise self._core.unreachable(error) from None
        if answer is None:
            raise self._core.unreachable(ConnectionError("the service closed the connection"))
        return call.decode(answer)

    def _exchange(self, connection: socket.socket, call: Call[Any], ends: float) -> Answer | None:
        """Sends a request and receives its answer.

        Returns `None` if the peer closed the connection before it sent a byte, as a server does
        with an idle one.
        """
        parser = AnswerParser()
        is_kept = False
        try:
            try:
                connection.settimeout(_rest(ends))
                connection.sendall(call.request)
                while True:
                    connection.settimeout(_rest(ends))
                    data = connection.recv(_READ_BYTES)
                    if not data and parser.is_empty:
                        return None
                    answer = parser.feed(data)
                    if answer is not None:
                        break
            except ConnectionError:
                if parser.is_empty:
                    return None
                raise
            is_kept = answer.is_reusable and len(self._idle) < self._core.max_idle_connections
            return answer
        finally:
            if is_kept:
                self._idle.append(connection)
            else:
                connection.close()

    def _take(self) -> socket.socket | None:
        if self._pid != os.getpid():
            # The idle connections belong to the parent process.
            self._idle, self._pid = deque(), os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _connect(self, ends: float) -> socket.socket:
        failure: OSError = ConnectionError("the host name has no address")
        for family, kind, protocol, _, address in self._resolver.resolve(ends):
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(_rest(ends))
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._ssl is None:
                    return connection
                connection.settimeout(_rest(ends))
                return self._ssl.wrap_socket(connection, server_hostname=self._core.endpoint.host)
            except BaseException as error:
                connection.close()
                if not isinstance(error, OSError) or isinstance(error, socket.timeout):
                    raise
                failure = error
        self._resolver.forget()
        raise failure


def _rest(ends: float) -> float:
    """Returns the seconds until `ends`. Raises `socket.timeout` if there are none."""
    rest = ends - time.monotonic()
    if rest <= 0:
        raise socket.timeout
    return rest


class _Resolver:
    """Resolves the host of the service within a deadline, and caches the addresses until a
    connection fails.

    `getaddrinfo` has no timeout, so it runs in a thread of its own unless the host is an address.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._addresses: list[Any] | None = None
        self._waiting: queue.SimpleQueue[list[Any] | OSError] | None = None
        try:
            ipaddress.ip_address(host)
            self._is_address = True
        except ValueError:
            self._is_address = False

    def resolve(self, ends: float) -> list[Any]:
        """Returns the addresses.

        Raises `OSError` if there are none, `socket.timeout` after the deadline.
        """
        addresses = self._addresses
        if addresses is not None:
            return addresses
        if self._is_address:
            self._addresses = addresses = self._lookup()
            return addresses
        with self._lock:
            if self._waiting is None:
                self._waiting = queue.SimpleQueue()
                threading.Thread(target=self._run, args=(self._waiting,), daemon=True).start()
            waiting = self._waiting
        try:
            found = waiting.get(timeout=_rest(ends))
        except queue.Empty:
            raise socket.timeout from None
        # Another call may wait for the same lookup.
        waiting.put(found)
        if isinstance(found, OSError):
            raise found
        return found

    def forget(self) -> None:
        """Drops the cached addresses, so that the next call resolves the host again."""
        self._addresses = None

    def _lookup(self) -> list[Any]:
        return socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)

    def _run(self, waiting: queue.SimpleQueue[list[Any] | OSError]) -> None:
        found: list[Any] | OSError
        try:
            found = self._addresses = self._lookup()
        except OSError as error:
            found = error
        except UnicodeError as error:
            found = OSError(str(error))
        with self._lock:
            self._waiting = None
        waiting.put(found)
