"""The clients of the service, with the real binary and with a fake server."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    DECISION,
    GENEROUS,
    PACKAGE,
    Caller,
    FakeService,
    TidegateService,
    encode_answer,
)

from tidegate import (
    AsyncTidegate,
    Decision,
    InvalidInput,
    PermissionDenied,
    ProtocolError,
    Tidegate,
    TidegateError,
    Unavailable,
)


def client_of(kind: str, url: str, **options: Any) -> Caller:
    """Returns a client that raises errors and has a generous deadline."""
    options = {"deadline": GENEROUS, "on_error": "raise", **options}
    return Caller((Tidegate if kind == "blocking" else AsyncTidegate)(url, **options))


def test_quota_is_enforced_by_the_real_service(
    kind: str, service: TidegateService, key: str
) -> None:
    client = client_of(kind, service.url)
    decisions = [client.check(key, "2/min") for _ in range(3)]
    assert [decision.allowed for decision in decisions] == [True, True, False]
    assert [decision.remaining for decision in decisions] == [1, 0, 0]
    denied = decisions[2]
    assert 0 < denied.retry_after <= 60
    assert (denied.limit, denied.status, denied.source) == (2, 429, "store")
    assert denied.headers["x-ratelimit-limit"] == "2"
    body = json.loads(denied.refusal().body)
    assert (body["error"], body["limit"], body["policy"]) == ("rate_limited", 2, "per-minute")


def test_several_limits_are_decided_together(kind: str, service: TidegateService, key: str) -> None:
    client = client_of(kind, service.url)
    assert client.check(key, ["1/min", "5/h token-bucket burst=3"]).allowed
    denied = client.check(key, ["1/min", "5/h token-bucket burst=3"])
    assert [status.allowed for status in denied.limits] == [False, True]
    assert client.peek(key, "5/h token-bucket burst=3").remaining == 2, "a denial charges nothing"
    other = client.check_all([(key, "1/min"), (key + "x", "9/min", 4)])
    assert not other.allowed
    assert client.peek(key + "x", "9/min").remaining == 9


def test_cost_that_never_fits_has_no_retry_after(
    kind: str, service: TidegateService, key: str
) -> None:
    denied = client_of(kind, service.url).check(key, "2/min", 3)
    assert not denied.allowed
    assert denied.retry_after is None
    assert "retry-after" not in denied.refusal().headers


@pytest.mark.parametrize(
    "key", ["with space", "{brace}", "nul\0", "ümlaut", "a" * 65536], ids=range(5)
)
def test_any_key_in_utf_8_is_accepted(kind: str, service: TidegateService, key: str) -> None:
    assert client_of(kind, service.url).check(key, "1000/min").allowed


def test_an_empty_key_is_rejected(kind: str, service: TidegateService) -> None:
    with pytest.raises(InvalidInput, match="key must not be empty"):
        client_of(kind, service.url).check("", "1000/min")


def test_refund_with_the_real_service_applies_once(
    kind: str, service: TidegateService, key: str
) -> None:
    client = client_of(kind, service.url)
    decision = client.check(key, ["5/min", "9/h token-bucket"], 3, receipt=True)
    assert client.refund(decision) is True
    assert client.refund(decision) is False
    statuses = client.peek(key, ["5/min", "9/h token-bucket"]).limits
    assert [status.remaining for status in statuses] == [5, 9]
    decision = client.check(key, "5/min", 4, receipt=True)
    assert client.refund(decision.receipt, used=1) is True
    assert client.peek(key, "5/min").remaining == 4
    with pytest.raises(InvalidInput, match="receipt"):
        client.refund("not a receipt")


def test_wait_with_the_real_service(kind: str, service: TidegateService, key: str) -> None:
    client = client_of(kind, service.url)
    assert client.check(key, "1/200ms").allowed
    assert client.wait(key, "1/200ms", max_wait=GENEROUS).allowed
    assert client.check(key, "1/h").allowed
    denied = client.wait(key, "1/h", max_wait=1)
    assert not denied.allowed, "the wait is too long"
    assert denied.retry_after > 1


def test_check_request_without_rules_is_invalid_input(kind: str, service: TidegateService) -> None:
    with pytest.raises(InvalidInput, match="no rules"):
        client_of(kind, service.url).check_request("GET", "/", {}, "203.0.113.9")


def test_messages_are_those_of_the_api(kind: str, fake: FakeService) -> None:
    client = client_of(kind, fake.url + "/base/", token="secret")
    client.check(b"k", "10/min", receipt=True)
    client.check_all([("a", "1/s"), ("b", "2/60s token-bucket burst=9", 3)])
    client.peek("k", "5/h")
    client.wait("k", "5/h", max_wait=1.5)
    client.check_request("GET", "/x", [("a", "1"), ("a", "2")], "203.0.113.9", receipt=True)
    client.check_request("GET", "/x", {"a": "1"}, "::1")
    fake.answer = lambda path, body: (200, {}, {"applied": len(body) > 1, "reason": "expired"})
    assert client.refund("r1") is False
    assert client.refund("r2", used=3) is True
    assert client.refund("r3", status=503) is True
    request = {"method": "GET", "path": "/x", "peer": "203.0.113.9"}
    pairs = [["a", "1"], ["a", "2"]]
    assert [body for _, _, body in fake.requests] == [
        {"key": "k", "limit": "10/min", "cost": 1, "receipt": True},
        {
            "checks": [
                {"key": "a", "limit": "1/s", "cost": 1},
                {"key": "b", "limit": "2/min token-bucket burst=9", "cost": 3},
            ]
        },
        {"key": "k", "limit": "5/h", "cost": 0},
        {"key": "k", "limit": "5/h", "cost": 1, "wait_ms": 1500},
        {"request": {**request, "headers": pairs}, "receipt": True},
        {"request": {**request, "headers": [["a", "1"]], "peer": "::1"}},
        {"receipt": "r1"},
        {"receipt": "r2", "used": 3},
        {"receipt": "r3", "status": 503},
    ]
    path, headers, _ = fake.requests[0]
    assert path == "/base/v1/check"
    assert fake.requests[-1][0] == "/base/v1/refund"
    assert headers["authorization"] == "Bearer secret"
    assert headers["content-type"] == "application/json"


def test_refund_of_a_decision_uses_its_receipt(kind: str, fake: FakeService) -> None:
    client = client_of(kind, fake.url)
    fake.answer = lambda path, body: (200, {}, {**DECISION, "receipt": "r", "applied": True})
    assert client.refund(client.check("k", "10/min", receipt=True)) is True
    assert fake.requests[-1][2] == {"receipt": "r"}
    with pytest.raises(InvalidInput, match="receipt=True"):
        client.refund(Decision(True))
    assert client.refund(Decision(False)) is False, "a denial charged nothing"


def test_refusal_by_rules_is_relayed_as_it_is(kind: str, fake: FakeService) -> None:
    response = {"status": 429, "headers": {"Retry-After": "7", "x-custom": "a"}, "body": "wäit"}
    denied = {**DECISION, "allowed": False, "error": "rate_limited", "response": response}
    fake.answer = lambda path, body: (429, {}, denied)
    decision = client_of(kind, fake.url).check_request("GET", "/", {}, "::1")
    relayed = decision.refusal()
    assert (relayed.status, relayed.body.decode()) == (429, "wäit")
    assert relayed.headers == {"retry-after": "7", "x-custom": "a"}


def test_admission_by_rules_has_headers_and_endings(kind: str, fake: FakeService) -> None:
    fields = {"response": {"headers": {"X-Plan": "pro"}}, "refund_on": ["failure"], "receipt": "r"}
    fake.answer = lambda path, body: (200, {"x-ratelimit-limit": "1"}, {**DECISION, **fields})
    decision = client_of(kind, fake.url).check_request("GET", "/", {}, "::1", receipt=True)
    assert decision.headers == {"x-plan": "pro"}
    assert decision.refund_on == ("failure",)


def test_ban_is_403_with_its_end(kind: str, fake: FakeService) -> None:
    banned = {"allowed": False, "source": "store", "limits": [], "error": "banned"}
    banned = {
        **banned,
        "message": "this caller is banned",
        "retry_after": 2,
        "retry_after_ms": 1500,
    }
    fake.answer = lambda path, body: (403, {}, banned)
    decision = client_of(kind, fake.url).check("k", "10/min")
    assert (decision.banned, decision.status, decision.retry_after) == (True, 403, 1.5)
    response = decision.refusal()
    assert (response.status, response.headers["retry-after"]) == (403, "2")


def test_store_that_is_down_with_on_failure_deny_is_503(kind: str, fake: FakeService) -> None:
    body = {"allowed": False, "source": "none", "limits": [], "error": "unavailable"}
    fake.answer = lambda path, _: (503, {}, {**body, "message": "down", "retry_after": 1})
    decision = client_of(kind, fake.url).check("k", "10/min")
    assert (decision.allowed, decision.status) == (False, 503)
    assert decision.refusal().headers["retry-after"] == "1"


_ANSWERS: list[tuple[int, Any, type[TidegateError]]] = [
    (400, {"error": "bad_request", "message": "limit: unknown unit"}, InvalidInput),
    (413, {"error": "too_large", "message": "…"}, InvalidInput),
    (401, {"error": "unauthenticated", "message": "…"}, PermissionDenied),
    (403, {"error": "forbidden", "message": "…"}, PermissionDenied),
    (404, {"error": "not_found", "message": "…"}, ProtocolError),
    (500, {"error": "internal"}, Unavailable),
    (503, {"error": "unavailable"}, Unavailable),
    (502, b"<html>bad gateway</html>", Unavailable),
    (200, b"not json", ProtocolError),
    (200, b"[" * 100_000, ProtocolError),
    (200, [], ProtocolError),
    (200, {}, ProtocolError),
    (200, {"allowed": "yes"}, ProtocolError),
    (200, {**DECISION, "limits": [{"name": "x"}]}, ProtocolError),
    (200, {**DECISION, "limits": 5}, ProtocolError),
    (200, {**DECISION, "response": []}, ProtocolError),
    (200, b"x" * (1024 * 1024 + 1), ProtocolError),
]


@pytest.mark.parametrize(("status", "body", "error"), _ANSWERS, ids=range(len(_ANSWERS)))
def test_answer_that_is_no_decision_is_a_typed_error(
    kind: str, fake: FakeService, status: int, body: Any, error: type[TidegateError]
) -> None:
    fake.answer = lambda path, _: (status, {}, body)
    with pytest.raises(error):
        client_of(kind, fake.url).check("k", "10/min")


_BYTES = [
    b"",
    b"garbage\r\n\r\n",
    b"HTTP/1.1 abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"x" * 100_000,
]


@pytest.mark.parametrize("answer", _BYTES, ids=range(len(_BYTES)))
def test_answer_that_is_not_http_is_a_typed_error(
    kind: str, fake: FakeService, answer: bytes
) -> None:
    def send(connection: socket.socket, _: bytes) -> None:
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_RDWR)

    fake.send = send
    with pytest.raises((ProtocolError, Unavailable)):
        client_of(kind, fake.url).check("k", "10/min")


def test_chunked_answer_in_small_pieces_is_read(kind: str, fake: FakeService) -> None:
    body = json.dumps(DECISION).encode()
    chunks = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in body) + b"0\r\n\r\n"
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def send(connection: socket.socket, _: bytes) -> None:
        for at in range(0, len(head + chunks), 7):
            connection.sendall((head + chunks)[at : at + 7])

    fake.send = send
    assert client_of(kind, fake.url).check("k", "10/min").allowed


def test_connection_that_the_server_closed_is_replaced(fake: FakeService) -> None:
    fake.requests_per_connection = 2
    client = client_of("blocking", fake.url)
    for _ in range(10):
        assert client.check("k", "10/min").allowed
    assert (len(fake.requests), fake.connections) == (10, 5)

    async def run() -> None:
        async with AsyncTidegate(fake.url, deadline=GENEROUS, on_error="raise") as client:
            for _ in range(10):
                assert (await client.check("k", "10/min")).allowed

    asyncio.run(run())
    assert (len(fake.requests), fake.connections) == (20, 10)


def test_answer_with_connection_close_ends_the_connection(fake: FakeService) -> None:
    fake.send = lambda connection, _: connection.sendall(
        encode_answer(200, {"connection": "close"}, DECISION)
    )
    client = client_of("blocking", fake.url)
    for _ in range(3):
        client.check("k", "10/min")
    assert fake.connections == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_client_works_in_another_event_loop(fake: FakeService) -> None:
    client = AsyncTidegate(fake.url, deadline=GENEROUS, on_error="raise")
    for _ in range(2):
        assert asyncio.run(client.check("k", "10/min")).allowed


def test_child_process_opens_connections_of_its_own(fake: FakeService) -> None:
    program = f"""
