"""Limits: at most `quota` units per window, by an algorithm.

The text form is that of every other Tidegate component: `QUOTA/WINDOW [ALGORITHM] [option=value
…]`, for example `10/min`, `600/10s`, `5000/day sliding-log` or `100/min token-bucket burst=20`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Union

from .errors import InvalidInput

QUOTA_MAX = 10_000_000
SLIDING_LOG_QUOTA_MAX = 100_000
WINDOW_US_MIN = 1_000
WINDOW_US_MAX = 400 * 86_400 * 1_000_000
COST_MAX = 2**32 - 1
#: The maximum number of limits of one check.
LIMITS_MAX = 32

ALGORITHMS = (
    "sliding",
    "sliding-log",
    "sliding-counter",
    "fixed-window",
    "token-bucket",
    "leaky-bucket",
)

_TEXT_BYTES_MAX = 256
_EXAMPLE = "for example 10/min or 100/min token-bucket burst=20"
_UNITS = {
    **dict.fromkeys(("week", "weeks", "w"), 604_800_000_000),
    **dict.fromkeys(("day", "days", "d"), 86_400_000_000),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3_600_000_000),
    **dict.fromkeys(("min", "mins", "minute", "minutes", "m"), 60_000_000),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1_000_000),
    "ms": 1_000,
    "us": 1,
    "µs": 1,
}
_PERIODS = (
    (604_800_000_000, "week", "weeks"),
    (86_400_000_000, "day", "days"),
    (3_600_000_000, "hour", "hours"),
    (60_000_000, "minute", "minutes"),
    (1_000_000, "second", "seconds"),
    (1_000, "ms", "ms"),
    (1, "us", "us"),
)
_ASCII_SPACE = re.compile(r"[ \t\n\f\r]+")
_DIGITS = re.compile(r"[0-9]+")
#: A window whose number may have a fraction of up to three digits.
_FRACTIONAL_WINDOW = re.compile(r"([0-9]*)(?:\.([0-9]{1,3}))?([^0-9.]+)")
#: The option of an algorithm that sets its capacity.
_CAPACITY_OPTIONS = {"burst": "token-bucket", "queue": "leaky-bucket"}


@dataclass(frozen=True)
class Limit:
    """At most `quota` units per `window_us` microseconds. Created by :meth:`parse`."""

    quota: int
    window_us: int
    algorithm: str = "sliding"
    #: The burst, the queue, or the quota for algorithms that have neither: the largest cost that
    #: can ever pass.
    cost_max: int = 0
    count_denied: bool = False

    @staticmethod
    def parse(text: str) -> Limit:
        """Parses the text form of a limit.

        Raises `InvalidInput`, with what was expected, if the text is malformed or a number is out
        of range.
        """
        if not isinstance(text, str):
            raise InvalidInput(f"a limit must be a string, {_EXAMPLE}; found {type(text).__name__}")
        return _parse(text)

    def line(self, cost: int) -> str:
        """Returns the limit line of the script for a counter whose window is part of its key."""
        line = f"{self.algorithm} {self.quota} {self.window_us} {cost}"
        if self.cost_max != self.quota:
            line += f" {self._capacity_option}={self.cost_max}"
        if self.count_denied:
            line += " count_denied=1"
        return line + " window=fixed"

    def __str__(self) -> str:
        """Returns the text form. Parsing it gives the same limit."""
        text = f"{self.quota}/{_window_text(self.window_us)}"
        if self.algorithm != "sliding":
            text += f" {self.algorithm}"
        if self.cost_max != self.quota:
            text += f" {self._capacity_option}={self.cost_max}"
        return text + (" count_denied=true" if self.count_denied else "")

    @property
    def _capacity_option(self) -> str:
        return "queue" if self.algorithm == "leaky-bucket" else "burst"

    @cached_property
    def name(self) -> str:
        """The name of the limit in headers: `per-minute`, `per-10-seconds`."""
        return period(self.window_us).replace(" ", "-")


#: A limit, as text or parsed.
LimitLike = Union[str, Limit]


def parse_limits(limit: LimitLike | Sequence[LimitLike]) -> tuple[Limit, ...]:
    """Parses one limit or a sequence of limits.

    Raises `InvalidInput` if one of them is malformed, or if there are none or more than 32.
    """
    if isinstance(limit, str):
        return (_parse(limit),)
    if isinstance(limit, Limit):
        return (limit,)
    if not isinstance(limit, Sequence) or isinstance(limit, (bytes, bytearray)):
        raise InvalidInput(
            f"expected a limit or a list of limits, {_EXAMPLE}; found {type(limit).__name__}"
        )
    if not 1 <= len(limit) <= LIMITS_MAX:
        raise InvalidInput(f"a check can have 1 to {LIMITS_MAX} limits; this one has {len(limit)}")
    return tuple(each if isinstance(each, Limit) else Limit.parse(each) for each in limit)


def check_cost(cost: int) -> int:
    """Returns `cost`. Raises `InvalidInput` unless it is a whole number from 0 to 4294967295."""
    if isinstance(cost, bool) or not isinstance(cost, int) or not 0 <= cost <= COST_MAX:
        raise InvalidInput(f"cost must be an integer from 0 to {COST_MAX}, found {str(cost)[:32]}")
    return cost


def period(window_us: int) -> str:
    """Returns a window in English: `per minute`, `per 10 seconds`, `per 500 ms`."""
    for unit_us, one, many in _PERIODS:
        if window_us % unit_us == 0:
            count = window_us // unit_us
            return f"per {one}" if count == 1 else f"per {count} {many}"
    raise AssertionError("every window is a whole number of microseconds")


# Programs use few limits, so each is parsed once. The bound protects a program that generates
# limits.
@lru_cache(maxsize=1024)
def _parse(text: str) -> Limit:
    try:
        return _parse_exactly(text)
    except InvalidInput as error:
        meant = _meant(text)
        if meant is None:
            raise
        raise InvalidInput(f"{error}; did you mean {meant}?") from None


def _parse_exactly(text: str) -> Limit:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > _TEXT_BYTES_MAX:
        raise InvalidInput(
            f"a limit can have at most {_TEXT_BYTES_MAX} bytes, but this one has {size}; {_EXAMPLE}"
        )
    words = [word for word in _ASCII_SPACE.split(text) if word]
    if not words:
        raise InvalidInput(f"expected QUOTA/WINDOW, found nothing; {_EXAMPLE}")
    rate, *options = words
    quota, window_us = _parse_rate(rate)
    algorithm = "sliding"
    if options and "=" not in options[0]:
        algorithm = options.pop(0)
        if algorithm not in ALGORITHMS:
            raise _error(f"unknown algorithm; expected one of {', '.join(ALGORITHMS)}", algorithm)
    if algorithm == "sliding-log" and quota > SLIDING_LOG_QUOTA_MAX:
        raise _error(f"a quota must be from 1 to {SLIDING_LOG_QUOTA_MAX} for sliding-log", rate)
    capacity, count_denied = _parse_options(options, algorithm)
    return Limit(quota, window_us, algorithm, quota if capacity is None else capacity, count_denied)


def _parse_rate(rate: str) -> tuple[int, int]:
    quota_text, slash, window = rate.partition("/")
    if not slash:
        raise _error(f"expected a / between quota and window; {_EXAMPLE}", rate)
    quota = _whole(quota_text)
    if quota is None or not 1 <= quota <= QUOTA_MAX:
        raise _error(f"expected a quota from 1 to {QUOTA_MAX} in digits; {_EXAMPLE}", quota_text)
    digits = _DIGITS.match(window)
    count_text = digits.group() if digits else ""
    unit = window[len(count_text) :]
    if not unit:
        raise _error(
            "expected a window: a whole number and a unit, or a unit alone (500ms, 10s, min, day)",
            window,
        )
    if re.match(r"\.[0-9]", unit):
        raise _error("expected a window in whole numbers, such as 90min", window)
    if unit not in _UNITS:
        raise _error("unknown unit of time; expected one of us, ms, s, min, h, day, week", unit)
    window_us = (int(count_text) if count_text else 1) * _UNITS[unit]
    if not WINDOW_US_MIN <= window_us <= WINDOW_US_MAX:
        reason = ", the longest whose arithmetic is exact in Redis"
        is_long = window_us > WINDOW_US_MAX
        raise _error(f"a window must be from 1ms to 400day{reason if is_long else ''}", window)
    return quota, window_us


def _meant(text: str) -> str | None:
    """Returns the limit that a text in another common form means, as it must be written: `10/min`
    for `10 / min`, `10 per minute` or `10/MIN`, and `10/90min` for `10/1.5h`.

    Returns `None` if the text has another form, or that limit would be invalid.
    """
    words = [word for word in _ASCII_SPACE.split(text.lower().replace("/", " / ")) if word]
    if len(text) > _TEXT_BYTES_MAX or len(words) < 3 or words[1] not in ("/", "per"):
        return None
    quota, _, window, *rest = words
    if rest and not window.strip("0123456789."):
        window += rest.pop(0)
    window_us = _fractional_window_us(window)
    if window_us is None:
        return None
    limit = " ".join([f"{quota}/{_window_text(window_us)}", *rest])
    try:
        _parse_exactly(limit)
    except InvalidInput:
        return None
    return limit


def _fractional_window_us(window: str) -> int | None:
    """Parses a window whose number may have a fraction, such as `1.5h`.

    Returns `None` if it is not a whole number of microseconds.
    """
    parts = _FRACTIONAL_WINDOW.fullmatch(window)
    if parts is None or parts[3] not in _UNITS:
        return None
    unit_us = _UNITS[parts[3]]
    if not parts[1] and parts[2] is None:
        return unit_us
    fraction = parts[2] or "0"
    fraction_us, remainder = divmod(int(fraction) * unit_us, 10 ** len(fraction))
    return None if remainder else int(parts[1] or "0") * unit_us + fraction_us


def _window_text(window_us: int) -> str:
    """Returns a window in the largest unit that divides it: `min`, `90min`, `500ms`."""
    divides = (
        each for each in _UNITS.items() if 0 < each[1] <= window_us and not window_us % each[1]
    )
    unit, unit_us = next(divides, ("us", 1))
    count = window_us // unit_us
    return unit if count == 1 else f"{count}{unit}"


def _parse_options(options: Sequence[str], algorithm: str) -> tuple[int | None, bool]:
    capacity: int | None = None
    count_denied = False
    seen = set()
    for option in options:
        name, equals, value = option.partition("=")
        if name in seen:
            raise _error("this option is given twice", option)
        seen.add(name)
        if equals and name in _CAPACITY_OPTIONS:
            capacity = _whole(value)
            if capacity is None or not 1 <= capacity <= QUOTA_MAX:
                raise _error(f"expected {name}=N with N from 1 to {QUOTA_MAX}, in digits", option)
            if algorithm != _CAPACITY_OPTIONS[name]:
                owner = _CAPACITY_OPTIONS[name]
                raise _error(f"{name} is an option of {owner}, not of {algorithm}", option)
        elif equals and name == "count_denied":
            if value not in ("true", "false"):
                raise _error("expected count_denied=true or count_denied=false", option)
            count_denied = value == "true"
        else:
            raise _error(
                "unknown option; expected one of burst=N, queue=N, count_denied=true|false", option
            )
    return capacity, count_denied


def _whole(text: str) -> int | None:
    return int(text) if _DIGITS.fullmatch(text) else None


def _error(problem: str, found: str) -> InvalidInput:
    return InvalidInput(f"{problem} (found {found[:32]!r})")
