"""Client for Tidegate, a distributed rate limiter whose windows really slide.

    from tidegate import Tidegate

    tidegate = Tidegate("http://127.0.0.1:8080")
    decision = tidegate.check("user:42", ["10/min", "1000/day"])
    if not decision.allowed:
        print(f"try again in {decision.retry_after} s")

`tidegate.redis` has the same limits on your own Redis client, without the service.
`tidegate.flask`, `tidegate.wsgi` and `tidegate.asgi` are middleware.
"""

from .aio import AsyncTidegate
from .client import Tidegate
from .decision import Decision, LimitStatus, Response
from .errors import (
    ForeignValue,
    InvalidInput,
    PermissionDenied,
    ProtocolError,
    TidegateError,
    Unavailable,
    Undecided,
)
from .limit import Limit

__version__ = "0.1.0"

__all__ = [
    "AsyncTidegate",
    "Decision",
    "ForeignValue",
    "InvalidInput",
    "Limit",
    "LimitStatus",
    "PermissionDenied",
    "ProtocolError",
    "Response",
    "Tidegate",
    "TidegateError",
    "Unavailable",
    "Undecided",
]
