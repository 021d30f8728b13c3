"""Middleware for WSGI applications.

    from tidegate import Tidegate
    from tidegate.wsgi import TidegateMiddleware

    app = TidegateMiddleware(app, tidegate=Tidegate("http://127.0.0.1:8080"))    # by rules
    app = TidegateMiddleware(app, limiter=limiter, limit="10/min")               # explicit

The decision is in `environ["tidegate"]`. The functions `key`, `limit` and `cost` take `environ`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any

from .decision import Decision, Response
from .errors import InvalidInput, TidegateError
from .middleware import BodyState, Guard, Request, encode_path

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[Environ, StartResponse], Iterable[bytes]]


class TidegateMiddleware:
    """Limits the requests of a WSGI application.

    `tidegate`: a `Tidegate`, to decide by the rules of the service. Or:
    `limiter`: a `Tidegate` or `RedisLimiter`.
    `limit`: a limit, several, or a function of `environ` that returns them, or `None` for no limit.
    `key`: a function of `environ` that returns the key. Defaults to the client's address, which is
    also used if the function returns `None`.
    `cost`: the units of a request, or a function of `environ`. Defaults to 1.
    `name`: separates the counters of this middleware from others with the same key and window.
    Defaults to none.
    `trusted_proxies`: networks of the proxies that report the client's address. Defaults to none.
    `forwarding_header`: the header in which they do. Defaults to `X-Forwarded-For`.
    `refund_on`: `success` or `failure`: the outcome that gives the units back. Defaults to never.
    """

    def __init__(self, app: WsgiApp, **options: Any) -> None:
        self._app = app
        self._guard = Guard(**options)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        guard, request = self._guard, describe(environ, (environ,))
        try:
            decision = guard.decide(request)
        except InvalidInput as error:
            return _respond(guard.rejection(error), start_response)
        environ["tidegate"] = decision
        if decision is None:
            return self._app(environ, start_response)
        if not decision.allowed:
            return _respond(decision.refusal(request.lines("accept")), start_response)
        return _Admission(guard, decision, start_response).run(self._app, environ)


def describe(environ: Environ, native: tuple[Any, ...]) -> Request:
    """Describes a request. `native` is passed to the functions of the middleware."""
    headers = [
        (name[5:].replace("_", "-").lower(), value)
        for name, value in environ.items()
        if name.startswith("HTTP_")
    ]
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers.append((name.replace("_", "-").lower(), environ[name]))
    path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    method, peer = environ["REQUEST_METHOD"], environ.get("REMOTE_ADDR")
    # WSGI decodes the bytes of the path as Latin-1.
    return Request(method, encode_path(path, "latin-1"), headers, peer, native)


class _Admission:
    """An admitted request: adds headers to its response, and refunds after it."""

    def __init__(self, guard: Guard, decision: Decision, start_response: StartResponse) -> None:
        self._guard, self._decision, self._start_response = guard, decision, start_response
        self._status, self._body_state = 500, BodyState()

    def run(self, app: WsgiApp, environ: Environ) -> Iterable[bytes]:
        self._body_state = watch_body(environ)
        try:
            body = app(environ, self._start)
        except Exception:
            self._finish(500)
            raise
        return _Body(body, lambda: self._finish(self._status))

    def _start(self, status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Any:
        self._status = int(status[:3])
        added = self._decision.headers
        kept = [(name, value) for name, value in headers if name.lower() not in added]
        return self._start_response(status, kept + list(added.items()), *exc_info)

    def _finish(self, status: int) -> None:
        settle(self._guard, self._decision, status, self._body_state)


def watch_body(environ: Environ) -> BodyState:
    """Wraps the body of a request, and returns the state that reading it keeps up to date."""
    stream, length = environ.get("wsgi.input"), environ.get("CONTENT_LENGTH", "")
    bytes_left = int(length) if length.isdigit() else None
    state = BodyState(is_complete=stream is None or (not bytes_left and not _is_chunked(environ)))
    if not state.is_complete:
        environ["wsgi.input"] = _Input(stream, bytes_left, state)
    return state


def _is_chunked(environ: Environ) -> bool:
    return "HTTP_TRANSFER_ENCODING" in environ


class _Input:
    """The body of a request, which records whether it ended early."""

    def __init__(self, stream: Any, bytes_left: int | None, state: BodyState) -> None:
        self._stream, self._left, self._state = stream, bytes_left, state

    def read(self, size: int | None = -1) -> bytes:
        return self._note(self._call(self._stream.read, size), size)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readline(self, size: int | None = -1) -> bytes:
        line = self._call(self._stream.readline, size)
        return self._note(line, 1 if line else -1)

    def readlines(self, hint: int | None = -1) -> list[bytes]:
        lines: list[bytes] = []
        for line in self:
            lines.append(line)
            if hint is not None and 0 < hint <= sum(map(len, lines)):
                break
        return lines

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _call(self, read: Callable[..., bytes], size: int | None) -> bytes:
        try:
            return read() if size is None or size < 0 else read(size)
        except OSError:
            self._state.is_aborted = True
            raise

    def _note(self, data: bytes, size: int | None) -> bytes:
        """Records that a read for `size` bytes, or for all if it is negative, has returned `data`."""
        is_end = size is None or size < 0 or len(data) < size
        if self._left is None:
            self._state.is_complete |= is_end
        else:
            self._left -= len(data)
            self._state.is_complete = self._left <= 0
            self._state.is_aborted = is_end and self._left > 0
        return data


def settle(guard: Guard, decision: Decision, status: int, body: BodyState) -> None:
    """Gives the units of an admission back if the response with this status does so."""
    if guard.refunds(decision, status, body):
        try:
            guard.refund(decision, status)
        except TidegateError as error:
            guard.refund_failed(error)


class _Body:
    """The body of a response, with a function that runs after it."""

    def __init__(self, body: Iterable[bytes], after: Callable[[], None]) -> None:
        self._body, self._after = body, after

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._body)

    def close(self) -> None:
        try:
            close = getattr(self._body, "close", None)
            if close is not None:
                close()
        finally:
            self._after()


def _respond(response: Response, start_response: StartResponse) -> Iterable[bytes]:
    headers = {**response.headers, "content-length": str(len(response.body))}
    start_response(status_line(response.status), list(headers.items()))
    return [response.body]


def status_line(status: int) -> str:
    """Returns a status with its reason: `429 Too Many Requests`."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Refused"
