"""Replays the vectors of all clients: keys, limits, traces, addresses, answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import GENEROUS, REPOSITORY, Caller, RedisServer
from traces import VECTORS, replay

from tidegate import InvalidInput, Limit
from tidegate.address import TrustedProxies, address_subject
from tidegate.answer import asks_for_problem
from tidegate.decision import Decision, LimitStatus
from tidegate.keys import STATE_VERSION, ban_key, counter_key
from tidegate.redis import RedisLimiter
from tidegate.script import SHA1, SOURCE


def cases(section: str) -> Any:
    """Parametrizes a test with the entries of a section, which may not be empty."""
    entries = VECTORS[section]
    return pytest.mark.parametrize("case", entries, ids=[str(at) for at in range(len(entries))])


def test_embedded_script_is_that_of_the_rust_crates() -> None:
    assert (REPOSITORY / "crates/tidegate-redis/lua/tidegate.lua").read_text("utf-8") == SOURCE
    assert VECTORS["script_sha1"] == SHA1


def test_state_version_is_that_of_the_documented_keys() -> None:
    assert f":{STATE_VERSION}:{{" in VECTORS["keys"][0]["key"]


@cases("keys")
def test_key_is_the_same_in_all_languages(case: dict[str, Any]) -> None:
    subject = bytes.fromhex(case["subject_hex"])
    limit = Limit.parse(case["limit"])
    assert counter_key(case["prefix"], subject, limit) == case["key"]
    assert ban_key(case["prefix"], subject) == case["ban_key"]


def assert_suggests(message: str, meant: str | None) -> None:
    """Asserts that the message of an error suggests this limit, or nothing if it is `None`."""
    if meant is None:
        assert "did you mean" not in message
    else:
        assert message.endswith(f"; did you mean {meant}?")


@cases("limits")
def test_limit_is_parsed_as_in_rust(case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(InvalidInput) as raised:
            Limit.parse(case["text"])
        assert_suggests(str(raised.value), case.get("meant"))
    else:
        limit = Limit.parse(case["text"])
        assert limit.line(1) == case["line"]
        assert Limit.parse(str(limit)) == limit


@cases("traces")
def test_trace_has_the_same_verdicts(
    case: dict[str, Any], redis_server: RedisServer, key: str
) -> None:
    client = redis_server.client()
    replay(case, Caller(RedisLimiter(client, deadline=GENEROUS, on_error="raise")), key)


@cases("addresses")
def test_client_address_is_that_of_the_rust_layer(case: dict[str, Any]) -> None:
    proxies = TrustedProxies(case["trusted"], case["header"])
    address = proxies.client_address(case["peer"], case["lines"])
    assert str(address) == case["address"]
    assert address_subject(address) == case["subject"]


@cases("answers")
def test_answer_is_that_of_the_rust_layer(case: dict[str, Any]) -> None:
    def status_of(entry: dict[str, Any]) -> LimitStatus:
        limit = Limit.parse(entry["limit"])
        waits = {
            name: None if entry[name] == -1 else entry[name]
            for name in ("retry_after_us", "next_after_us", "reset_after_us")
        }
        return LimitStatus(
            name=limit.name,
            quota=limit.quota,
            window_us=limit.window_us,
            cost=entry["cost"],
            allowed=entry["allowed"],
            remaining=entry["remaining"],
            cost_max=limit.cost_max,
            **waits,
        )

    limits = tuple(status_of(entry) for entry in case["limits"])
    is_allowed = all(status.allowed for status in limits)
    decision = Decision(is_allowed, limits, "store", at_us=case["at_us"])
    assert decision.status == case["status"]
    if is_allowed:
        assert dict(decision.headers) == case["headers"]
        return
    response = decision.refusal()
    # The content type and the length belong to the framework in some languages.
    headers = {"content-type": "application/json", **case["headers"]}
    assert {**response.headers} == headers
    assert json.loads(response.body) == case["body"]
    problem = decision.refusal(["application/problem+json"])
    assert {**problem.headers} == {**headers, "content-type": "application/problem+json"}
    assert json.loads(problem.body) == case["problem"]


@cases("accepts")
def test_accept_header_asks_for_a_problem(case: dict[str, Any]) -> None:
    assert asks_for_problem(case["lines"]) == case["problem"]
