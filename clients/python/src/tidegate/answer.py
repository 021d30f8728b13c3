"""Renders decisions as HTTP headers and responses, as the Rust layer does.

Every wait is exact to the microsecond until it is rendered. It is then rounded up, once, so a
client that waits as long as a header says never retries too early.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .decision import Decision, LimitStatus, Response, strictest
from .limit import period

_JSON = "application/json"
_PROBLEM = "application/problem+json"
_PROBLEM_TYPES = "https://iana.org/assignments/http-problem-types#"
#: A quality value (`q`) of HTTP: 0 to 1, with at most three decimal places.
_WEIGHT = re.compile(r"[01](?:\.[0-9]{0,3})?")
_BANNED = "this caller is banned"
_UNAVAILABLE = "the rate limiter is temporarily unavailable; try again shortly"
#: The headers of the service's own answer that belong in the response to the client.
RATE_LIMIT_HEADERS = (
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "ratelimit",
    "ratelimit-policy",
    "ratelimit-limit",
    "ratelimit-remaining",
    "ratelimit-reset",
    "access-control-expose-headers",
)


def rate_limit_headers(decision: Decision) -> Mapping[str, str]:
    """Returns the rate-limit headers of a decision, in the styles `x` and `ietf`, by lower-case
    name.

    Empty for a ban, and if no counter was read.
    """
    if decision.service_headers is not None:
        return decision.service_headers
    shown = strictest(decision.limits)
    if shown is None or decision.banned or decision.source == "none":
        return {}
    headers = {"x-ratelimit-limit": str(shown.quota), "x-ratelimit-remaining": str(shown.remaining)}
    wait_us = _until_next(shown)
    if wait_us is not None and decision.at_us is not None:
        headers["x-ratelimit-reset"] = str(_ceil(decision.at_us + wait_us, 1_000_000))
    names = _distinct([status.name for status in decision.limits])
    pairs = list(zip(names, decision.limits))
    headers["ratelimit"] = ", ".join(_ietf_status(name, status) for name, status in pairs)
    headers["ratelimit-policy"] = ", ".join(_ietf_policy(name, status) for name, status in pairs)
    return headers


def refusal(decision: Decision, accept: Sequence[str] = ()) -> Response:
    """Returns the response to a refused request: that of the service, or the default one.

    The default is JSON, or an RFC 9457 problem document if the lines of `Accept` ask for it.
    """
    if decision.response is not None:
        return decision.response
    fields = decision.service_refusal
    if fields is None:
        fields = _fields(decision)
    is_problem = asks_for_problem(accept)
    if is_problem:
        fields = _problem(decision, fields)
    headers = {"content-type": _PROBLEM if is_problem else _JSON, "cache-control": "no-store"}
    seconds = _at_least_one(decision.retry_after_us, 1_000_000)
    if seconds is not None:
        headers["retry-after"] = str(seconds)
    headers.update(rate_limit_headers(decision))
    return Response(decision.status, headers, _json(fields))


def asks_for_problem(accept: Sequence[str]) -> bool:
    """Returns whether the lines of an `Accept` header ask for `application/problem+json`.

    They must name it, with a weight above 0 and not below that of `application/json`.
    """
    weights = {_PROBLEM: 0.0, _JSON: 0.0}
    for media_range in ",".join(accept).split(","):
        name, _, parameters = media_range.partition(";")
        name = name.strip().lower()
        if name in weights:
            weights[name] = max(weights[name], _weight(parameters))
    return weights[_PROBLEM] > 0 and weights[_PROBLEM] >= weights[_JSON]


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, separator, value = parameter.partition("=")
        if separator and name.strip().lower() == "q":
            value = value.strip()
            return min(float(value), 1.0) if _WEIGHT.fullmatch(value) else 0.0
    return 1.0


def bad_request(message: str) -> Response:
    """Returns the response to a request that the service cannot read."""
    headers = {"content-type": _JSON, "cache-control": "no-store"}
    return Response(400, headers, _json({"error": "bad_request", "message": message}))


def _fields(decision: Decision) -> dict[str, Any]:
    waits = {
        "retry_after": _at_least_one(decision.retry_after_us, 1_000_000),
        "retry_after_ms": _at_least_one(decision.retry_after_us, 1_000),
    }
    if decision.banned:
        return {"error": "banned", "message": _BANNED, **waits}
    if decision.is_unavailable:
        return {"error": "unavailable", "message": _UNAVAILABLE, **waits}
    refusing = [status for status in decision.limits if not status.allowed]
    status = strictest(refusing)
    if status is None:
        return {"error": "rate_limited", "message": "too many requests", **waits}
    index = next(at for at, each in enumerate(decision.limits) if each is status)
    return {
        "error": "rate_limited",
        "message": _message(status, waits["retry_after"]),
        "limit": status.quota,
        **waits,
        "policy": _distinct([each.name for each in decision.limits])[index],
    }


def _problem(decision: Decision, fields: Mapping[str, Any]) -> dict[str, Any]:
    kind, title = "quota-exceeded", "Quota exceeded"
    if decision.is_unavailable:
        kind = "temporary-reduced-capacity"
        title = "The rate limiter is temporarily unavailable"
    names = _distinct([status.name for status in decision.limits])
    violated = [name for name, status in zip(names, decision.limits) if not status.allowed]
    return {
        "type": _PROBLEM_TYPES + kind,
        "title": title,
        "status": decision.status,
        "detail": fields["message"],
        **({"violated-policies": violated} if violated else {}),
        **{name: value for name, value in fields.items() if name not in ("error", "message")},
    }


def _message(status: LimitStatus, seconds: int | None) -> str:
    limit = f"{status.quota} {period(status.window_us)}"
    if seconds is None:
        at_once = "" if status.cost_max is None else f", at most {status.cost_max} at once"
        return f"a request that costs {status.cost} can never pass: the limit is {limit}{at_once}"
    unit = "second" if seconds == 1 else "seconds"
    return f"the limit of {limit} has been reached; try again in {seconds} {unit}"


def _ietf_policy(name: str, status: LimitStatus) -> str:
    window = status.window_us
    return f'"{name}";q={status.quota}' + (
        f";w={window // 1_000_000}" if window % 1_000_000 == 0 else ""
    )


def _ietf_status(name: str, status: LimitStatus) -> str:
    wait_us = _until_next(status)
    return f'"{name}";r={status.remaining}' + (
        "" if wait_us is None else f";t={_ceil(wait_us, 1_000_000)}"
    )


def _until_next(status: LimitStatus) -> int | None:
    return status.next_after_us if status.allowed else status.retry_after_us


def _distinct(names: Sequence[str]) -> list[str]:
    """Appends the smallest free number, from 2, to each name that an earlier limit has."""
    distinct = list(names)
    for index, name in enumerate(distinct):
        if name in distinct[:index]:
            taken = distinct[:index] + distinct[index + 1 :]
            number = 2
            while f"{name}-{number}" in taken:
                number += 1
            distinct[index] = f"{name}-{number}"
    return distinct


def _at_least_one(us: int | None, unit_us: int) -> int | None:
    return None if us is None else max(1, _ceil(us, unit_us))


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
