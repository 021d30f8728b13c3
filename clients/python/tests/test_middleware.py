"""Flask, WSGI and ASGI middleware, with the test clients of Flask and Starlette."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable
from typing import Any

import flask
import pytest
from conftest import (
    DECISION,
    GENEROUS,
    Caller,
    FakeService,
    RedisServer,
    TidegateService,
    free_port,
)
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from werkzeug.exceptions import ClientDisconnected
from werkzeug.test import create_environ, run_wsgi_app

import tidegate.flask
from tidegate import AsyncTidegate, InvalidInput, Tidegate, Unavailable, asgi, wsgi
from tidegate.redis import AsyncRedisLimiter, RedisLimiter

OPTIONS: dict[str, Any] = {"deadline": GENEROUS, "on_error": "raise"}
FRAMEWORKS = ["flask", "flask-route", "wsgi", "asgi"]


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    """The framework: each test runs with all of them."""
    return str(request.param)


class Answer:
    """A response of any test client."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.body = status, body
        self.headers = {name.lower(): value for name, value in headers}

    def json(self) -> Any:
        return json.loads(self.body)


#: Sends a request: method, path, headers, peer.
Send = Callable[..., Answer]


def flask_app() -> tuple[flask.Flask, Callable[..., Any]]:
    app = flask.Flask("test")

    def view(status: int = 200) -> Any:
        if status == 599:
            raise RuntimeError("the view failed")
        if status >= 400:
            flask.abort(status)
        decision = flask.g.get("tidegate")
        remaining = None if decision is None else decision.remaining
        return {"remaining": remaining}, status, {"X-RateLimit-Limit": "of the view"}

    return app, view


def serve(framework: str, options: dict[str, Any]) -> Send:
    """Returns a client of an application that answers `/STATUS` with that status."""
    if framework == "asgi":
        return serve_asgi(options)
    app, view = flask_app()
    if framework == "flask-route":
        route = dict(options)
        limit = route.pop("limit")
        tidegate.flask.init_app(app, limiter=route.pop("limiter"))
        view = tidegate.flask.limit(limit, **route)(view)
    app.add_url_rule("/<int:status>", view_func=view, methods=["GET", "POST"], endpoint="status")
    app.add_url_rule("/", view_func=view, methods=["GET", "POST"], endpoint="root")
    if framework == "flask":
        tidegate.flask.init_app(app, **options)
    elif framework == "wsgi":
        # Flask has its decision in the environment.
        @app.before_request
        def decide() -> None:
            flask.g.tidegate = flask.request.environ.get("tidegate")

        app.wsgi_app = wsgi.TidegateMiddleware(app.wsgi_app, **options)  # type: ignore[method-assign]
    client = app.test_client()

    def send(method: str, path: str, headers: Any = (), peer: str = "203.0.113.9") -> Answer:
        environment = {"REMOTE_ADDR": peer}
        with client.open(
            path, method=method, headers=headers, environ_overrides=environment
        ) as response:
            return Answer(response.status_code, response.headers.items(), response.get_data())

    return send


def serve_asgi(options: dict[str, Any]) -> Send:
    async def endpoint(request: Request) -> Any:
        status = request.path_params.get("status", 200)
        if status == 599:
            raise RuntimeError("the view failed")
        if status >= 400:
            raise HTTPException(status)
        decision = request.state.tidegate
        body = {"remaining": None if decision is None else decision.remaining}
        return JSONResponse(body, status, {"X-RateLimit-Limit": "of the view"})

    routes = [
        Route("/{status:int}", endpoint, methods=["GET", "POST"]),
        Route("/", endpoint, methods=["GET", "POST"]),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(asgi.TidegateMiddleware, **options)])

    def send(method: str, path: str, headers: Any = (), peer: str = "203.0.113.9") -> Answer:
        client = TestClient(app, raise_server_exceptions=False, client=(peer, 4711))
        response = client.request(method, path, headers=list(headers))
        return Answer(response.status_code, response.headers.items(), response.content)

    return send


