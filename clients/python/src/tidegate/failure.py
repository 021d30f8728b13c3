"""What happens if no decision can be made: `on_error` is `allow`, `deny` or `raise`."""

from __future__ import annotations

import logging
import threading
import time

from .decision import Decision
from .errors import InvalidInput, Undecided

logger = logging.getLogger("tidegate")

ON_ERROR = ("allow", "deny", "raise")
_REPORT_INTERVAL = 1.0


class FailurePolicy:
    """Turns an error into a decision or raises it, and logs at most once a second."""

    def __init__(self, on_error: str) -> None:
        if on_error not in ON_ERROR:
            raise InvalidInput(
                f"on_error must be one of {', '.join(ON_ERROR)}; found {str(on_error)[:32]!r}"
            )
        self.on_error = on_error
        self._lock = threading.Lock()
        self._report_after = float("-inf")
        self._suppressed = 0

    def decide(self, error: Undecided) -> Decision:
        """Returns the decision of `on_error` and logs the error.

        Raises the error if `on_error` is `raise`.
        """
        if self.on_error == "raise":
            raise error
        self.report(f"the request is {'allowed' if self.on_error == 'allow' else 'denied'}", error)
        return Decision(allowed=self.on_error == "allow", error=error)

    def report(self, effect: str, error: Exception) -> None:
        """Logs a warning, at most one a second.

        Later ones are counted, and the next warning has their number.
        """
        with self._lock:
            now = time.monotonic()
            if now < self._report_after:
                self._suppressed += 1
                return
            self._report_after = now + _REPORT_INTERVAL
            suppressed, self._suppressed = self._suppressed, 0
        more = f" ({suppressed} more errors since the last report)" if suppressed else ""
        logger.warning("no rate-limit decision, %s: %s%s", effect, error, more)


def check_deadline(deadline: float) -> float:
    """Returns the deadline in seconds.

    Raises `InvalidInput` unless it is a number above 0 and at most 3600.
    """
    if (
        isinstance(deadline, bool)
        or not isinstance(deadline, (int, float))
        or not 0 < deadline <= 3600
    ):
        raise InvalidInput(f"deadline must be above 0, at most 3600 s, found {str(deadline)[:32]}")
    return float(deadline)
