"""Real servers on free ports, and a fake one that can be slow, silent or broken."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parents[1]
TOOLS = REPOSITORY / ".tools"
# Test dependencies that scripts/setup.sh has installed. Those of the running Python come first.
sys.path.append(str(TOOLS / "python"))

#: Seconds until a server that does not start or a condition that does not hold fails a test.
PATIENCE = 30.0
#: A deadline that a healthy server on a busy machine meets.
GENEROUS = 10.0


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Returns the first true value of `condition`, which is called until then."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"timed out: {what}")


def program(name: str) -> str:
    """Returns the path of a program of scripts/setup.sh."""
    search = f"{TOOLS / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which(name, path=search)
    assert found, f"{name} is missing; run scripts/setup.sh"
    return found


class Caller:
    """Calls the methods of a blocking or an asyncio client in the same way."""

    #: The callers of the running test.
    open: ClassVar[list[Caller]] = []

    def __init__(self, client: Any) -> None:
        self.client = client
        self._loop = asyncio.new_event_loop()
        Caller.open.append(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)

        def call(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            return self._loop.run_until_complete(result) if inspect.isawaitable(result) else result

        return call

    def end(self) -> None:
        """Closes the client and its event loop."""
        self.close()
        self._loop.close()


class Server:
    """A child process that listens on a port. Its log is part of a failure."""

    def __init__(self, command: list[str], log: Path, **options: Any) -> None:
        self._command, self.log, self._options = command, log, options
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._options
            )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def pause(self) -> None:
        """Stops the process, and returns when all its threads have stopped."""
        self.signal(signal.SIGSTOP)
        wait_until(self._is_stopped, "the process is stopped")

    def _is_stopped(self) -> bool:
        assert self.process is not None
        stats = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def output(self) -> str:
        assert self.process is not None
        text = self.log.read_text()
        assert self.process.poll() is None, f"{self._command[0]} ended: {text}"
        return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer(Server):
    def __init__(self, directory: Path, *options: str, name: str = "redis-server") -> None:
        directory.mkdir(exist_ok=True)
        self._program, self._directory, self._own_options = program(name), directory, options
        self.port = 0
        super().__init__([], directory / "redis.log")

    def start(self) -> None:
        # Redis cannot choose a free port itself, and another process may take the chosen one.
        for _ in range(10):
            port = self.port or free_port()
            self._command = [self._program, "--port", str(port), "--bind", "127.0.0.1"]
            self._command += ["--save", "", "--appendonly", "no", "--dir", str(self._directory)]
            self._command += self._own_options
            super().start()
            if self._is_ready():
                self.port = port
                return
            self.kill()
        raise AssertionError(f"{self._program} does not start: {self.log.read_text()}")

    def _is_ready(self) -> bool:
        """Waits until the server accepts connections. Returns `False` if it has ended."""
        assert self.process is not None
        process = self.process
        wait_until(
            lambda: "Ready to accept" in self.log.read_text() or process.poll() is not None,
            "redis-server is ready",
        )
        return process.poll() is None

    def client(self, **options: Any) -> Any:
        import redis

        return redis.Redis(port=self.port, **options)

    def async_client(self, **options: Any) -> Any:
        import redis.asyncio

        return redis.asyncio.Redis(port=self.port, **options)


class Cluster:
    """A Redis or Valkey Cluster of three masters, started by `tidegate-test-cluster`."""

    def __init__(self, brand: str) -> None:
        binary = REPOSITORY / "target/debug/tidegate-test-cluster"
        assert binary.exists(), f"{binary} is missing: cargo build -p tidegate-testkit"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([str(binary), brand], stdin=pipe, stdout=pipe, text=True)

    @functools.cached_property
    def ports(self) -> list[int]:
        """The ports of the masters. Waits until the cluster has started."""
        return [int(address.rpartition(":")[2]) for address in self._read().split()]

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "tidegate-test-cluster has ended"
        return line.strip()

    def run(self, command: str, key: str) -> None:
        """Changes the slot of a key: `begin-move`, `end-move`, `drop-slot` or `restore-slot`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command} {key}\n")
        self._process.stdin.flush()
        assert self._read() == "ok"

    def masters(self) -> list[Any]:
        """Returns a client of each master."""
        import redis

        return [redis.Redis(port=port) for port in self.ports]

    def end(self) -> None:
        self._process.communicate()