def limiter_for(framework: str, server: RedisServer, key: str, **options: Any) -> Any:
    """Returns a limiter whose keys no other test uses."""
    prefix = f"m{abs(hash(key)):x}"
    options = {**OPTIONS, "prefix": prefix, **options}
    if framework == "asgi":
        return AsyncRedisLimiter(server.async_client(), **options)
    return RedisLimiter(server.client(), **options)


def tidegate_for(framework: str, url: str, **options: Any) -> Any:
    return (AsyncTidegate if framework == "asgi" else Tidegate)(url, **{**OPTIONS, **options})


def test_route_is_limited_by_address(framework: str, redis_server: RedisServer, key: str) -> None:
    limiter = limiter_for(framework, redis_server, key)
    send = serve(framework, {"limiter": limiter, "limit": ["2/min", "100/h"]})
    first, second, denied = (send("GET", "/") for _ in range(3))
    assert [first.status, second.status, denied.status] == [200, 200, 429]
    assert first.json() == {"remaining": 1}, "the decision is available to the handler"
    assert first.headers["x-ratelimit-limit"] == "2", "the headers replace those of the view"
    assert first.headers["ratelimit"].startswith('"per-minute";r=1;t=')
    assert first.headers["ratelimit-policy"] == '"per-minute";q=2;w=60, "per-hour";q=100;w=3600'
    assert denied.headers["content-type"] == "application/json"
    assert denied.headers["cache-control"] == "no-store"
    assert 1 <= int(denied.headers["retry-after"]) <= 60
    assert denied.headers["content-length"] == str(len(denied.body))
    body = denied.json()
    assert (body["error"], body["limit"], body["policy"]) == ("rate_limited", 2, "per-minute")
    assert send("GET", "/", peer="203.0.113.10").status == 200, "another client has its own units"


def test_refusal_is_a_problem_if_the_request_asks_for_it(
    framework: str, redis_server: RedisServer, key: str
) -> None:
    limiter = limiter_for(framework, redis_server, key)
    send = serve(framework, {"limiter": limiter, "limit": "1/h"})
    send("GET", "/")
    problem = send("GET", "/", [("Accept", "text/html, application/problem+json")])
    assert (problem.status, problem.headers["content-type"]) == (429, "application/problem+json")
    body = problem.json()
    assert (body["title"], body["violated-policies"]) == ("Quota exceeded", ["per-hour"])
    assert body["detail"].startswith("the limit of 1 per hour has been reached")
    assert send("GET", "/", [("Accept", "*/*")]).headers["content-type"] == "application/json"


def test_errors_of_the_view_have_the_headers_too(
    framework: str, redis_server: RedisServer, key: str
) -> None:
    limiter = limiter_for(framework, redis_server, key)
    send = serve(framework, {"limiter": limiter, "limit": "9/min"})
    for path in ("/404", "/500"):
        assert "x-ratelimit-remaining" in send("GET", path).headers


def test_forwarded_address_counts_only_behind_a_trusted_proxy(
    framework: str, redis_server: RedisServer, key: str
) -> None:
    limiter = limiter_for(framework, redis_server, key)
    forged = [("X-Forwarded-For", "6.6.6.6")]
    send = serve(framework, {"limiter": limiter, "limit": "1/min"})
    assert send("GET", "/").status == 200
    assert send("GET", "/", forged).status == 429, "the header of an untrusted peer is not read"
    proxies = ["10.0.0.0/8"]
    send = serve(framework, {"limiter": limiter, "limit": "1/h", "trusted_proxies": proxies})
    for entry, status in [("1.1.1.1", 200), ("2.2.2.2", 200), ("9.9.9.9, 1.1.1.1", 429)]:
        assert send("GET", "/", [("X-Forwarded-For", entry)], "10.0.0.1").status == status, entry
    options = {"trusted_proxies": proxies, "forwarding_header": "CF-Connecting-IP"}
    send = serve(framework, {"limiter": limiter, "limit": "1/day", **options})
    headers = [("CF-Connecting-IP", "2001:db8:1:2::1"), ("X-Forwarded-For", "3.3.3.3")]
    assert send("GET", "/", headers, "10.0.0.1").status == 200
    headers = [("CF-Connecting-IP", "2001:db8:1:2:ffff::2")]
    assert send("GET", "/", headers, "10.0.0.1").status == 429, "an IPv6 client is a /64"


