"""Calls of the embedded script and their replies, without I/O.

`tidegate.lua` is a copy of the script that every Tidegate component runs. Its opening comment
specifies KEYS, ARGV and the reply.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .decision import Decision, LimitStatus
from .errors import (
    ForeignValue,
    InvalidInput,
    PermissionDenied,
    ProtocolError,
    TidegateError,
    Unavailable,
)
from .keys import ban_key, counter_key, key_bytes
from .limit import Limit
from .service import ParsedCheck

T = TypeVar("T")

SOURCE = Path(__file__).with_name("tidegate.lua").read_text(encoding="utf-8")
SHA1 = hashlib.sha1(SOURCE.encode("utf-8"), usedforsecurity=False).hexdigest()

_MALFORMED = "the reply of the script is not in the documented form; is it another version?"


@dataclass(frozen=True)
class ScriptCall(Generic[T]):
    """A call of the script: its keys and arguments, and the decoder of its reply."""

    keys: Sequence[str]
    arguments: Sequence[str]
    decode: Callable[[Any], T]

    @property
    def by_sha(self) -> tuple[Any, ...]:
        """The command that runs the script if the server has cached it."""
        return ("EVALSHA", SHA1, len(self.keys), *self.keys, *self.arguments)

    @property
    def by_source(self) -> tuple[Any, ...]:
        """The command that sends and runs the script."""
        return ("EVAL", SOURCE, len(self.keys), *self.keys, *self.arguments)


class ScriptReceipt:
    """The charges of one admission. They can be given back once."""

    __slots__ = ("_charges", "_lock", "_now")

    def __init__(self, now: int, charges: list[tuple[str, Limit, LimitStatus, int]]) -> None:
        self._now, self._lock = now, threading.Lock()
        self._charges: list[tuple[str, Limit, LimitStatus, int]] | None = charges

    def take(self) -> ScriptCall[bool] | None:
        """Returns the call of the refund the first time, and `None` after that."""
        with self._lock:
            charges, self._charges = self._charges, None
        if charges is None:
            return None
        keys = [counter for counter, _, _, _ in charges]
        arguments = ["", f"refund {len(keys)}"]
        for _, limit, status, refunded in charges:
            charged = f"{self._now} {status.reset_after_us} {refunded}"
            arguments += [limit.line(status.cost or 0), charged]
        return ScriptCall(keys, arguments, _decode_refund)


def check_call(prefix: str, checks: Sequence[ParsedCheck], now: str = "") -> ScriptCall[Decision]:
    """Returns the call of a check. `now` is a time in microseconds for tests.

    Reads the bans of all subjects unless all costs are 0. Raises `InvalidInput` if a key is
    malformed, or if two limits use the same counter.
    """
    subjects = [key_bytes(key) for key, _, _ in checks]
    counters = [
        counter_key(prefix, subject, limit) for subject, (_, limit, _) in zip(subjects, checks)
    ]
    if len(set(counters)) < len(counters):
        raise InvalidInput(
            "two limits with the same key, algorithm and window use the same counter; merge them "
            "or give them different keys"
        )
    bans: list[str] = []
    if any(cost for _, _, cost in checks):
        bans = [ban_key(prefix, subject) for subject in dict.fromkeys(subjects)]
    lines = [limit.line(cost) for _, limit, cost in checks]
    asked = [(limit, cost) for _, limit, cost in checks]

    def decode(reply: Any) -> Decision:
        return _decode_check(reply, asked, counters)

    return ScriptCall([*bans, *counters], [now, f"check {len(checks)} {len(bans)}", *lines], decode)


def error_of(message: str) -> TidegateError:
    """Returns the error of an error reply of Redis, by its first word."""
    text = message[:256]
    words = text.split(" ", 2)
    code = words[1] if words[0] == "TIDEGATE_PARTLY" and len(words) > 1 else words[0]
    if code in ("TIDEGATE_FOREIGN", "WRONGTYPE"):
        return ForeignValue(f"a key in Redis holds data that Tidegate did not write: {text}")
    if code.startswith("TIDEGATE_"):
        return ProtocolError(f"the script rejected the call: {text}")
    is_denied_in_script = "ACL failure in script" in text or "executing the script can't" in text
    if code in ("NOPERM", "NOAUTH", "WRONGPASS") or is_denied_in_script:
        return PermissionDenied(f"Redis does not permit the call: {text}")
    if code == "CROSSSLOT":
        return InvalidInput("on Redis Cluster, all limits of a check must have the same key")
    if code in ("MOVED", "ASK"):
        return Unavailable(
            "the server is a node of a Redis Cluster and does not have the key; use a cluster "
            "client, such as redis.RedisCluster"
        )
    return Unavailable(f"Redis cannot decide: {text}")


def _decode_check(
    reply: Any, asked: Sequence[tuple[Limit, int]], counters: Sequence[str]
) -> Decision:
    now, numbers = _split(reply)
    if len(numbers) == 2 and numbers[0] == 0:
        return _banned(now, asked, numbers[1] if numbers[1] >= 0 else None)
    if numbers[0] != 1 or len(numbers) != 1 + 6 * len(asked):
        raise ProtocolError(_MALFORMED)
    statuses, refunded = [], []
    for index, (limit, cost) in enumerate(asked):
        allowed, remaining, *waits, refunded_before = numbers[1 + 6 * index : 7 + 6 * index]
        if allowed not in (0, 1) or min(remaining, refunded_before) < 0 or min(waits) < -1:
            raise ProtocolError(_MALFORMED)
        refunded.append(refunded_before)
        retry, following, reset = (None if wait == -1 else wait for wait in waits)
        statuses.append(_status(limit, cost, bool(allowed), remaining, retry, following, reset))
    is_allowed = all(status.allowed for status in statuses)
    charged = zip(counters, asked, statuses, refunded)
    receipt = _receipt(now, charged) if is_allowed else None
    return Decision(is_allowed, tuple(statuses), "store", at_us=now, receipt=receipt)


def _decode_refund(reply: Any) -> bool:
    _, numbers = _split(reply)
    if numbers != [1]:
        raise ProtocolError(_MALFORMED)
    return True


def _split(reply: Any) -> tuple[int, list[int]]:
    """Returns the time of a reply and the numbers after it."""
    if not isinstance(reply, (list, tuple)) or len(reply) < 2:
        raise ProtocolError(_MALFORMED)
    for item in reply:
        if isinstance(item, Exception):
            raise error_of(str(item))
        if not isinstance(item, int):
            raise ProtocolError(_MALFORMED)
    if reply[0] < 0:
        raise ProtocolError(_MALFORMED)
    return reply[0], list(reply[1:])


def _banned(now: int, asked: Sequence[tuple[Limit, int]], ban_us: int | None) -> Decision:
    statuses = (_status(limit, cost, False, 0, ban_us, ban_us, ban_us) for limit, cost in asked)
    return Decision(False, tuple(statuses), "store", banned=True, at_us=now, ban_us=ban_us)


def _status(
    limit: Limit,
    cost: int,
    allowed: bool,
    remaining: int,
    retry_after_us: int | None,
    next_after_us: int | None,
    reset_after_us: int | None,
) -> LimitStatus:
    return LimitStatus(
        name=limit.name,
        quota=limit.quota,
        window_us=limit.window_us,
        cost=cost,
        allowed=allowed,
        remaining=remaining,
        retry_after_us=retry_after_us,
        next_after_us=next_after_us,
        reset_after_us=reset_after_us,
        cost_max=limit.cost_max,
    )


def _receipt(
    now: int, charged: Iterable[tuple[str, tuple[Limit, int], LimitStatus, int]]
) -> ScriptReceipt | None:
    """Returns the receipt of an admission, or `None` if it charged nothing.

    `charged` has the counter, the limit and the cost, the status, and the refunded units.
    """
    charges = [
        (counter, limit, status, refunded)
        for counter, (limit, cost), status, refunded in charged
        if cost > 0 and status.reset_after_us is not None
    ]
    return ScriptReceipt(now, charges) if charges else None
