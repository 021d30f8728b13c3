"""The messages of `tidegate serve`, without I/O: requests and answers of its endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

from .answer import RATE_LIMIT_HEADERS
from .decision import Decision, LimitStatus, Response
from .errors import InvalidInput, PermissionDenied, ProtocolError, TidegateError, Unavailable
from .http1 import Answer
from .keys import KeyLike, key_text
from .limit import LIMITS_MAX, Limit, LimitLike, check_cost, parse_limits

CHECK_PATH = "/v1/check"
REFUND_PATH = "/v1/refund"
#: The longest time that the service waits for a check to pass, in milliseconds.
WAIT_MS_MAX = 60_000

_REFUSAL_FIELDS = (
    "error",
    "message",
    "limit",
    "retry_after",
    "retry_after_ms",
    "policy",
    "rule",
    "plan",
    "upgrade_url",
)
_DECISION_STATUSES = (200, 403, 414, 429, 503)

#: Header lines of a request: a mapping, or pairs if a name occurs several times.
HeadersLike = Union[Mapping[str, str], Iterable[tuple[str, str]]]
#: A check of several keys: `(key, limit)` or `(key, limit, cost)`.
CheckLike = Union[tuple[KeyLike, LimitLike], tuple[KeyLike, LimitLike, int]]

#: A validated check: the key, the limit and the cost.
ParsedCheck = tuple[KeyLike, Limit, int]


def parse_checks(checks: Sequence[CheckLike]) -> list[ParsedCheck]:
    """Validates a list of checks.

    Raises `InvalidInput` if it is malformed, or has none or more than 32.
    """
    if not isinstance(checks, Sequence) or not 1 <= len(checks) <= LIMITS_MAX:
        raise InvalidInput(
            f"expected a list of 1 to {LIMITS_MAX} checks (key, limit) or (key, limit, cost)"
        )
    parsed: list[ParsedCheck] = []
    for check in checks:
        if not isinstance(check, (tuple, list)) or not 2 <= len(check) <= 3:
            raise InvalidInput("expected a check (key, limit) or (key, limit, cost)")
        (limit,) = parse_limits([check[1]])
        parsed.append((check[0], limit, check_cost(check[2] if len(check) == 3 else 1)))
    return parsed


def with_limits(
    key: KeyLike, limit: LimitLike | Sequence[LimitLike], cost: int
) -> list[ParsedCheck]:
    """Returns the checks of all limits on one key.

    Raises `InvalidInput` if an argument is malformed.
    """
    cost = check_cost(cost)
    return [(key, each, cost) for each in parse_limits(limit)]


def encode_check(checks: Sequence[ParsedCheck], receipt: bool, wait_ms: int | None) -> bytes:
    """Encodes the body of an explicit check."""
    entries = [
        {"key": key_text(key), "limit": str(limit), "cost": cost} for key, limit, cost in checks
    ]
    body: dict[str, Any] = entries[0] if len(entries) == 1 else {"checks": entries}
    if receipt:
        body["receipt"] = True
    if wait_ms is not None:
        body["wait_ms"] = wait_ms
    return _encode(body)


def wait_ms_of(seconds: float) -> int:
    """Converts a wait to milliseconds. Raises `InvalidInput` unless it is from 0 to 60 seconds."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds * 1000 <= WAIT_MS_MAX:
        raise InvalidInput(f"a wait must be a number of seconds from 0 to {WAIT_MS_MAX // 1000}")
    return int(seconds * 1000)


