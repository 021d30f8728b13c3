"""The errors of this package.

    TidegateError
    ├── InvalidInput          a malformed limit, key, cost or option; always raised
    └── Undecided             no decision was made; handled by `on_error`
        ├── Unavailable       the service or Redis did not answer in time
        ├── PermissionDenied  the service rejected the token, or Redis the user
        ├── ForeignValue      a key in Redis holds data that Tidegate did not write
        └── ProtocolError     an answer that this version of the package does not understand

No message contains a key, an address of a client or a token.
"""

from __future__ import annotations


class TidegateError(Exception):
    """Base class of all errors of this package."""


class InvalidInput(TidegateError, ValueError):
    """The error for a malformed limit, key, cost or option. Raised whatever `on_error` says."""


class Undecided(TidegateError):
    """Base class of the errors that prevent a decision.

    `on_error` decides whether they are raised.
    """


class Unavailable(Undecided):
    """The error of a service or Redis that is unreachable, too slow, or not able to decide."""


class PermissionDenied(Undecided):
    """The error of a rejected token, or of a Redis user that must not run the script."""


class ForeignValue(Undecided):
    """The error of a key in Redis that holds data which Tidegate did not write."""


class ProtocolError(Undecided):
    """The error of an answer that is not in the documented form, or of another script version."""
