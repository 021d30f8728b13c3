"""Options, calls and answers of the service, for the blocking and the asyncio client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Generic, TypeVar, Union

from . import service
from .decision import Decision
from .errors import InvalidInput, Unavailable, Undecided
from .failure import FailurePolicy, check_deadline
from .http1 import Answer, Endpoint, encode_post
from .keys import KeyLike
from .limit import LimitLike

T = TypeVar("T")
#: One limit or several.
LimitsLike = Union[LimitLike, Sequence[LimitLike]]


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request to the service, its deadline in seconds, and the decoder of its answer."""

    request: bytes
    deadline: float
    decode: Callable[[Answer], T]


class ServiceCore:
    """The options of a client of the service, and the calls that it makes."""

    def __init__(
        self, url: str, token: str | None, deadline: float, on_error: str, max_idle_connections: int
    ) -> None:
        self.endpoint = Endpoint.parse(url)
        self.deadline = check_deadline(deadline)
        self.failure = FailurePolicy(on_error)
        if isinstance(max_idle_connections, bool) or not isinstance(max_idle_connections, int):
            raise InvalidInput("max_idle_connections must be a whole number")
        self.max_idle_connections = max(0, max_idle_connections)
        self._head = self.endpoint.head(token)

    def check(
        self,
        checks: Sequence[service.ParsedCheck],
        receipt: bool = False,
        wait: float | None = None,
    ) -> Call[Decision]:
        """Returns the call of an explicit check.

        With `wait`, the deadline begins after that many seconds.
        """
        wait_ms = None if wait is None else service.wait_ms_of(wait)
        body = service.encode_check(checks, receipt, wait_ms)
        deadline = self.deadline + (wait_ms or 0) / 1000
        return self._call(
            service.CHECK_PATH, body, lambda answer: service.decode_check(answer, checks), deadline
        )

    def check_request(
        self, method: str, path: str, headers: service.HeadersLike, peer: str, receipt: bool
    ) -> Call[Decision]:
        """Returns the call of a check by rules."""
        body = service.encode_request(method, path, headers, peer, receipt)
        return self._call(
            service.CHECK_PATH, body, lambda answer: service.decode_check(answer, None)
        )

    def refund(
        self, decision: Decision | str, used: int | None, status: int | None
    ) -> Call[bool] | None:
        """Returns the call of a refund, or `None` if the decision charged nothing."""
        receipt = decision
        if isinstance(decision, Decision):
            if decision.error is not None or not decision.allowed:
                return None
            receipt = decision.receipt if isinstance(decision.receipt, str) else ""
        assert isinstance(receipt, str)
        return self._call(
            service.REFUND_PATH, service.encode_refund(receipt, used, status), service.decode_refund
        )

    def refund_failed(self, error: Undecided) -> bool:
        """Logs that a refund failed, or raises its error if `on_error` is `raise`."""
        if self.failure.on_error == "raise":
            raise error
        self.failure.report("units were not given back", error)
        return False

    def unreachable(self, error: BaseException) -> Unavailable:
        """Returns the error of a connection that failed."""
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Unavailable(f"cannot reach {self.endpoint}: {reason}")

    def too_slow(self, deadline: float) -> Unavailable:
        """Returns the error of a call that exceeded its deadline in seconds."""
        return Unavailable(f"{self.endpoint} did not answer within {deadline * 1000:.0f} ms")

    def _call(
        self, path: str, body: bytes, decode: Callable[[Answer], T], deadline: float | None = None
    ) -> Call[T]:
        request = encode_post(self.endpoint.base + path, self._head, body)
        return Call(request, self.deadline if deadline is None else deadline, decode)


def peek_checks(key: KeyLike, limit: LimitsLike) -> list[service.ParsedCheck]:
    """Returns the checks of a peek: all limits with cost 0."""
    return service.with_limits(key, limit, 0)