import os
from tidegate import Tidegate
client = Tidegate({fake.url!r}, deadline={GENEROUS}, on_error="raise")
client.check("k", "10/min")
child = os.fork()
client.check("k", "10/min")
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    environment = {"PYTHONPATH": str(PACKAGE / "src")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    assert (len(fake.requests), fake.connections) == (3, 2)


def test_tls_is_verified(kind: str, tmp_path: Path) -> None:
    certificate, secret = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=localhost", "-keyout", str(secret)]
    command += ["-addext", "subjectAltName=DNS:localhost", "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, secret)
    fake = FakeService(server_side)
    try:
        url = fake.url.replace("http://127.0.0.1", "https://localhost")
        trusting = ssl.create_default_context(cafile=str(certificate))
        client = client_of(kind, url, ssl_context=trusting)
        for _ in range(3):
            assert client.check("k", "10/min").allowed
        assert fake.connections == 1, "the connection is reused"
        with pytest.raises(Unavailable, match="certificate"):
            client_of(kind, url).check("k", "10/min")
        assert len(fake.requests) == 3, "nothing is sent to an unknown server"
    finally:
        fake.close()


def test_host_name_is_resolved(service: TidegateService, kind: str, key: str) -> None:
    url = service.url.replace("127.0.0.1", "localhost")
    assert client_of(kind, url).check(key, "10/min").allowed


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8080",
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://h:x",
        "http://h/?a",
        "http://u:p@h",
        "http://h h",
        "http://h\r\nx: y",
        "http://[::1",
        None,
        b"http://h",
    ],
)
def test_malformed_url_is_invalid_input(url: Any) -> None:
    for client in (Tidegate, AsyncTidegate):
        with pytest.raises(InvalidInput):
            client(url)


