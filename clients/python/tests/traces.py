"""Replays the traces of the shared vectors on a limiter."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from conftest import PACKAGE, Caller

from tidegate import Decision, InvalidInput, Limit
from tidegate.decision import LimitStatus
from tidegate.script import check_call

VECTORS: dict[str, Any] = json.loads((PACKAGE.parent / "vectors.json").read_text("utf-8"))


def replay(trace: dict[str, Any], limiter: Caller, name: str, *, cluster: bool = False) -> None:
    """Replays a trace and compares every decision.

    `name` is appended to the keys, so that traces do not share counters and the counters of a
    cluster are in many slots. A cluster rejects checks of several keys, and a trace ends there.
    """
    prefix = limiter.client._core.prefix
    decisions: list[Decision | None] = []

    def subject(key_hex: str) -> bytes:
        return bytes.fromhex(key_hex) + name.encode()

    for number, step in enumerate(trace["steps"]):
        now, where = str(step["at_us"]), f"{trace['name']}, step {number}"
        if "reset" in step:
            limiter.reset(subject(step["reset"]["key_hex"]), step["reset"]["limit"])
            decisions.append(None)
            continue
        if "refund" in step:
            refunded = decisions[step["refund"]]
            assert refunded is not None
            assert refunded.receipt is not None, f"{where}: nothing was charged"
            call = refunded.receipt.take()
            limiter._run(dataclasses.replace(call, arguments=[now, *call.arguments[1:]]))
            decisions.append(None)
            continue
        checks = [
            (subject(check["key_hex"]), Limit.parse(check["limit"]), check["cost"])
            for check in step["check"]
        ]
        call = check_call(prefix, checks, now)
        if cluster and len({key for key, _, _ in checks}) > 1:
            with pytest.raises(InvalidInput, match="same key"):
                limiter._run(call)
            return
        decision = limiter._run(call)
        decisions.append(decision)
        found = [_numbers(status) for status in decision.limits]
        assert (decision.allowed, found) == (step["allowed"], step["limits"]), where


def _numbers(status: LimitStatus) -> dict[str, Any]:
    waits = {
        name: getattr(status, name)
        for name in ("retry_after_us", "next_after_us", "reset_after_us")
    }
    waits = {name: -1 if wait is None else wait for name, wait in waits.items()}
    return {"allowed": status.allowed, "remaining": status.remaining, **waits}
