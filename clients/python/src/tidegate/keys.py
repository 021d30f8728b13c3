"""The keys of the state in Redis, as `docs/redis-state.md` of Tidegate documents them.

    tidegate:tg2:{user:42}:sliding:60000000
    prefix   │    subject  algorithm and window in microseconds
             version of the state

The subject is the hash tag, so all counters of one subject are in one slot of a Redis Cluster.
"""

from __future__ import annotations

import hashlib
import re
from typing import Union

from .errors import InvalidInput
from .limit import Limit

#: The version of the state that the embedded script reads and writes.
STATE_VERSION = "tg2"
#: The maximum length of a key in bytes.
KEY_BYTES_MAX = 64 * 1024

_PART_BYTES_MAX = 128
_PREFIX = re.compile(r"[!-z|~]{1,64}")
_ESCAPED = tuple(
    chr(byte) if 0x21 <= byte <= 0x7E and chr(byte) not in "%{}" else f"%{byte:02X}"
    for byte in range(256)
)
_PLAIN = re.compile(rb"[!-$&-z|~]{1,128}")

#: A key: text, which is encoded as UTF-8, or bytes.
KeyLike = Union[str, bytes]


def key_bytes(key: KeyLike) -> bytes:
    """Returns the bytes of a key.

    Raises `InvalidInput` if it has another type or more than 65536 bytes.
    """
    if isinstance(key, str):
        try:
            key = key.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidInput("a key must be a string without lone surrogates, or bytes") from None
    elif not isinstance(key, bytes):
        raise InvalidInput(f"a key must be a string or bytes, found {type(key).__name__}")
    if len(key) > KEY_BYTES_MAX:
        raise InvalidInput(f"a key can have at most {KEY_BYTES_MAX} bytes; this one has {len(key)}")
    return key


def key_text(key: KeyLike) -> str:
    """Returns a key as text, for JSON. Raises `InvalidInput` if its bytes are not UTF-8."""
    try:
        return key_bytes(key).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInput(
            "the service accepts only keys in UTF-8; encode other bytes, for example in hex"
        ) from None


def check_prefix(prefix: str) -> str:
    """Returns `prefix`.

    Raises `InvalidInput` unless it is 1 to 64 printable ASCII characters, no braces or spaces.
    """
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise InvalidInput(
            "a key prefix must be 1 to 64 printable ASCII characters without braces or spaces"
        )
    return prefix


def counter_key(prefix: str, subject: bytes, limit: Limit) -> str:
    """Returns the key of the counter of a subject and a limit."""
    return f"{subject_start(prefix, subject)}{limit.algorithm}:{limit.window_us}"


def ban_key(prefix: str, subject: bytes) -> str:
    """Returns the key whose existence bans a subject."""
    return subject_start(prefix, subject) + "ban"


def subject_start(prefix: str, subject: bytes) -> str:
    """Returns the start of all keys of a subject: `tidegate:tg2:{user:42}:`."""
    return f"{prefix}:{STATE_VERSION}:{{{_escape(subject)}}}:"


def _escape(part: bytes) -> str:
    if _PLAIN.fullmatch(part):
        return part.decode("ascii")
    if not part:
        return "%e"
    escaped = "".join([_ESCAPED[byte] for byte in part[: _PART_BYTES_MAX + 1]])
    if len(escaped) > _PART_BYTES_MAX:
        return "%h" + hashlib.sha256(part).hexdigest()
    return escaped
