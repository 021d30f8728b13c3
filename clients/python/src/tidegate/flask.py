"""Middleware for Flask.

    from tidegate import Tidegate
    from tidegate.flask import init_app, limit

    init_app(app, tidegate=Tidegate("http://127.0.0.1:8080"))     # by rules, every request
    init_app(app, limiter=limiter)                                # for @limit
    init_app(app, limiter=limiter, limit="100/min")               # every request, and for @limit

    @app.post("/shorten")
    @limit("10/min")                                # or @limit("10/min", key=lambda: g.user.id)
    def shorten(): ...

The decision is in `flask.g.tidegate`. The functions `key`, `limit` and `cost` take no argument and
use `flask.request` and `flask.g`. Requires Flask (`pip install 'flask>=2.2'`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

try:
    import flask
    from werkzeug.exceptions import HTTPException
except ImportError as missing:
    raise ImportError("tidegate.flask needs Flask: pip install 'flask>=2.2'") from missing

from .decision import Decision, Response
from .errors import InvalidInput
from .middleware import BodyState, Guard, LimitOption
from .wsgi import describe, settle, watch_body

View = TypeVar("View", bound=Callable[..., Any])
_EXTENSION = "tidegate"
_BODY = "_tidegate_body"
_PROXY_OPTIONS = ("trusted_proxies", "forwarding_header")


@dataclass(frozen=True, eq=False)
class _Extension:
    """The defaults of `@limit` in an application."""

    limiter: Any
    #: `trusted_proxies` and `forwarding_header`, where they were passed.
    proxies: dict[str, Any]


_NO_EXTENSION = _Extension(None, {})


def init_app(
    app: flask.Flask, *, tidegate: Any = None, limiter: Any = None, **options: Any
) -> None:
    """Adds rate limits to an application.

    `tidegate`: a `Tidegate`, to decide every request by the rules of the service. Or:
    `limiter`: a `Tidegate` or `RedisLimiter`, for `@limit`. Defaults to `tidegate`.
    `limit`: one or several limits of every request, or a function that returns them or `None` (no
    limit). Defaults to none.
    `trusted_proxies`, `forwarding_header`: also the defaults of `@limit`.
    Other options are those of `tidegate.wsgi.TidegateMiddleware`.
    """
    if tidegate is None and limiter is None:
        raise InvalidInput("pass tidegate=… to decide by rules, or limiter=… for @limit")
    proxies = {name: options[name] for name in _PROXY_OPTIONS if name in options}
    app.extensions[_EXTENSION] = _Extension(limiter or tidegate, proxies)
    if tidegate is not None:
        for name in proxies:
            del options[name]
        guard = Guard(tidegate=tidegate, **options)
    elif "limit" in options:
        guard = Guard(limiter=limiter, **options)
    else:
        unused = ", ".join(name for name in options if name not in proxies)
        if unused:
            raise InvalidInput(f"{unused} has no effect without limit; pass it to @limit")
        return

    @app.before_request
    def ask() -> flask.Response | None:
        return _enter(guard, "_tidegate_app")

    @app.teardown_request
    def settle_failure(error: BaseException | None) -> None:
        # An exception that Flask passes to the server has no response.
        decision = flask.g.pop("_tidegate_app", None)
        if error is not None and decision is not None:
            settle(guard, decision, 500, _body_state())


def limit(limit: LimitOption, *, limiter: Any = None, **options: Any) -> Callable[[View], View]:
    """Limits the requests of a view. Place it below the decorator of the route.

    `limit`: a limit, several, or a function that returns them, or `None` for no limit.
    `limiter`: defaults to that of `init_app`.
    `key`: a function that returns the key. Defaults to the client's address, which is also used
    if the function returns `None`.
    `name`: separates the counters of this view from others with the same key, algorithm and window.
    Defaults to none: two views with `@limit("10/min")` share ten units per minute and address.
    Other options are those of `tidegate.wsgi.TidegateMiddleware`.
    """
    guards: WeakKeyDictionary[_Extension, Guard] = WeakKeyDictionary()
    # Reports malformed options when the view is defined.
    Guard(limiter=limiter or _NoLimiter, limit=limit, **options)

    def guard_of_app() -> Guard:
        extension = flask.current_app.extensions.get(_EXTENSION, _NO_EXTENSION)
        found = limiter or extension.limiter
        if found is None:
            raise InvalidInput("@limit needs a limiter: call init_app(app, limiter=…)")
        guard = guards.get(extension)
        if guard is None:
            guard = Guard(limiter=found, limit=limit, **{**extension.proxies, **options})
            guards[extension] = guard
        return guard

    def decorate(view: View) -> View:
        @functools.wraps(view)
        def limited(*arguments: Any, **named: Any) -> Any:
            guard = guard_of_app()
            refusal = _enter(guard, "_tidegate_view")
            if refusal is not None:
                return refusal
            try:
                return flask.current_app.ensure_sync(view)(*arguments, **named)
            except HTTPException:
                raise
            except Exception:
                decision = flask.g.pop("_tidegate_view", None)
                if decision is not None:
                    settle(guard, decision, 500, _body_state())
                raise

        return limited  # type: ignore[return-value]

    return decorate


class _NoLimiter:
    """Stands for the limiter of an application that is not known yet."""

    @staticmethod
    def check() -> None:
        """Marks the class as a blocking limiter."""


def _enter(guard: Guard, slot: str) -> flask.Response | None:
    """Asks the limiter about the current request. Returns the refusal, or `None` if it may proceed.

    The decision is in `flask.g` under `slot` until its response is complete.
    """
    request = describe(flask.request.environ, ())
    try:
        decision = guard.decide(request)
    except InvalidInput as error:
        return _respond(guard.rejection(error))
    flask.g.tidegate = decision
    if decision is None:
        return None
    if not decision.allowed:
        return _respond(decision.refusal(request.lines("accept")))
    setattr(flask.g, slot, decision)
    _body_state()
    flask.after_this_request(lambda response: _finish(guard, decision, slot, response))
    return None


def _body_state() -> BodyState:
    """Returns the state of the body of the current request, which is watched from the first call on."""
    if _BODY not in flask.g:
        setattr(flask.g, _BODY, watch_body(flask.request.environ))
    state: BodyState = flask.g.get(_BODY)
    return state


def _finish(
    guard: Guard, decision: Decision, slot: str, response: flask.Response
) -> flask.Response:
    for name, value in decision.headers.items():
        response.headers[name] = value
    is_open = flask.g.pop(slot, None) is not None
    status, body = response.status_code, _body_state()
    if is_open and guard.refunds(decision, status, body):
        response.call_on_close(lambda: settle(guard, decision, status, body))
    return response


def _respond(response: Response) -> flask.Response:
    return flask.Response(response.body, response.status, dict(response.headers))