class TidegateService(Server):
    """`tidegate serve` on a port of its own, which stays the same after a restart."""

    def __init__(self, directory: Path, *options: str, config: Path | None = None) -> None:
        directory.mkdir(exist_ok=True)
        binary = os.environ.get("TIDEGATE_BIN") or str(REPOSITORY / "target/debug/tidegate")
        assert Path(binary).exists(), f"{binary} is missing; build it or set TIDEGATE_BIN"
        self._binary, self._options_of_serve, self._config = binary, options, config
        self.port: int | None = None
        super().__init__([], directory / "tidegate.log", env=_environment())

    def start(self) -> None:
        self._command = [self._binary, "serve", "--http", f"127.0.0.1:{self.port or 0}"]
        self._command += ["--resp", "off", "--admin", "off", *self._options_of_serve]
        if self._config is not None:
            self._command += ["--config", str(self._config)]
        super().start()
        found = wait_until(
            lambda: re.search(r"http\s+127\.0\.0\.1:(\d+)", self.output()), "tidegate listens"
        )
        self.port = int(found.group(1))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def _environment() -> dict[str, str]:
    hidden = ("TIDEGATE_STORE", "REDIS_URL")
    return {name: value for name, value in os.environ.items() if name not in hidden}


DECISION = {
    "allowed": True,
    "source": "store",
    "limits": [
        {
            "name": "per-minute",
            "quota": 10,
            "window_ms": 60000,
            "remaining": 9,
            "retry_after_ms": 0,
            "next_after_ms": 60000,
            "reset_after_ms": 60000,
            "allowed": True,
        }
    ],
}


class FakeService:
    """An HTTP server that records requests and answers as a test says."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._tls = tls
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        #: Returns the status, headers and body of the answer to a path and a body.
        self.answer: Callable[[str, dict[str, Any]], tuple[int, dict[str, str], Any]] = (
            lambda path, body: (200, {"x-ratelimit-limit": "10"}, DECISION)
        )
        #: Sends the bytes of an answer. Replaced by tests of slow servers.
        self.send: Callable[[socket.socket, bytes], None] = lambda connection, answer: (
            connection.sendall(answer)
        )
        #: Requests after which a connection is closed.
        self.requests_per_connection = sys.maxsize
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.connections += 1
                self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        served = 0
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as stream:
                while served < self.requests_per_connection:
                    line = stream.readline().decode()
                    if not line:
                        return
                    headers = {}
                    while (header := stream.readline().decode().strip()) != "":
                        name, _, value = header.partition(":")
                        headers[name.lower()] = value.strip()
                    body = json.loads(stream.read(int(headers["content-length"])))
                    path = line.split(" ")[1]
                    with self._lock:
                        self.requests.append((path, headers, body))
                    self.send(connection, encode_answer(*self.answer(path, body)))
                    served += 1
        except (OSError, ValueError):
            pass

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()


def encode_answer(status: int, headers: dict[str, str], body: Any) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Reason", f"content-length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that all tests share. Tests use keys of their own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that a test may stop or kill."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def clusters() -> Iterator[dict[str, Cluster]]:
    """A cluster of each brand. They start at the same time."""
    clusters = {brand: Cluster(brand) for brand in ("redis", "valkey")}
    yield clusters
    for cluster in clusters.values():
        cluster.end()


@pytest.fixture(scope="session")
def redis_cluster(clusters: dict[str, Cluster]) -> Cluster:
    """A Redis Cluster that all tests share. Tests use keys of their own."""
    return clusters["redis"]


@pytest.fixture(scope="session")
def valkey_cluster(clusters: dict[str, Cluster]) -> Cluster:
    """A Valkey Cluster that all tests share. Tests use keys of their own."""
    return clusters["valkey"]


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TidegateService]:
    """A `tidegate serve` without rules that all tests share."""
    server = TidegateService(tmp_path_factory.mktemp("service"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_service(tmp_path: Path) -> Iterator[TidegateService]:
    """A `tidegate serve` that a test may stop or kill."""
    server = TidegateService(tmp_path / "service")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def fake() -> Iterator[FakeService]:
    server = FakeService()
    yield server
    server.close()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key that no other test uses."""
    return f"{request.node.nodeid}:{time.monotonic_ns()}"


@pytest.fixture(params=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of client: each test runs with both."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _end_callers() -> Iterator[None]:
    # Python 3.9 needs a current event loop to create an asyncio client of redis-py.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    while Caller.open:
        Caller.open.pop().end()
    asyncio.set_event_loop(None)
    loop.close()
