"""Decisions: whether a request is admitted, and the status of each of its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import Undecided


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / 1_000_000


class LimitStatus(NamedTuple):
    """The status of one limit after a decision. A wait of `None` means never."""

    #: The name of the limit in headers, such as `per-minute`.
    name: str
    quota: int
    window_us: int
    #: The units that the check asked for. `None` if the rules of the service chose them.
    cost: int | None
    allowed: bool
    #: The units left after the decision, also on a denial.
    remaining: int
    retry_after_us: int | None
    next_after_us: int | None
    reset_after_us: int | None
    #: The rule of the service that the limit belongs to.
    rule: str | None = None
    #: The largest cost that can ever pass. `None` if the service decided.
    cost_max: int | None = None

    @property
    def retry_after(self) -> float | None:
        """Seconds until this request would pass.

        0 on an admission, except the wait of a `leaky-bucket`.
        """
        return _seconds(self.retry_after_us)

    @property
    def next_after(self) -> float | None:
        """Seconds until one more unit is available."""
        return _seconds(self.next_after_us)

    @property
    def reset_after(self) -> float | None:
        """Seconds until the limit is whole again."""
        return _seconds(self.reset_after_us)

    def is_stricter_than(self, other: LimitStatus) -> bool:
        """Returns whether this limit restricts the client more than `other`.

        A denial is stricter than an admission, a longer `retry_after` than a shorter one, a smaller
        fraction of the quota than a larger one.
        """
        if self.allowed != other.allowed:
            return not self.allowed
        if self.allowed:
            return self.remaining * other.quota < other.remaining * self.quota
        if self.retry_after_us is None or other.retry_after_us is None:
            return self.retry_after_us is None and other.retry_after_us is not None
        return self.retry_after_us > other.retry_after_us


@dataclass(frozen=True)
class Response:
    """A response to relay to the client: status, headers by lower-case name, and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Decision:
    """The answer to a check."""

    #: Whether the request may proceed.
    allowed: bool
    #: One status per limit, in the order of the check. Empty if no counter was read.
    limits: tuple[LimitStatus, ...] = ()
    #: The component that decided: `store`, `deny_cache`, `local` or `none`.
    source: str = "none"
    #: Whether a ban refused the request.
    banned: bool = False
    #: The reason why there is no decision, if `on_error` has allowed or denied the request.
    error: Undecided | None = None
    #: By rules: the refusal to relay, or `None` for an admission or an older service.
    response: Response | None = None
    #: Proof of an admission, for `refund`. `None` if nothing was charged or the check did not ask
    #: for it.
    receipt: Any | None = field(default=None, repr=False, compare=False)
    #: By rules: the outcomes, `success` or `failure`, for which a refund gives units back.
    refund_on: tuple[str, ...] = ()
    #: The time of the decision in microseconds since the epoch, by the server's clock. `None` from
    #: the service.
    at_us: int | None = None
    #: The remaining time of the ban. `None` without a ban, or if it has no end.
    ban_us: int | None = None
    #: The rate-limit headers that the service has written. `None`: compute them.
    service_headers: Mapping[str, str] | None = field(default=None, repr=False)
    #: The fields of the refusal that the service has written. `None`: compute them.
    service_refusal: Mapping[str, Any] | None = field(default=None, repr=False)
    #: The status of the service's answer. `None` from Redis.
    service_status: int | None = None

    def __bool__(self) -> bool:
        """Whether the request may proceed."""
        return self.allowed

    @property
    def strictest(self) -> LimitStatus | None:
        """The limit that restricts the client most: on a tie the first. `None` without limits."""
        return strictest(self.limits)

    @property
    def limit(self) -> int | None:
        """The quota of the most restrictive limit."""
        status = self.strictest
        return None if status is None else status.quota

    @property
    def remaining(self) -> int | None:
        """The units left in the most restrictive limit."""
        status = self.strictest
        return None if status is None else status.remaining

    @property
    def reset_after(self) -> float | None:
        """Seconds until the most restrictive limit is whole again."""
        status = self.strictest
        return None if status is None else status.reset_after

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before a retry; on an admission 0, or the wait of a `leaky-bucket`.

        `None`: never.
        """
        return _seconds(self.retry_after_us)

    @property
    def retry_after_us(self) -> int | None:
        """Microseconds to wait before a retry. `None`: never."""
        if self.banned:
            return self.ban_us
        if self.is_unavailable:
            return 1_000_000
        waits = [
            status.retry_after_us
            for status in self.limits
            if status.allowed == self.allowed and not (self.allowed and status.cost == 0)
        ]
        if None in waits:
            return None
        return max((wait for wait in waits if wait is not None), default=0)

    @property
    def is_unavailable(self) -> bool:
        """Whether the request is refused because no decision could be made (status 503)."""
        return not self.allowed and (self.error is not None or self.service_status == 503)

    @property
    def status(self) -> int:
        """The HTTP status of the decision.

        200, 429 (denied), 403 (banned), 503 (no decision) or 414 (path too long).
        """
        if self.allowed:
            return 200
        if self.service_status is not None:
            return self.service_status
        if self.error is not None:
            return 503
        return 403 if self.banned else 429

    @property
    def headers(self) -> Mapping[str, str]:
        """The rate-limit headers for the response to the client, by lower-case name."""
        from .answer import rate_limit_headers

        return rate_limit_headers(self)

    def refusal(self, accept: Sequence[str] = ()) -> Response:
        """Returns the response to a refused request: that of the service, or the default one.

        `accept`: the lines of the request's `Accept`. The default response is JSON, or an RFC
        9457 problem document if they ask for `application/problem+json`.
        """
        from .answer import refusal

        return refusal(self, accept)


def strictest(limits: Sequence[LimitStatus]) -> LimitStatus | None:
    """Returns the limit that restricts the client most, or `None` if there are no limits."""
    found: LimitStatus | None = None
    for status in limits:
        if found is None or status.is_stricter_than(found):
            found = status
    return found
