"""Writes sample-vectors.json: vectors for a checkout without clients/vectors.json.

Keys come from crates/tollgate-redis/tests/key-vectors.tsv; the rest was written by hand from the
tests of the Rust crates.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
CRATES = HERE.parents[2] / "crates"
AT = 1_760_000_000_000_000


def keys() -> list[dict[str, str]]:
    rows = []
    for line in (CRATES / "tollgate-redis/tests/key-vectors.tsv").read_text().splitlines():
        if line.startswith("#"):
            continue
        prefix, subject, scope, _, _, limit, key = line.split("\t")
        if scope == "explicit":
            ban = key[: key.index("}:") + 2] + "ban"
            row = {"subject_hex": subject, "limit": limit, "prefix": prefix}
            rows.append({**row, "key": key, "ban_key": ban})
    return rows


def limits() -> list[dict[str, str]]:
    lines = {
        "10/min": "sliding 10 60000000 1 window=fixed",
        "600/10s": "sliding 600 10000000 1 window=fixed",
        "250/500ms": "sliding 250 500000 1 window=fixed",
        "5000/day sliding-log": "sliding-log 5000 86400000000 1 window=fixed",
        "100/min token-bucket burst=20": "token-bucket 100 60000000 1 burst=20 window=fixed",
        "100/min token-bucket burst=100": "token-bucket 100 60000000 1 window=fixed",
        "  7/2hours   leaky-bucket  queue=3 ": "leaky-bucket 7 7200000000 1 queue=3 window=fixed",
        "1/1ms": "sliding 1 1000 1 window=fixed",
        "10000000/400day fixed-window": "fixed-window 10000000 34560000000000 1 window=fixed",
        "1/1500us sliding-counter": "sliding-counter 1 1500 1 window=fixed",
        "5/h count_denied=true": "sliding 5 3600000000 1 count_denied=1 window=fixed",
        "5/h count_denied=false": "sliding 5 3600000000 1 window=fixed",
    }
    errors = ["10/fortnight", "0/min", "-1/s", "1e9/s", "10000001/s", "10/0s", "10/401day"]
    errors += ["10/999us", "10/99999999999999999999999day", "10", "", "  ", "10/", "10/5", "/min"]
    errors += ["10/min slidding", "10/min sliding burst=5", "10/min token-bucket queue=5"]
    errors += ["10/min token-bucket burst=0", "10/min token-bucket burst=x", "ten/min", "10/mïn"]
    errors += ["10/min token-bucket burst=", "10/min token-bucket burst=5 burst=5", "9" * 300]
    errors += ["10/min token-bucket speed=5", "10/min token-bucket fast", "10/min count_denied=yes"]
    errors += ["200000/min sliding-log", "10/min\u00a0sliding", "\u0661\u0660/min"]
    good = [{"text": text, "line": line} for text, line in lines.items()]
    return good + [{"text": text, "error": "rejected by the Rust parser"} for text in errors]


def status(
    allowed: bool, remaining: int, retry: int, following: int, reset: int
) -> dict[str, object]:
    return {
        "allowed": allowed,
        "remaining": remaining,
        "retry_after_us": retry,
        "next_after_us": following,
        "reset_after_us": reset,
    }


def step(after_us: int, limit: str, cost: int, *numbers: object) -> dict[str, object]:
    check = [{"key_hex": "6b", "limit": limit, "cost": cost}]
    return {
        "at_us": AT + after_us,
        "check": check,
        "allowed": numbers[0],
        "limits": [status(*numbers)],  # type: ignore[arg-type]
    }


def traces() -> list[dict[str, object]]:
    second = 1_000_000
    sliding = [
        step(0, "2/s", 1, True, 1, 0, second, second),
        step(400_000, "2/s", 1, True, 0, 0, 600_000, second),
        step(500_000, "2/s", 1, False, 0, 500_000, 500_000, 900_000),
        step(500_000, "2/s", 3, False, 0, -1, 500_000, 900_000),
        {"at_us": AT + 600_000, "refund": 1},
        step(600_000, "2/s", 0, True, 1, 0, 400_000, 400_000),
        step(second, "2/s", 2, True, 0, 0, second, second),
    ]
    bucket = [
        step(0, "10/s token-bucket burst=2", 2, True, 0, 0, 100_000, 200_000),
        step(50_000, "10/s token-bucket burst=2", 1, False, 0, 50_000, 50_000, 150_000),
        step(100_000, "10/s token-bucket burst=2", 1, True, 0, 0, 100_000, 200_000),
    ]
    return [{"name": "sliding", "steps": sliding}, {"name": "token bucket", "steps": bucket}]


def addresses() -> list[dict[str, object]]:
    trusted = ["10.0.0.0/8", "2001:db8:ffff::/48"]
    listed: list[tuple[str, list[str], str]] = [
        ("203.0.113.9", ["6.6.6.6"], "203.0.113.9"),
        ("::ffff:203.0.113.9", ["6.6.6.6"], "203.0.113.9"),
        ("2001:db8::9", ["6.6.6.6"], "2001:db8::9"),
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("::ffff:10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("2001:db8:ffff::1", ["2001:db8::9"], "2001:db8::9"),
        ("10.0.0.1", ["::ffff:203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["6.6.6.6,203.0.113.9:4711 , 10.0.0.2"], "203.0.113.9"),
        (
            "10.0.0.1",
            ["6.6.6.6, 203.0.113.9, [2001:db8:ffff::7]:80, ::ffff:10.0.0.2"],
            "203.0.113.9",
        ),
        ("10.0.0.1", ["6.6.6.6", "203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["6.6.6.6, 203.0.113.9", "10.0.0.3, 10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", ["6.6.6.6, unknown"], "10.0.0.1"),
        ("10.0.0.1", ["6.6.6.6, unknown, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["6.6.6.6, "], "10.0.0.1"),
        ("10.0.0.1", ["6.6.6.6,, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["6.6.6.6", ""], "10.0.0.1"),
        ("10.0.0.1", ["6.6.6.6", "\u00ff", "10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["for=203.0.113.9"], "10.0.0.1"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9" + ",10.0.0.2" * 99], "203.0.113.9"),
        ("10.0.0.1", ["203.0.113.9" + ",10.0.0.2" * 100], "10.0.0.2"),
        ("10.0.0.1", ["fe80::1%25eth0"], "fe80::1"),
        ("10.0.0.1", ["6.6.6.6, 203.0.113.09"], "10.0.0.1"),
        ("64:ff9b::10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
    ]
    forwarded: list[tuple[list[str], str]] = [
        (["for=203.0.113.9"], "203.0.113.9"),
        (['For="203.0.113.9:4711";proto=https;by=10.0.0.1'], "203.0.113.9"),
        (['for="[2001:db8::9]:4711"'], "2001:db8::9"),
        (['for=6.6.6.6, for=203.0.113.9, for=10.0.0.2;host="a,b"'], "203.0.113.9"),
        (['for=", for=203.0.113.9'], "203.0.113.9"),
        (['for=6.6.6.6;x=", for=203.0.113.9, for=10.0.0.2'], "203.0.113.9"),
        (["for=6.6.6.6, for=_hidden"], "10.0.0.1"),
        (["for=6.6.6.6, proto=http, for=10.0.0.2"], "10.0.0.2"),
        (["for=6.6.6.6, for=10.0.0.3;for=203.0.113.9, for=10.0.0.2"], "10.0.0.2"),
        (["203.0.113.9"], "10.0.0.1"),
    ]
    subjects = {"2001:db8::9": "2001:db8::/64", "fe80::1": "fe80::/64"}
    rows = [(peer, "x-forwarded-for", lines, client) for peer, lines, client in listed]
    rows += [("10.0.0.1", "forwarded", lines, client) for lines, client in forwarded]
    return [
        {
            "peer": peer,
            "trusted": trusted,
            "header": header,
            "lines": lines,
            "address": client,
            "subject": "ip:" + subjects.get(client, client),
        }
        for peer, header, lines, client in rows
    ]


def answers() -> list[dict[str, object]]:
    denied = {"limit": "60/min", "cost": 1, **status(False, 0, 11_872_001, 11_872_001, 59_000_000)}
    left = {"limit": "5000/day", "cost": 1, **status(True, 4211, 0, 30_500_000, 80_000_000_000)}
    never = {"limit": "60/min", "cost": 61, **status(False, 60, -1, 0, 0)}
    message = "the limit of 60 per minute has been reached; try again in 12 seconds"
    policy = '"per-minute";q=60;w=60, "per-day";q=5000;w=86400'
    at_most = (
        "a request that costs 61 can never pass: the limit is 60 per minute, at most 60 at once"
    )
    common = {"content-type": "application/json", "cache-control": "no-store"}
    return [
        {
            "at_us": AT,
            "limits": [denied, left],
            "status": 429,
            "headers": {
                **common,
                "retry-after": "12",
                "x-ratelimit-limit": "60",
                "x-ratelimit-remaining": "0",
                "x-ratelimit-reset": "1760000012",
                "ratelimit": '"per-minute";r=0;t=12, "per-day";r=4211;t=31',
                "ratelimit-policy": policy,
            },
            "body": {
                "error": "rate_limited",
                "message": message,
                "limit": 60,
                "retry_after": 12,
                "retry_after_ms": 11873,
                "policy": "per-minute",
            },
        },
        {
            "at_us": AT,
            "limits": [never],
            "status": 429,
            "headers": {
                **common,
                "x-ratelimit-limit": "60",
                "x-ratelimit-remaining": "60",
                "ratelimit": '"per-minute";r=60',
                "ratelimit-policy": '"per-minute";q=60;w=60',
            },
            "body": {
                "error": "rate_limited",
                "message": at_most,
                "limit": 60,
                "retry_after": None,
                "retry_after_ms": None,
                "policy": "per-minute",
            },
        },
    ]


def main() -> None:
    script = (CRATES / "tollgate-redis/lua/tollgate.lua").read_bytes()
    vectors = {
        "script_sha1": hashlib.sha1(script).hexdigest(),
        "keys": keys(),
        "limits": limits(),
        "traces": traces(),
        "addresses": addresses(),
        "answers": answers(),
        "errors": [],
    }
    text = json.dumps(vectors, indent=1, ensure_ascii=False)
    (HERE / "sample-vectors.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
