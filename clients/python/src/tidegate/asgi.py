"""Middleware for ASGI applications: FastAPI, Starlette and others.

    from tidegate import AsyncTidegate
    from tidegate.asgi import TidegateMiddleware

    app.add_middleware(TidegateMiddleware, tidegate=AsyncTidegate("http://127.0.0.1:8080"))
    app.add_middleware(TidegateMiddleware, limiter=limiter, limit="10/min")      # explicit

The decision is in `request.state.tidegate`. The functions `key`, `limit` and `cost` take the
scope. Only HTTP requests are limited; WebSockets and lifespan events pass.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .decision import Decision, Response
from .errors import InvalidInput, TidegateError
from .middleware import BodyState, Guard, Request, encode_path

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class TidegateMiddleware:
    """Limits the HTTP requests of an ASGI application.

    `tidegate`: an `AsyncTidegate`, to decide by the rules of the service. Or:
    `limiter`: an `AsyncTidegate` or `AsyncRedisLimiter`.
    `limit`: a limit, several, or a function of the scope that returns them, or `None` for no limit.
    `key`: a function of the scope that returns the key. Defaults to the client's address, which is
    also used if the function returns `None`.
    `cost`: the units of a request, or a function of the scope. Defaults to 1.
    `name`: separates the counters of this middleware from others with the same key and window.
    Defaults to none.
    `trusted_proxies`: networks of the proxies that report the client's address. Defaults to none.
    `forwarding_header`: the header in which they do. Defaults to `X-Forwarded-For`.
    `refund_on`: `success` or `failure`: the outcome that gives the units back. Defaults to never.
    """

    def __init__(self, app: AsgiApp, **options: Any) -> None:
        self._app = app
        self._guard = Guard(is_asyncio=True, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        guard, request = self._guard, _describe(scope)
        try:
            decision = await guard.decide_async(request)
        except InvalidInput as error:
            await _respond(guard.rejection(error), send)
            return
        scope.setdefault("state", {})["tidegate"] = decision
        if decision is None:
            await self._app(scope, receive, send)
        elif not decision.allowed:
            await _respond(decision.refusal(request.lines("accept")), send)
        else:
            await self._run(decision, scope, receive, send)

    async def _run(self, decision: Decision, scope: Scope, receive: Receive, send: Send) -> None:
        status, body = 500, BodyState()

        async def receive_body() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.is_complete = not message.get("more_body", False)
            elif message["type"] == "http.disconnect":
                body.is_aborted = not body.is_complete
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": _merge(message.get("headers", ()), decision)}
            await send(message)

        try:
            await self._app(scope, receive_body, send_with_headers)
        except Exception:
            await self._settle(decision, 500, body)
            raise
        await self._settle(decision, status, body)

    async def _settle(self, decision: Decision, status: int, body: BodyState) -> None:
        if self._guard.refunds(decision, status, body):
            try:
                await self._guard.refund(decision, status)
            except TidegateError as error:
                self._guard.refund_failed(error)


def _describe(scope: Scope) -> Request:
    headers = [
        (name.decode("latin-1").lower(), value.decode("latin-1"))
        for name, value in scope["headers"]
    ]
    client = scope.get("client")
    peer = client[0] if client else None
    return Request(scope["method"], encode_path(scope["path"]), headers, peer, (scope,))


def _merge(headers: Any, decision: Decision) -> list[tuple[bytes, bytes]]:
    added = _encode(decision.headers)
    names = {name for name, _ in added}
    return [(name, value) for name, value in headers if name.lower() not in names] + added


def _encode(headers: Any) -> list[tuple[bytes, bytes]]:
    return [
        (name.encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in headers.items()
    ]


async def _respond(response: Response, send: Send) -> None:
    headers = {**response.headers, "content-length": str(len(response.body))}
    start = {"type": "http.response.start", "status": response.status, "headers": _encode(headers)}
    await send(start)
    await send({"type": "http.response.body", "body": response.body})