def test_key_limit_and_cost_can_be_functions(
    framework: str, redis_server: RedisServer, key: str
) -> None:
    limiter = limiter_for(framework, redis_server, key)

    def header(name: str, arguments: tuple[Any, ...]) -> Any:
        if not arguments:
            return flask.request.headers.get(name)
        if framework == "asgi":
            pairs = {key.decode(): value.decode() for key, value in arguments[0]["headers"]}
            return pairs.get(name.lower())
        return arguments[0].get("HTTP_" + name.upper().replace("-", "_"))

    options = {
        "limiter": limiter,
        "key": lambda *request: header("X-User", request),
        "limit": lambda *request: header("X-Plan", request),
        "cost": lambda *request: int(header("X-Cost", request) or 1),
    }
    send = serve(framework, options)
    assert send("GET", "/").json() == {"remaining": None}, "no limit, no decision"

    def remaining(**headers: str) -> Any:
        answer = send("GET", "/", [(f"X-{name}", value) for name, value in headers.items()])
        return answer.json().get("remaining")

    assert remaining(User="a", Plan="10/min") == 9
    assert remaining(User="a", Plan="20/min", Cost="5") == 14
    assert remaining(User="b", Plan="10/min") == 9
    assert remaining(Plan="10/min") == 9, "without a key, the address counts"
    assert remaining(Plan="10/min") == 8


def test_name_separates_the_counters_of_two_routes(
    framework: str, redis_server: RedisServer, key: str
) -> None:
    limiter = limiter_for(framework, redis_server, key)
    sends = [
        serve(framework, {"limiter": limiter, "limit": "1/min", "name": name})
        for name in ("a", "b", None)
    ]
    assert [send("GET", "/").status for send in sends] == [200, 200, 200]
    assert [send("GET", "/").status for send in sends] == [429, 429, 429]


@pytest.mark.parametrize(
    ("refund_on", "kept"), [(None, 4), ("success", 3), ("failure", 1)], ids=str
)
def test_refund_follows_the_outcome(
    framework: str, redis_server: RedisServer, key: str, refund_on: str | None, kept: int
) -> None:
    limiter = limiter_for(framework, redis_server, key)
    send = serve(framework, {"limiter": limiter, "limit": "10/min", "refund_on": refund_on})
    for path in ("/200", "/404", "/503", "/599"):
        send("GET", path)
    peek = Caller(limiter_for("wsgi", redis_server, key))
    assert peek.peek("ip:203.0.113.9", "10/min").remaining == 10 - kept


