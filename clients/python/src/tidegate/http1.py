"""A bounded HTTP/1.1 client protocol without I/O, for one request at a time on a connection.

The blocking and the asyncio client share it. `http.client` reads with a timeout per system call, so
that a server which sends a byte at a time can delay a call indefinitely; here the caller owns the
socket and every read has the rest of the deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from .errors import InvalidInput, ProtocolError

_HEAD_BYTES_MAX = 64 * 1024
_BODY_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True)
class Endpoint:
    """The parsed URL of the service."""

    host: str
    port: int
    is_tls: bool
    #: The path before `/v1/check`, without a trailing slash.
    base: str
    #: The value of the header `Host`.
    authority: str

    @staticmethod
    def parse(url: str) -> Endpoint:
        """Parses `http://HOST[:PORT][/BASE]` or `https://…`.

        Raises `InvalidInput` for any other text.
        """
        expected = "expected the URL of the service, such as http://127.0.0.1:8080"
        if not isinstance(url, str) or not url.isascii() or any(char <= " " for char in url):
            raise InvalidInput(expected)
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidInput(f"{expected}: {error}") from None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
        ):
            raise InvalidInput(expected)
        if parts.username is not None or parts.password is not None:
            raise InvalidInput(f"{expected}; pass the bearer token as token=…, not in the URL")
        is_tls = parts.scheme == "https"
        host = parts.hostname
        authority = f"[{host}]" if ":" in host else host
        if port is not None:
            authority += f":{port}"
        return Endpoint(
            host, port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"), authority
        )

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}"

    def head(self, token: str | None) -> str:
        """Returns the header lines that all requests have in common, each with its line end."""
        head = f"Host: {self.authority}\r\nContent-Type: application/json\r\n"
        if token is not None:
            if (
                not isinstance(token, str)
                or not token.isascii()
                or not token.isprintable()
                or not token
            ):
                raise InvalidInput("a token must be printable ASCII text")
            head += f"Authorization: Bearer {token}\r\n"
        return head


def encode_post(path: str, head: str, body: bytes) -> bytes:
    """Encodes a POST request. `head` has the header lines that all requests have in common."""
    return (
        f"POST {path} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode("ascii") + body
    )


@dataclass(frozen=True)
class Answer:
    """A complete response: status, headers by lower-case name (the last of each name), body."""

    status: int
    headers: dict[str, str]
    body: bytes
    #: Whether the connection can be used for another request.
    is_reusable: bool


class AnswerParser:
    """Collects the bytes of one response."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: tuple[int, dict[str, str], bool] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no byte has been received."""
        return not self._buffer and self._head is None

    def feed(self, data: bytes) -> Answer | None:
        """Adds received bytes. Returns the answer once it is complete. `b""` is the end of the
        stream.

        Raises `ProtocolError` if the response is malformed, too large or incomplete.
        """
        is_end = not data
        self._buffer += data
        while self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if is_end or len(self._buffer) > _HEAD_BYTES_MAX:
                    raise ProtocolError("the service answered with something other than HTTP")
                return None
            head = _parse_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
            # Informational responses precede the final one.
            if head[0] >= 200:
                self._head = head
        status, headers, keeps_alive = self._head
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = _parse_chunks(self._buffer)
        elif "content-length" in headers:
            length = _length(headers["content-length"], 10)
            if length > _BODY_BYTES_MAX:
                raise ProtocolError("the answer of the service is too large")
            body = bytes(self._buffer[:length]) if len(self._buffer) >= length else None
        else:
            keeps_alive = False
            body = bytes(self._buffer) if is_end or status in (204, 304) else None
        if body is None:
            if is_end:
                raise ProtocolError("the service closed the connection within its answer")
            if len(self._buffer) > 2 * _BODY_BYTES_MAX:
                raise ProtocolError("the answer of the service is too large")
            return None
        return Answer(status, headers, body, keeps_alive)


def _parse_head(head: bytes) -> tuple[int, dict[str, str], bool]:
    status_line, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    status = rest[:3]
    if (
        version not in ("HTTP/1.0", "HTTP/1.1")
        or not (status.isascii() and status.isdigit())
        or len(status) < 3
    ):
        raise ProtocolError("the service answered with something other than HTTP")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise ProtocolError("the service answered with a malformed header")
        headers[name.lower()] = value.strip()
    keeps_alive = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return int(status), headers, keeps_alive


def _parse_chunks(buffer: bytearray) -> bytes | None:
    """Returns the body of a complete chunked message, or `None` if more bytes are needed."""
    body, at = bytearray(), 0
    while True:
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return None
        size = _length(bytes(buffer[at:end]).partition(b";")[0].decode("latin-1").strip(), 16)
        at = end + 2
        if len(body) + size > _BODY_BYTES_MAX:
            raise ProtocolError("the answer of the service is too large")
        if size == 0:
            # Trailers end with an empty line.
            ends = buffer.startswith(b"\r\n", at) or buffer.find(b"\r\n\r\n", at) >= 0
            return bytes(body) if ends else None
        if len(buffer) < at + size + 2:
            return None
        body += buffer[at : at + size]
        at += size + 2


def _length(text: str, base: int) -> int:
    digits = "0123456789abcdefABCDEF"[: 10 if base == 10 else 22]
    if not text or len(text) > 12 or any(char not in digits for char in text):
        raise ProtocolError("the service answered with a malformed length")
    return int(text, base)
