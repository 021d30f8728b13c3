"""Runs examples/flask-plans with the real service, and tests its plans from outside."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import GENEROUS, PACKAGE, REPOSITORY, TOOLS, Server, TidegateService, wait_until

EXAMPLE = REPOSITORY / "examples" / "flask-plans"


class Example(Server):
    def __init__(self, directory: Path, service_url: str) -> None:
        path = os.pathsep.join([str(PACKAGE / "src"), *sys.path, str(TOOLS / "python")])
        environment = {**os.environ, "PYTHONPATH": path, "PORT": "0", "TIDEGATE_URL": service_url}
        # A generous deadline, for a busy machine.
        url = 'os.environ.get("TIDEGATE_URL", "http://127.0.0.1:8080")'
        source = (EXAMPLE / "app.py").read_text()
        assert source.count(url) == 1
        app = directory / "app.py"
        app.write_text(source.replace(url, f"{url}, deadline={GENEROUS}"))
        command = [sys.executable, str(app)]
        super().__init__(command, directory / "app.log", env=environment)
        self.port = 0

    def start(self) -> None:
        super().start()
        pattern = r"Running on http://127\.0\.0\.1:(\d+)"
        self.port = int(
            wait_until(lambda: re.search(pattern, self.output()), "app.py listens").group(1)
        )

    def get(self, path: str, key: str | None = None) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path, headers={} if key is None else {"X-API-Key": key})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        headers = {name.lower(): value for name, value in response.getheaders()}
        is_json = headers["content-type"].startswith("application/json")
        return response.status, headers, json.loads(body) if is_json else body


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[tuple[TidegateService, Example]]:
    for name in ("tidegate.toml", "keys.toml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    service = TidegateService(tmp_path / "service", config=tmp_path / "tidegate.toml")
    service.start()
    app = Example(tmp_path, service.url)
    app.start()
    yield service, app
    app.kill()
    service.kill()


def test_each_plan_has_its_limits(programs: tuple[TidegateService, Example]) -> None:
    _, app = programs
    status, headers, body = app.get("/v1/hello")
    assert (status, body) == (200, {"message": "hello", "requests_left": 2})
    assert headers["ratelimit-policy"] == '"per-minute";q=3;w=60'
    assert [app.get("/v1/hello")[0] for _ in range(4)] == [200, 200, 429, 429]
    assert app.get("/v1/hello", "no-such-key")[0] == 429, "an unknown key is no identity"
    assert [app.get("/v1/hello", "demo-free-key")[0] for _ in range(6)] == [200] * 5 + [429]
    status, headers, body = app.get("/v1/hello", "demo-free-key")
    assert status == 429
    assert (body["error"], body["limit"], body["plan"]) == ("rate_limited", 5, "free")
    assert body["upgrade_url"] == "https://example.com/plans"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert [app.get("/v1/hello", "demo-pro-key")[0] for _ in range(10)] == [200] * 10
    assert all(app.get("/healthz")[0] == 200 for _ in range(10)), "no rule matches this path"


def test_requests_pass_while_the_service_is_down(
    programs: tuple[TidegateService, Example],
) -> None:
    service, app = programs
    service.kill()
    assert [app.get("/v1/hello")[0] for _ in range(5)] == [200] * 5
    assert "no rate-limit decision, the request is allowed" in app.output()
    service.start()
    wait_until(lambda: app.get("/v1/hello")[0] == 429, "the limits apply again")