class _Disconnected(io.RawIOBase):
    """A body that ends before its length, as after a disconnect."""

    def __init__(self, error: bool) -> None:
        self._parts, self._error = [b"half "], error

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._parts:
            return self._parts.pop()
        if self._error:
            raise ConnectionResetError("the client disconnected")
        return b""


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("status", [400, 500])
def test_disconnecting_in_the_body_gives_nothing_back(
    framework: str, redis_server: RedisServer, key: str, status: int, error: bool
) -> None:
    limiter = limiter_for(framework, redis_server, key)
    options = {"limiter": limiter, "limit": "10/min", "refund_on": "failure"}
    if framework == "asgi":
        asyncio.run(_disconnect_asgi(options, status))
    else:
        app = flask.Flask("test")

        def view() -> Any:
            try:
                body = flask.request.get_data()
            except (ClientDisconnected, OSError):
                return "the body is incomplete", status
            raise AssertionError(f"a whole body: {body!r}")

        if framework == "flask-route":
            view = tidegate.flask.limit(**options)(view)
        app.add_url_rule("/", view_func=view, methods=["POST"])
        if framework == "flask":
            tidegate.flask.init_app(app, **options)
        elif framework == "wsgi":
            app.wsgi_app = wsgi.TidegateMiddleware(app.wsgi_app, **options)  # type: ignore[method-assign]
        environ = create_environ(method="POST", environ_overrides={"REMOTE_ADDR": "203.0.113.9"})
        environ["wsgi.input"], environ["CONTENT_LENGTH"] = _Disconnected(error), "100"
        environ.pop("wsgi.input_terminated", None)
        _, answered, _ = run_wsgi_app(app, environ, buffered=True)
        assert answered.startswith(str(status))
    peek = Caller(limiter_for("wsgi", redis_server, key))
    assert peek.peek("ip:203.0.113.9", "10/min").remaining == 9


