"""The part of the middleware that all frameworks share.

A `Guard` asks the limiter about a request, by rules or with explicit limits, and knows which
outcomes give units back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Union
from urllib.parse import quote

from . import answer
from .address import TrustedProxies, address_subject, parse_peer
from .decision import Decision, Response
from .errors import InvalidInput, TidegateError
from .failure import FailurePolicy, logger
from .keys import KeyLike
from .limit import Limit, LimitLike, check_cost, parse_limits

#: The limits of a request: fixed, or a function of the request that may return `None` (no limit).
LimitOption = Union[LimitLike, Sequence[LimitLike], Callable[..., Any]]

_PATH_SAFE = "/:@!$&'()*+,;=~"
_ENDINGS = ("success", "failure")
_TIMEOUT = 408


@dataclass
class BodyState:
    """How much of the body of a request the application has received."""

    #: Whether the end of the body was received, or the request has no body.
    is_complete: bool = False
    #: Whether the client disconnected before the end.
    is_aborted: bool = False


@dataclass(frozen=True)
class Request:
    """The parts of a request that a decision depends on."""

    method: str
    #: The path without the query, percent-encoded.
    path: str
    #: Names in lower case, values decoded as Latin-1.
    headers: Sequence[tuple[str, str]]
    #: The address of the socket's peer, if it has one.
    peer: str | None
    #: The request of the framework, which is passed to the functions `key`, `limit` and `cost`.
    native: tuple[Any, ...] = ()

    def lines(self, name: str) -> list[str]:
        """Returns all lines of a header."""
        return [value for each, value in self.headers if each == name]


def encode_path(path: str, encoding: str = "utf-8") -> str:
    """Percent-encodes the decoded path of a request, as the application routes on it."""
    encoded = quote(path, safe=_PATH_SAFE, encoding=encoding, errors="replace")
    return encoded if encoded.startswith("/") else "/" + encoded


class Guard:
    """The options of a middleware.

    By rules: `tidegate` is a client of the service, which decides everything.
    Explicit: `limiter` is any limiter, and `limit` has one or several limits or is a function.
    """

    def __init__(
        self,
        *,
        tidegate: Any = None,
        limiter: Any = None,
        limit: LimitOption | None = None,
        key: Callable[..., KeyLike | None] | None = None,
        cost: int | Callable[..., int] = 1,
        name: str | None = None,
        trusted_proxies: Iterable[str] = (),
        forwarding_header: str = "X-Forwarded-For",
        refund_on: str | None = None,
        is_asyncio: bool = False,
    ) -> None:
        self._is_by_rules = tidegate is not None
        self.limiter = tidegate if self._is_by_rules else limiter
        self._proxies = TrustedProxies(trusted_proxies, forwarding_header)
        self._key, self._cost, self._name = key, cost, name
        self._refund_on = refund_on
        self._asks_receipt = self._is_by_rules or refund_on is not None
        self._limit: Any = limit
        if self._is_by_rules:
            self._check_rules_options(limiter, trusted_proxies)
        elif self.limiter is None or limit is None:
            raise InvalidInput("pass tidegate=… to decide by rules, or limiter=… and limit=…")
        if limit is not None and not callable(limit):
            self._limit = parse_limits(limit)
        if not callable(cost):
            check_cost(cost)
        if refund_on is not None and refund_on not in _ENDINGS:
            raise InvalidInput("refund_on must be 'success', 'failure' or None")
        if inspect.iscoroutinefunction(self.limiter.check) != is_asyncio:
            kind = "asyncio" if is_asyncio else "blocking"
            raise InvalidInput(f"this middleware needs a {kind} limiter")
        self._reports = FailurePolicy("allow")

    def _check_rules_options(self, limiter: Any, trusted_proxies: Iterable[str]) -> None:
        if not callable(getattr(self.limiter, "check_request", None)):
            raise InvalidInput("rules need a client of the service: Tidegate or AsyncTidegate")
        is_explicit = limiter is not None or self._limit is not None or self._key is not None
        if is_explicit or self._refund_on or tuple(trusted_proxies):
            raise InvalidInput(
                "by rules, limits, keys, trusted proxies and refunds are settings of the service"
            )

    def decide(self, request: Request) -> Decision | None:
        """Asks a blocking limiter about a request. Returns `None` if nothing limits it.

        Raises `InvalidInput` if the request cannot be decided.
        """
        try:
            decision: Decision | None = self._ask(request, self._asks_receipt)
        except InvalidInput as error:
            self._give_up_receipt(error)
            decision = self._ask(request, receipt=False)
        return decision

    async def decide_async(self, request: Request) -> Decision | None:
        """Asks an asyncio limiter about a request, as `decide` does."""
        try:
            return await self._answer(self._ask(request, self._asks_receipt))
        except InvalidInput as error:
            self._give_up_receipt(error)
            return await self._answer(self._ask(request, receipt=False))

    @staticmethod
    async def _answer(answer: Any) -> Decision | None:
        return None if answer is None else await answer

    def _ask(self, request: Request, receipt: bool) -> Any:
        """Returns what the limiter returns, or `None` if nothing limits the request."""
        if self._is_by_rules:
            peer = str(parse_peer(request.peer))
            return self.limiter.check_request(
                request.method, request.path, request.headers, peer, receipt=receipt
            )
        limits = self._limits(request)
        if limits is None:
            return None
        cost = self._cost(*request.native) if callable(self._cost) else self._cost
        return self.limiter.check(self._key_of(request), limits, cost, receipt=receipt)

    def _give_up_receipt(self, error: InvalidInput) -> None:
        """Returns normally if a request by rules may be retried without a receipt, else raises.

        A service on a shared store rejects all receipts unless it has a secret for them, and one
        request may have keys that are too long for a receipt.
        """
        if not self._is_by_rules or not self._asks_receipt:
            raise error
        if "receipt_secret" in str(error):
            self._asks_receipt = False
            logger.warning("rules with `charge` are not refunded: %s", error)

    def _limits(self, request: Request) -> tuple[Limit, ...] | None:
        limits: Any = self._limit(*request.native) if callable(self._limit) else self._limit
        return None if limits is None else parse_limits(limits)

    def _key_of(self, request: Request) -> KeyLike:
        key = None if self._key is None else self._key(*request.native)
        if key is None:
            lines = request.lines(self._proxies.header)
            key = address_subject(self._proxies.client_address(request.peer, lines))
        if self._name is None:
            return key
        return f"{self._name}:{key}" if isinstance(key, str) else self._name.encode() + b":" + key

    def rejection(self, error: InvalidInput) -> Response:
        """Returns the response to a request that cannot be described or decided by rules.

        Raises the error if the check is explicit, because then an option or a function is wrong.
        """
        if not self._is_by_rules:
            raise error
        self._reports.report("the request is rejected with status 400", error)
        return answer.bad_request("the request is malformed")

    def refunds(self, decision: Decision, status: int, body: BodyState) -> bool:
        """Returns whether a response with this status gives the units of the decision back.

        It never does if the client disconnected before the end of its body, or was too slow: the
        work may have been done, and a client must not get its units back by disconnecting.
        """
        is_aborted = body.is_aborted or (status == _TIMEOUT and not body.is_complete)
        if decision.receipt is None or is_aborted:
            return False
        ending = "success" if status < 400 else "failure"
        if self._is_by_rules:
            return ending in decision.refund_on
        return ending == self._refund_on

    def refund(self, decision: Decision, status: int) -> Any:
        """Gives the units of the decision back. Returns what the limiter returns."""
        if self._is_by_rules:
            return self.limiter.refund(decision, status=status)
        return self.limiter.refund(decision)

    def refund_failed(self, error: TidegateError) -> None:
        """Logs that a refund failed. The response is not affected."""
        self._reports.report("units were not given back", error)