@pytest.mark.parametrize(
    "options",
    [
        {"on_error": "ignore"},
        {"on_error": None},
        {"deadline": 0},
        {"deadline": -1},
        {"deadline": float("nan")},
        {"deadline": float("inf")},
        {"deadline": "1"},
        {"deadline": True},
        {"token": "a\r\nb"},
        {"token": ""},
        {"token": b"t"},
        {"max_idle_connections": "many"},
    ],
)
def test_malformed_option_is_invalid_input(options: dict[str, Any]) -> None:
    for client in (Tidegate, AsyncTidegate):
        with pytest.raises(InvalidInput):
            client("http://127.0.0.1", **options)


_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("check", ("k", "10/fortnight"), {}),
    ("check", ("k", 10), {}),
    ("check", ("k", b"10/min"), {}),
    ("check", ("k", []), {}),
    ("check", ("k", ["1/s"] * 33), {}),
    ("check", ("k", "10/min", -1), {}),
    ("check", ("k", "10/min", 2**32), {}),
    ("check", ("k", "10/min", 10**100), {}),
    ("check", ("k", "10/min", 1.5), {}),
    ("check", ("k", "10/min", True), {}),
    ("check", ("k", "10/min", "1"), {}),
    ("check", ("k" * 65537, "10/min"), {}),
    ("check", (42, "10/min"), {}),
    ("check", (b"\xff", "10/min"), {}),
    ("check", ("\ud800", "10/min"), {}),
    ("check_all", ([],), {}),
    ("check_all", ([("k",)],), {}),
    ("check_all", ([("k", "1/s")] * 33,), {}),
    ("check_all", ("k",), {}),
    ("wait", ("k", "10/min"), {"max_wait": 61}),
    ("wait", ("k", "10/min"), {"max_wait": -1}),
    ("wait", ("k", "10/min"), {"max_wait": "1"}),
    ("check_request", ("GET", "/", {"a": 1}, "::1"), {}),
    ("check_request", ("GET", "/", [("a",)], "::1"), {}),
    ("check_request", ("GET", None, {}, "::1"), {}),
    ("refund", ("",), {}),
    ("refund", ("r",), {"used": 1, "status": 200}),
    ("refund", ("r",), {"used": -1}),
    ("refund", ("r",), {"status": 99}),
]


@pytest.mark.parametrize(("method", "arguments", "named"), _CALLS, ids=range(len(_CALLS)))
def test_malformed_argument_is_invalid_input_and_not_sent(
    kind: str, fake: FakeService, method: str, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    client = client_of(kind, fake.url, on_error="allow")
    with pytest.raises(InvalidInput) as raised:
        getattr(client, method)(*arguments, **named)
    assert len(str(raised.value)) < 400
    assert fake.requests == []