def encode_request(method: str, path: str, headers: HeadersLike, peer: str, receipt: bool) -> bytes:
    """Encodes the body of a check by rules."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    lines = []
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise InvalidInput("headers must be a mapping or pairs of strings")
        lines.append(list(pair))
    if not all(isinstance(text, str) for text in (method, path, peer)):
        raise InvalidInput("method, path and peer must be strings")
    request = {"method": method, "path": path, "headers": lines, "peer": peer}
    body: dict[str, Any] = {"request": request}
    if receipt:
        body["receipt"] = True
    return _encode(body)


def encode_refund(receipt: str, used: int | None, status: int | None) -> bytes:
    """Encodes the body of a refund."""
    if not isinstance(receipt, str) or not receipt:
        raise InvalidInput("expected a decision with a receipt; call check with receipt=True")
    if used is not None and status is not None:
        raise InvalidInput("pass used or status, not both")
    body: dict[str, Any] = {"receipt": receipt}
    if used is not None:
        body["used"] = check_cost(used)
    if status is not None:
        if isinstance(status, bool) or not isinstance(status, int) or not 100 <= status <= 599:
            raise InvalidInput("status must be a whole number from 100 to 599")
        body["status"] = status
    return _encode(body)


def decode_check(answer: Answer, checks: Sequence[ParsedCheck] | None) -> Decision:
    """Decodes the answer of `/v1/check`. `checks` are those of an explicit check, in order; `None`
    by rules.

    Raises the error that the answer reports, or `ProtocolError` if it is malformed.
    """
    body = _decode(answer)
    allowed = body.get("allowed")
    if not isinstance(allowed, bool) or answer.status not in _DECISION_STATUSES:
        raise _error_of(answer.status, body)
    try:
        limits = tuple(
            _status(entry, checks[index] if checks is not None else None)
            for index, entry in enumerate(body.get("limits", ()))
        )
        refund_on = tuple(str(ending) for ending in body.get("refund_on", ()))
        headers, response = _response(body.get("response"), allowed)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise ProtocolError("the service answered with a malformed decision") from None
    if headers is None:
        headers = {
            name: answer.headers[name] for name in RATE_LIMIT_HEADERS if name in answer.headers
        }
    refusal = (
        {name: body[name] for name in _REFUSAL_FIELDS if name in body} if "error" in body else None
    )
    ban_ms = body.get("retry_after_ms")
    return Decision(
        allowed=allowed,
        limits=limits,
        source=str(body.get("source", "none")),
        banned=answer.status == 403,
        response=response,
        receipt=body.get("receipt"),
        refund_on=refund_on,
        ban_us=ban_ms * 1000 if answer.status == 403 and isinstance(ban_ms, int) else None,
        service_headers=headers,
        service_refusal=refusal,
        service_status=answer.status,
    )


def decode_refund(answer: Answer) -> bool:
    """Decodes the answer of `/v1/refund`: whether units were given back.

    Raises the error that the answer reports, or `ProtocolError` if it is malformed.
    """
    body = _decode(answer)
    applied = body.get("applied")
    if answer.status != 200 or not isinstance(applied, bool):
        raise _error_of(answer.status, body)
    return applied


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidInput("strings must not contain lone surrogates") from None


def _decode(answer: Answer) -> dict[str, Any]:
    try:
        body = json.loads(answer.body)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        return body
    if answer.status >= 500:
        raise Unavailable(f"the service answered with status {answer.status}")
    raise ProtocolError(f"the service answered with status {answer.status} and no JSON object")


def _error_of(status: int, body: Mapping[str, Any]) -> TidegateError:
    message = body.get("message")
    reason = f": {message[:512]}" if isinstance(message, str) else ""
    if status in (400, 413, 414, 422):
        return InvalidInput(f"the service rejected the request{reason}")
    if status in (401, 403):
        return PermissionDenied(f"the service rejected the token (status {status}){reason}")
    if status >= 500 or status in (408, 409, 429):
        return Unavailable(f"the service answered with status {status}{reason}")
    return ProtocolError(f"the service answered with status {status}{reason}")


def _status(entry: Mapping[str, Any], check: ParsedCheck | None) -> LimitStatus:
    _, limit, cost = check or (None, None, None)
    return LimitStatus(
        name=str(entry["name"]),
        quota=_whole(entry["quota"]),
        window_us=_whole(entry["window_ms"]) * 1000 if limit is None else limit.window_us,
        cost=cost,
        allowed=bool(entry["allowed"]),
        remaining=_whole(entry["remaining"]),
        retry_after_us=_wait(entry["retry_after_ms"]),
        next_after_us=_wait(entry["next_after_ms"]),
        reset_after_us=_wait(entry["reset_after_ms"]),
        rule=entry.get("rule"),
        cost_max=None if limit is None else limit.cost_max,
    )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return int(value)


def _wait(value: Any) -> int | None:
    return None if value is None else int(_whole(value * 1000))


def _response(value: Any, allowed: bool) -> tuple[dict[str, str] | None, Response | None]:
    """Returns the headers to add and the refusal to relay, of the field `response`."""
    if value is None:
        return None, None
    headers = {str(name).lower(): str(text) for name, text in value["headers"].items()}
    if allowed:
        return headers, None
    return headers, Response(_whole(value["status"]), headers, str(value["body"]).encode("utf-8"))
