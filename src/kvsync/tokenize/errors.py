"""How tokenizing can fail. Every failure costs routing quality only, and carries the word it is counted under."""

from __future__ import annotations


class Untokenized(Exception):
    """The tokens of a request stay unknown. ``reason`` is a short word for a metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class QueueFull(Untokenized):
    """All threads are busy and as many requests wait as may."""

    def __init__(self) -> None:
        super().__init__("queue_full")


class LocalFailed(Untokenized):
    """The local tokenizer can't do this request; the remote one may. ``cause`` is a short word."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__("tokenizer_failed", f"{cause}: {detail}")
        self.cause = cause


class RemoteFailed(Untokenized):
    """The remote tokenizer gave no tokens. ``cause`` is a short word: ``connect``, ``timeout``, ``status_503``, …"""

    def __init__(self, cause: str, detail: str = "", *, reason: str = "tokenizer_failed") -> None:
        super().__init__(reason, f"{cause}: {detail}" if detail else cause)
        self.cause = cause


__all__ = ["LocalFailed", "QueueFull", "RemoteFailed", "Untokenized"]
