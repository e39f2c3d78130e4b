"""Why Redis did not do what it was asked: one word for each, to count and to act upon.

What must always hold: every exception of the client has a word, and words never hold anything that a server sent.
"""

from __future__ import annotations

import ssl
from typing import Final, Literal, TypeAlias, get_args

Reason: TypeAlias = Literal[
    "off",
    "not_installed",
    "stopped",
    "down",
    "resting",
    "busy",
    "timeout",
    "unreachable",
    "tls",
    "auth",
    "loading",
    "cluster_down",
    "bad_reply",
    "no_permission",
    "full",
    "read_only",
    "error",
    "fault",
]
"""``off``, ``not_installed``, ``stopped``: there is nobody to ask · ``down``: it was not reached a moment ago ·
``resting``: calls of this kind took too long · ``busy``: no connection was free within the budget · ``timeout``: no
answer within it · ``no_permission``, ``full``, ``read_only`` and ``error`` are answers."""
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
DEAD: Final[frozenset[Reason]] = frozenset(
    ("timeout", "unreachable", "tls", "auth", "loading", "cluster_down", "bad_reply")
)
"""Those that say of the server that it can't be used now, whatever it is asked."""


class Unanswered(Exception):
    """Redis did not do it, or not in time; whether it will have done it is not known."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Reason = reason


def reason_of(error: BaseException) -> Reason:
    """The word for what the client raised."""
    from redis import exceptions as raised  # not there in every installation

    named: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], Reason], ...] = (
        ((TimeoutError, raised.TimeoutError), "timeout"),
        ((raised.AuthenticationError, raised.AuthenticationWrongNumberOfArgsError), "auth"),
        (raised.NoPermissionError, "no_permission"),
        (raised.BusyLoadingError, "loading"),
        (raised.MaxConnectionsError, "busy"),
        (raised.ReadOnlyError, "read_only"),
        (raised.OutOfMemoryError, "full"),
        ((raised.ClusterError, raised.RedisClusterException), "cluster_down"),
        (raised.InvalidResponse, "bad_reply"),
    )
    for kinds, reason in named:
        if isinstance(error, kinds):
            return reason
    if isinstance(error, raised.ConnectionError | OSError):
        return "tls" if any(isinstance(each, ssl.SSLError) for each in _behind(error)) else "unreachable"
    if isinstance(error, raised.ResponseError):
        return "cluster_down" if str(error).startswith(("MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")) else "error"
    if isinstance(error, raised.RedisError | ValueError | RecursionError):  # what can't be parsed
        return "bad_reply"
    return "fault"


def _behind(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


__all__ = ["DEAD", "REASONS", "Reason", "Unanswered", "reason_of"]
