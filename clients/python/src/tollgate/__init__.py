"""Client for Tollgate, a distributed rate limiter whose windows really slide.

    from tollgate import Tollgate

    tollgate = Tollgate("http://127.0.0.1:8080")
    decision = tollgate.check("user:42", ["10/min", "1000/day"])
    if not decision.allowed:
        print(f"try again in {decision.retry_after} s")

`tollgate.redis` has the same limits on your own Redis client, without the service.
`tollgate.flask`, `tollgate.wsgi` and `tollgate.asgi` are middleware.
"""

from .aio import AsyncTollgate
from .client import Tollgate
from .decision import Decision, LimitStatus, Response
from .errors import (
    ForeignValue,
    InvalidInput,
    PermissionDenied,
    ProtocolError,
    TollgateError,
    Unavailable,
    Undecided,
)
from .limit import Limit

__version__ = "0.1.0"

__all__ = [
    "AsyncTollgate",
    "Decision",
    "ForeignValue",
    "InvalidInput",
    "Limit",
    "LimitStatus",
    "PermissionDenied",
    "ProtocolError",
    "Response",
    "Tollgate",
    "TollgateError",
    "Unavailable",
    "Undecided",
]
