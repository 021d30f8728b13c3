"""The asyncio client of `tidegate serve`."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
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
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AsyncTidegate:
    """A client of `tidegate serve` over HTTP for asyncio. Options and methods are those of
    `Tidegate`.

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
        self._idle: deque[_Streams] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def check(
        self, key: KeyLike, limit: LimitsLike, cost: int = 1, *, receipt: bool = False
    ) -> Decision:
        """Checks one or several limits of a key: all pass, or none is charged.

        With `receipt`, the units of an admission can be given back by `refund`.
        """
        return await self._decide(self._core.check(with_limits(key, limit, cost), receipt))

    async def check_all(self, checks: Sequence[CheckLike], *, receipt: bool = False) -> Decision:
        """Checks limits of several keys: all pass, or none is charged.

        A check is `(key, limit)` or `(key, limit, cost)`.
        """
        return await self._decide(self._core.check(parse_checks(checks), receipt))

    async def check_request(
        self, method: str, path: str, headers: HeadersLike, peer: str, *, receipt: bool = False
    ) -> Decision:
        """Checks a request by the rules of the service. `peer` is the address of the socket's peer.

        A refusal has a `response` to relay.
        """
        return await self._decide(self._core.check_request(method, path, headers, peer, receipt))

    async def peek(self, key: KeyLike, limit: LimitsLike) -> Decision:
        """Reads limits without charging them.

        A peek is never denied; the `retry_after` of a limit is the wait for one unit.
        """
        return await self._decide(self._core.check(peek_checks(key, limit)))

    async def wait(
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
        return await self._decide(
            self._core.check(with_limits(key, limit, cost), receipt, max_wait)
        )

    async def refund(
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
            return await self._send(call)
        except Undecided as error:
            return self._core.refund_failed(error)

    async def close(self) -> None:
        """Closes all idle connections. The client can be used again."""
        while self._idle:
            _, writer = self._idle.pop()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def __aenter__(self) -> AsyncTidegate:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _decide(self, call: Call[Decision]) -> Decision:
        try:
            return await self._send(call)
        except Undecided as error:
            return self._core.failure.decide(error)

    async def _send(self, call: Call[T]) -> T:
        try:
            answer = await asyncio.wait_for(self._exchange(call), call.deadline)
        except asyncio.TimeoutError:
            raise self._core.too_slow(call.deadline) from None
        except (OSError, UnicodeError) as error:
            raise self._core.unreachable(error) from None
        return call.decode(answer)

    async def _exchange(self, call: Call[Any]) -> Answer:
        streams = self._take()
        if streams is not None:
            answer = await self._exchange_on(streams, call)
            if answer is not None:
                return answer
        endpoint = self._core.endpoint
        streams = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=self._ssl)
        answer = await self._exchange_on(streams, call)
        if answer is None:
            raise ConnectionError("the service closed the connection")
        return answer

    async def _exchange_on(self, streams: _Streams, call: Call[Any]) -> Answer | None:
        """Sends a request and receives its answer.

        Returns `None` if the peer closed the connection before it sent a byte, as a server does
        with an idle one.
        """
        reader, writer = streams
        parser = AnswerParser()
        is_kept = False
        try:
            try:
                writer.write(call.request)
                while True:
                    data = await reader.read(_READ_BYTES)
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
                self._idle.append(streams)
            else:
                # Unlike close, this does not wait for a peer that does not read.
                writer.transport.abort()

    def _take(self) -> _Streams | None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # Connections belong to the event loop that opened them.
            self._idle, self._loop = deque(), loop
        while self._idle:
            streams = self._idle.pop()
            if not streams[0].at_eof() and not streams[1].is_closing():
                return streams
            streams[1].transport.abort()
        return None
