"""Runs the Python blocks of the README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import GENEROUS, PACKAGE, Cluster, RedisServer, TidegateService
from starlette.testclient import TestClient

README = (PACKAGE / "README.md").read_text("utf-8")
BLOCKS = {
    title: re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for title, section in re.findall(r"^#+ ([^\n]+)\n(.*?)(?=^#+ |\Z)", README, re.DOTALL | re.M)
}


def run(block: str, service: TidegateService, redis_server: RedisServer, **names: Any) -> Any:
    """Runs a block with the servers of the tests and a generous deadline. Returns its names."""
    redis = f"redis.Redis(port={redis_server.port})"
    for text, replacement in {
        '"http://127.0.0.1:8080")': f'"{service.url}", deadline={GENEROUS})',
        "RedisLimiter(redis.Redis())": f"RedisLimiter({redis}, deadline={GENEROUS})",
        # FastAPI is a Starlette.
        "from fastapi import FastAPI": "from starlette.applications import Starlette as FastAPI",
    }.items():
        block = block.replace(text, replacement)
    names["__name__"] = "__main__"
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_ten_lines_work(
    service: TidegateService, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = BLOCKS["Tidegate for Python"]
    assert len(block.splitlines()) <= 10
    run(block.replace("user:42", "readme"), service, redis_server)
    assert capsys.readouterr().out == "welcome, 9 requests left\n"


def test_limiter_on_redis_and_flask_blocks_work(
    service: TidegateService, redis_server: RedisServer
) -> None:
    (on_redis,) = BLOCKS["On your own Redis"]
    names = run(on_redis, service, redis_server)
    assert names["decision"].limit == 100
    (flask_block,) = BLOCKS["Flask"]
    app = run(flask_block, service, redis_server, limiter=names["limiter"])["app"]
    response = app.test_client().post("/shorten")
    assert response.headers["x-ratelimit-limit"] == "10"
    assert response.json["left"] == int(response.headers["x-ratelimit-remaining"])


def test_cluster_block_works(
    service: TidegateService, redis_server: RedisServer, redis_cluster: Cluster
) -> None:
    (block,) = BLOCKS["Redis Cluster"]
    port, timeout = f"port={redis_cluster.ports[0]}", f"timeout={GENEROUS}"
    block = block.replace("port=6379", port).replace("timeout=0.1", timeout)
    names = run(block, service, redis_server)
    assert names["decision"].source == "store"
    assert [status.remaining for status in names["decision"].limits] == [9, 999]


def test_asgi_block_works(tmp_path: Path, redis_server: RedisServer) -> None:
    config = tmp_path / "tidegate.toml"
    config.write_text('[[rules]]\nname = "all"\nby = ["ip"]\nlimits = ["1/h"]\n')
    service = TidegateService(tmp_path / "service", config=config)
    service.start()
    (block,) = BLOCKS["FastAPI, Starlette"]
    client = TestClient(run(block, service, redis_server)["app"], client=("203.0.113.9", 1))
    # The application has no routes.
    assert [client.get("/").status_code for _ in range(2)] == [404, 429]
    service.kill()


def test_all_blocks_are_run() -> None:
    """Fails if there is a block that no test above knows."""
    counts = {title: len(blocks) for title, blocks in BLOCKS.items() if blocks}
    titles = ["Tidegate for Python", "On your own Redis", "Redis Cluster", "Flask"]
    titles += ["FastAPI, Starlette"]
    assert counts == dict.fromkeys(titles, 1)
    other = set(re.findall(r"^```(\S+)", README, re.M)) - {"python", "console"}
    assert other == set()