async def _disconnect_asgi(options: dict[str, Any], status: int) -> None:
    async def endpoint(request: Request) -> Any:
        try:
            await request.body()
        except ClientDisconnect:
            return JSONResponse({}, status)
        raise AssertionError("a whole body")

    routes = [Route("/", endpoint, methods=["POST"])]
    app = Starlette(routes=routes, middleware=[Middleware(asgi.TidegateMiddleware, **options)])
    messages = [
        {"type": "http.request", "body": b"half ", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "query_string": b"",
        "headers": [(b"content-length", b"100")],
        "client": ("203.0.113.9", 4711),
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == status


def test_a_timeout_while_the_body_is_incomplete_gives_nothing_back(
    framework: str, redis_server: RedisServer, key: str
) -> None:
    limiter = limiter_for(framework, redis_server, key)
    send = serve(framework, {"limiter": limiter, "limit": "10/min", "refund_on": "failure"})
    send("POST", "/408", [("Transfer-Encoding", "chunked")])
    peek = Caller(limiter_for("wsgi", redis_server, key))
    assert peek.peek("ip:203.0.113.9", "10/min").remaining == 9


def test_banned_client_gets_403(framework: str, redis_server: RedisServer, key: str) -> None:
    Caller(limiter_for("wsgi", redis_server, key)).ban("ip:203.0.113.9", 60)
    limiter = limiter_for(framework, redis_server, key)
    answer = serve(framework, {"limiter": limiter, "limit": "1/min"})("GET", "/")
    assert (answer.status, answer.json()["error"]) == (403, "banned")
    assert "x-ratelimit-limit" not in answer.headers


def test_unavailable_limiter_follows_on_error(framework: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"

    def send(on_error: str) -> Answer:
        limiter = tidegate_for(framework, url, on_error=on_error)
        return serve(framework, {"limiter": limiter, "limit": "1/min"})("GET", "/")

    allowed = send("allow")
    assert allowed.status == 200
    assert "x-ratelimit-remaining" not in allowed.headers, "no quota is claimed"
    denied = send("deny")
    assert (denied.status, denied.json()["error"]) == (503, "unavailable")
    assert denied.headers["retry-after"] == "1"
    if framework in ("flask", "flask-route"):
        assert send("raise").status == 500
    elif framework == "wsgi":
        with pytest.raises(Unavailable):
            send("raise")


def test_service_decides_explicit_limits_too(
    framework: str, service: TidegateService, key: str
) -> None:
    limiter = tidegate_for(framework, service.url)
    send = serve(framework, {"limiter": limiter, "limit": "2/min", "key": lambda *_: key})
    answers = [send("GET", "/") for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-remaining"] == "1"
    assert answers[2].json()["error"] == "rate_limited"


BY_RULES = ["flask", "wsgi", "asgi"]


@pytest.mark.parametrize("framework", BY_RULES)
def test_by_rules_the_request_is_described_and_the_refusal_relayed(
    framework: str, fake: FakeService
) -> None:
    send = serve(framework, {"tidegate": tidegate_for(framework, fake.url)})
    admission = {**DECISION, "response": {"headers": {"X-Plan": "pro"}}}
    fake.answer = lambda path, body: (200, {"x-ratelimit-limit": "10"}, admission)
    answer = send("POST", "/201?secret=1", [("X-Api-Key", "k")])
    assert (answer.status, answer.json()) == (201, {"remaining": 9})
    assert answer.headers["x-plan"] == "pro"
    body = fake.requests[0][2]
    assert body["receipt"] is True
    request = body["request"]
    assert (request["method"], request["path"]) == ("POST", "/201")
    assert request["peer"] == "203.0.113.9"
    assert ["x-api-key", "k"] in request["headers"]
    response = {"status": 402, "headers": {"x-why": "plan"}, "body": "<p>pay</p>"}
    refusal = {**DECISION, "allowed": False, "error": "rate_limited", "response": response}
    fake.answer = lambda path, body: (429, {}, refusal)
    answer = send("GET", "/")
    assert (answer.status, answer.body, answer.headers["x-why"]) == (402, b"<p>pay</p>", "plan")


@pytest.mark.parametrize("framework", BY_RULES)
def test_by_rules_units_are_given_back_for_the_named_endings(
    framework: str, fake: FakeService
) -> None:
    send = serve(framework, {"tidegate": tidegate_for(framework, fake.url)})

    def answer(path: str, body: Any) -> Any:
        if path == "/v1/refund":
            return 200, {}, {"applied": True}
        return 200, {}, {**DECISION, "receipt": "r", "refund_on": ["failure"]}

    fake.answer = answer
    for path in ("/200", "/404", "/599"):
        send("GET", path)
    refunds = [body for path, _, body in fake.requests if path == "/v1/refund"]
    assert refunds == [{"receipt": "r", "status": 404}, {"receipt": "r", "status": 500}]


@pytest.mark.parametrize("framework", BY_RULES)
def test_by_rules_failed_refund_does_not_change_the_response(
    framework: str, fake: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    send = serve(framework, {"tidegate": tidegate_for(framework, fake.url)})
    admission = {**DECISION, "receipt": "r", "refund_on": ["success"]}
    fake.answer = lambda path, body: (409 if path == "/v1/refund" else 200, {}, admission)
    with caplog.at_level(logging.WARNING, "tidegate"):
        assert send("GET", "/").status == 200
    assert "units were not given back" in caplog.text


@pytest.mark.parametrize("framework", BY_RULES)
def test_by_rules_request_that_the_service_cannot_read_is_refused(
    framework: str, fake: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    fake.answer = lambda path, body: (400, {}, {"error": "bad_request", "message": "peer: …"})
    send = serve(framework, {"tidegate": tidegate_for(framework, fake.url, on_error="allow")})
    with caplog.at_level(logging.WARNING, "tidegate"):
        assert send("GET", "/").status == 400
    assert "rejected" in caplog.text


@pytest.mark.parametrize("framework", BY_RULES)
def test_by_rules_service_without_receipts_decides_all_the_same(
    framework: str, fake: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    message = "the keys are too long for a receipt"

    def answer(path: str, body: Any) -> Any:
        if "receipt" in body:
            return 400, {}, {"error": "bad_request", "message": message}
        return 200, {}, DECISION

    fake.answer = answer
    send = serve(framework, {"tidegate": tidegate_for(framework, fake.url)})
    asked = lambda: ["receipt" in body for _, _, body in fake.requests]  # noqa: E731
    assert send("GET", "/").status == 200
    assert asked() == [True, False], "the next request asks for a receipt again"
    message = "receipts need a secret that all instances share: set `receipt_secret_env` …"
    with caplog.at_level(logging.WARNING, "tidegate"):
        assert [send("GET", "/").status for _ in range(3)] == [200] * 3
    assert asked()[2:] == [True, False, False, False]
    assert "are not refunded" in caplog.text


@pytest.mark.parametrize("framework", BY_RULES)
def test_path_is_described_as_the_application_routes_on_it(
    framework: str, fake: FakeService
) -> None:
    send = serve(framework, {"tidegate": tidegate_for(framework, fake.url)})
    for path in ("/%73horten", "/a%20b%3Fc", "/%C3%BC", "/a%25b", "/%FF%00"):
        send("GET", path)
    paths = [body["request"]["path"] for _, _, body in fake.requests]
    assert paths[:4] == ["/shorten", "/a%20b%3Fc", "/%C3%BC", "/a%25b"]
    assert paths[4].isascii()


@pytest.mark.parametrize("peer", ["", "unix:", "testclient"])
def test_peer_without_an_address_is_local(framework: str, fake: FakeService, peer: str) -> None:
    limiter = tidegate_for(framework, fake.url)
    serve(framework, {"limiter": limiter, "limit": "1/min"})("GET", "/", peer=peer)
    assert fake.requests[0][2]["key"] == "ip:127.0.0.1"


_LIMITER = Tidegate("http://127.0.0.1:1")
_BAD: list[dict[str, Any]] = [
    {},
    {"limiter": _LIMITER},
    {"limit": "1/min"},
    {"limiter": _LIMITER, "limit": "1/fortnight"},
    {"limiter": _LIMITER, "limit": []},
    {"limiter": _LIMITER, "limit": "1/min", "cost": -1},
    {"limiter": _LIMITER, "limit": "1/min", "refund_on": "error"},
    {"limiter": _LIMITER, "limit": "1/min", "trusted_proxies": ["10.1.2.3/8"]},
    {"limiter": _LIMITER, "limit": "1/min", "trusted_proxies": "10.0.0.0/8"},
    {"limiter": _LIMITER, "limit": "1/min", "trusted_proxies": ["localhost"]},
    {"limiter": _LIMITER, "limit": "1/min", "forwarding_header": "a b"},
    {"limiter": _LIMITER, "limit": "1/min", "forwarding_header": "X-Forwarded-Host"},
    {"limiter": AsyncTidegate("http://127.0.0.1:1"), "limit": "1/min"},
    {"tidegate": _LIMITER, "limit": "1/min"},
    {"tidegate": _LIMITER, "limiter": _LIMITER},
    {"tidegate": _LIMITER, "trusted_proxies": ["10.0.0.0/8"]},
    {"tidegate": _LIMITER, "refund_on": "failure"},
]


@pytest.mark.parametrize("options", _BAD, ids=range(len(_BAD)))
def test_malformed_option_is_reported_at_start(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        wsgi.TidegateMiddleware(lambda environ, start: [], **options)


def test_blocking_limiter_is_rejected_by_asgi() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    with pytest.raises(InvalidInput, match="asyncio"):
        asgi.TidegateMiddleware(app, limiter=_LIMITER, limit="1/min")


def test_rules_need_a_client_of_the_service(redis_server: RedisServer, key: str) -> None:
    with pytest.raises(InvalidInput, match="service"):
        wsgi.TidegateMiddleware(
            lambda environ, start: [], tidegate=limiter_for("wsgi", redis_server, key)
        )


def test_flask_route_without_a_limiter_is_a_clear_error() -> None:
    app = flask.Flask("test")
    app.testing = True
    app.add_url_rule("/", view_func=tidegate.flask.limit("1/min")(lambda: "hi"))
    with pytest.raises(InvalidInput, match="init_app"):
        app.test_client().get("/")
    with pytest.raises(InvalidInput):
        tidegate.flask.limit("1/fortnight")
    with pytest.raises(InvalidInput):
        tidegate.flask.init_app(app)
    with pytest.raises(InvalidInput, match="refund_on"):
        tidegate.flask.init_app(app, limiter=_LIMITER, refund_on="failure")


def test_flask_proxies_of_init_app_apply_to_routes(redis_server: RedisServer, key: str) -> None:
    app = flask.Flask("test")
    limiter = limiter_for("flask", redis_server, key)
    tidegate.flask.init_app(app, limiter=limiter, trusted_proxies=["127.0.0.1"])
    app.add_url_rule("/", view_func=tidegate.flask.limit("1/min")(lambda: "hi"))
    client = app.test_client()
    statuses = [
        client.get("/", headers={"X-Forwarded-For": address}).status_code
        for address in ("1.1.1.1", "2.2.2.2", "1.1.1.1")
    ]
    assert statuses == [200, 200, 429]


def test_flask_route_and_application_limits_combine(redis_server: RedisServer, key: str) -> None:
    app = flask.Flask("test")
    limiter = limiter_for("flask", redis_server, key)
    tidegate.flask.init_app(app, limiter=limiter, limit="3/min")
    app.add_url_rule("/", view_func=tidegate.flask.limit("1/h")(lambda: "hi"))
    client = app.test_client()
    answers = [client.get("/") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 429, 429, 429]
    assert [answer.json["policy"] for answer in answers[1:]] == ["per-hour"] * 2 + ["per-minute"]
    assert answers[0].headers["x-ratelimit-limit"] == "1", "the limit of the route is shown"


def test_flask_refund_of_an_exception_that_reaches_the_server(
    redis_server: RedisServer, key: str
) -> None:
    limiter = limiter_for("flask", redis_server, key)
    for is_route in (False, True):
        app = flask.Flask("test")
        app.testing = True

        def fail() -> str:
            raise RuntimeError("the view failed")

        options = {"limit": "2/min", "refund_on": "failure"}
        if is_route:
            fail = tidegate.flask.limit(limiter=limiter, **options)(fail)  # type: ignore[arg-type]
        else:
            tidegate.flask.init_app(app, limiter=limiter, **options)
        app.add_url_rule("/", view_func=fail)
        for _ in range(5):
            with pytest.raises(RuntimeError):
                app.test_client().get("/")
    assert limiter.peek("ip:127.0.0.1", "2/min").remaining == 2


def test_asgi_passes_other_protocols_and_streams(fake: FakeService) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    limiter = AsyncTidegate(fake.url, **OPTIONS)
    middleware = asgi.TidegateMiddleware(app, limiter=limiter, limit="1/min")
    for kind in ("lifespan", "websocket"):
        asyncio.run(middleware({"type": kind}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan", "websocket"]
    assert fake.requests == []


def test_wsgi_closes_the_body_of_the_application(fake: FakeService) -> None:
    closed: list[bool] = []

    class Body:
        def __iter__(self) -> Any:
            return iter([b"a", b"b"])

        def close(self) -> None:
            closed.append(True)

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return Body()

    middleware = wsgi.TidegateMiddleware(app, limiter=Tidegate(fake.url), limit="10/min")
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "::1"}
    body: Any = middleware(environ, lambda status, headers: None)
    assert b"".join(body) == b"ab"
    body.close()
    assert closed == [True]
    assert environ["tidegate"].allowed  # type: ignore[attr-defined]


def test_plain_starlette_response_has_the_headers(fake: FakeService) -> None:
    async def endpoint(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hi")

    middleware = [Middleware(asgi.TidegateMiddleware, tidegate=AsyncTidegate(fake.url, **OPTIONS))]
    app = Starlette(routes=[Route("/", endpoint)], middleware=middleware)
    assert TestClient(app).get("/").headers["x-ratelimit-limit"] == "10"
