"""What Redis may answer; and why it did not do what it was asked: one word for each, to count and to act upon.

What must always hold: every exception of the client has a word, and words never hold anything that a server sent.
Whoever gets a reply need not look what type it has.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

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
    "too_large",
    "error",
    "fault",
]
"""``off``, ``not_installed``, ``stopped``: there is nobody to ask · ``down``: it was not reached a moment ago ·
``resting``: calls of this kind took too long · ``busy``: no connection was free within the budget · ``timeout``: no
answer within it · ``no_permission``, ``full``, ``read_only``, ``too_large`` and ``error`` are answers."""
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
DEAD: Final[frozenset[Reason]] = frozenset(
    ("timeout", "unreachable", "tls", "auth", "loading", "cluster_down", "bad_reply")
)
"""Those that say of the server that it can't be used now, whatever it is asked."""

UNDONE: Final[frozenset[Reason]] = frozenset(("off", "not_installed", "down", "resting", "busy"))
"""Those with which nothing was sent: of all others it is not known what was done."""


def _is_text(reply: Any) -> bool:
    return type(reply) is bytes


def _is_text_or_none(reply: Any) -> bool:
    return reply is None or type(reply) is bytes


def _is_number(reply: Any) -> bool:
    return type(reply) is int


def _is_yes_or_no(reply: Any) -> bool:
    return reply is None or type(reply) is bool


def _is_hash(reply: Any) -> bool:
    return type(reply) is dict and all(type(name) is type(value) is bytes for name, value in reply.items())


_FITS: Final[Mapping[object, Callable[[Any], bool]]] = {
    "GET": _is_text_or_none,
    "GETRANGE": _is_text,
    "SET": _is_yes_or_no,
    "DEL": _is_number,
    "INCRBY": _is_number,
    "EXPIRE": _is_yes_or_no,
    "PEXPIRE": _is_yes_or_no,
    "HSET": _is_number,
    "HDEL": _is_number,
    "HGETALL": _is_hash,
}
"""By command."""


def fits(command: object, reply: Any) -> bool:
    """Whether a server can answer this command so. Others than the above are not known here, and anything fits them."""
    fitting = _FITS.get(command)
    return fitting is None or fitting(reply)


class Unanswered(Exception):
    """Redis did not do it, or not in time; whether it will have done it is not known."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Reason = reason


def reason_of(error: BaseException) -> Reason:
    """The word for what the client raised."""
    from redis import exceptions as raised  # not there in every installation

    from kvsync.store.client import TooLarge

    named: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], Reason], ...] = (
        ((TimeoutError, raised.TimeoutError), "timeout"),
        ((raised.AuthenticationError, raised.AuthenticationWrongNumberOfArgsError), "auth"),
        (raised.NoPermissionError, "no_permission"),
        (raised.BusyLoadingError, "loading"),
        (raised.MaxConnectionsError, "busy"),
        (raised.ReadOnlyError, "read_only"),
        (raised.OutOfMemoryError, "full"),
        ((raised.ClusterError, raised.RedisClusterException), "cluster_down"),
        (TooLarge, "too_large"),
        (raised.InvalidResponse, "bad_reply"),
    )
    for kinds, reason in named:
        if isinstance(error, kinds):
            return reason
    if isinstance(error, raised.ConnectionError | OSError):
        return "tls" if any(isinstance(each, ssl.SSLError) for each in _behind(error)) else "unreachable"
    if isinstance(error, raised.ResponseError):
        return "cluster_down" if str(error).startswith(("MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")) else "error"
    if isinstance(error, raised.RedisError | ValueError | TypeError | RecursionError):  # what can't be parsed
        return "bad_reply"
    return "fault"


def refuses(unanswered: Unanswered) -> bool:
    """Whether it is because of how the server is set up or off, and not of what is at one key: it will say so to every
    call of this kind."""
    if unanswered.reason == "error":
        return str(unanswered.__cause__).startswith(("MISCONF", "NOREPLICAS"))
    return unanswered.reason in ("full", "read_only", "no_permission")


def _behind(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


__all__ = ["DEAD", "REASONS", "UNDONE", "Reason", "Unanswered", "fits", "reason_of", "refuses"]
