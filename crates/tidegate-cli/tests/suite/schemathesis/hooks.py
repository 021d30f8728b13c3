"""What JSON Schema does not express, and a valid body may therefore be rejected for with 400.

The message must name the reason, and the body must really have it: a 400 for any other reason is a failure.
"""

import atexit
import re

import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance, unsupported_method

UNITS_US = {
    "us µs": 1,
    "ms": 1_000,
    "s sec secs second seconds": 1_000_000,
    "m min mins minute minutes": 60_000_000,
    "h hr hour hours": 3_600_000_000,
    "d day days": 86_400_000_000,
    "w week weeks": 604_800_000_000,
}
UNIT_US = {name: us for names, us in UNITS_US.items() for name in names.split()}
ALGORITHMS = ["sliding", "sliding-log", "sliding-counter", "fixed-window", "token-bucket", "leaky-bucket"]
WINDOW_US_MIN, WINDOW_US_MAX = 1_000, 400 * UNIT_US["day"]
QUOTA_MAX, SLIDING_LOG_QUOTA_MAX = 10_000_000, 100_000
WAIT_MS_MAX, WAIT_MS_MAX_HERE = 60_000, 50


def is_limit(text):
    """Returns whether a text that matches the pattern of the document is a limit within its bounds."""
    rate, *options = re.split(r"[ \t\n\f\r]+", text.strip(" \t\n\f\r"))
    parts = re.fullmatch(r"([0-9]+)/([0-9]*)([a-zµ]+)", rate)
    if not parts:
        return False
    quota, count, unit = parts.groups()
    algorithm = options.pop(0) if options and "=" not in options[0] else "sliding"
    window_us = int(count or 1) * UNIT_US[unit]
    if not 1 <= int(quota) <= (SLIDING_LOG_QUOTA_MAX if algorithm == "sliding-log" else QUOTA_MAX):
        return False
    if not WINDOW_US_MIN <= window_us <= WINDOW_US_MAX or algorithm not in ALGORITHMS:
        return False
    capacity = {"token-bucket": "burst", "leaky-bucket": "queue"}.get(algorithm)
    names = [option.partition("=")[0] for option in options]
    if len(set(names)) < len(names):
        return False
    for name, _, value in (option.partition("=") for option in options):
        if name == "count_denied" and value in ["true", "false"]:
            continue
        if name != capacity or not re.fullmatch("[0-9]+", value) or not 1 <= int(value) <= QUOTA_MAX:
            return False
    return True


def limits_of(body):
    return [check["limit"] for check in body.get("checks", [body])]


def is_rejected_by_rule(body, message):
    """Returns whether the body has the reason that the message names."""
    if re.match(r"(checks\[[0-9]+\]\.)?limit: ", message):
        return not all(is_limit(limit) for limit in limits_of(body))
    if "use the same counter" in message:
        return len(body["checks"]) > 1
    if "names are case-insensitive" in message:
        names = [name.lower() for name in body["request"]["headers"]]
        return len(set(names)) < len(names)
    return False


@schemathesis.hook
def before_call(context, case, kwargs):
    """Shortens the waits that the document allows: a check may wait for a minute."""
    wait_ms = case.body.get("wait_ms") if isinstance(case.body, dict) else None
    if isinstance(wait_ms, int) and WAIT_MS_MAX_HERE < wait_ms <= WAIT_MS_MAX:
        case.body["wait_ms"] = WAIT_MS_MAX_HERE


@schemathesis.check
def valid_data_is_accepted(ctx, response, case):
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return None
    if case.path.startswith("/v1/forward-auth"):
        # A path may be too long for the rules. Everything else that is valid is admitted.
        refused = response.headers.get("x-tidegate-status", ["414"])
        assert refused == ["414"], f"a valid request is refused with {refused}"
        return positive_data_acceptance(ctx, response, case)
    if not isinstance(case.body, dict):
        return None
    if case.path == "/v1/refund":
        # A text is a receipt only if it is taken from the response to a check.
        error = response.json().get("error")
        assert (response.status_code, error) in [(200, None), (400, "invalid_receipt")], f"a valid refund gets {error}"
        return None
    if response.status_code == 400 and is_rejected_by_rule(case.body, response.json()["message"]):
        return None
    if response.status_code in (200, 429) and "request" not in case.body:
        assert all(map(is_limit, limits_of(case.body))), f"accepted a limit that is out of bounds: {case.body}"
        ACCEPTED.update(limits_of(case.body))
    return positive_data_acceptance(ctx, response, case)


@schemathesis.check
def undeclared_method_is_rejected(ctx, response, case):
    # Proxies may ask with any method, which OpenAPI cannot express.
    return None if case.path.startswith("/v1/forward-auth") else unsupported_method(ctx, response, case)


# The test requires that enough different limits were accepted: a document whose limits are all rejected tests nothing.
ACCEPTED = set()
atexit.register(lambda: print(f"limits accepted: {len(ACCEPTED)}"))
