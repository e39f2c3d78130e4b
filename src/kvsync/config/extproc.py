"""What can be set of Envoy's external processor."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvsync.config.access import Section, TlsSettings

_Port = Annotated[int, Field(ge=0, le=65_535)]


class ExtProcSettings(Section):
    """The port that Envoy asks. What a request means there is said by ``gateway`` (paths, limits, salts, keys)."""

    enabled: bool = False
    """Open the port. ``kvsync extproc`` does so by itself, and leaves the data port closed."""
    host: str = "0.0.0.0"
    port: _Port = 50052
    max_message_bytes: Annotated[int, Field(ge=1 << 16)] | None = None
    """Longest gRPC message (``AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES``): a request's body is one. By default
    ``gateway.max_body_bytes`` and 1 MiB for what comes with it."""
    max_streams: Annotated[int, Field(ge=1)] = 10_000
    """Requests that Envoy may have open here; further ones are turned away."""
    read_answers: bool = False
    """Have Envoy show the bodies of answers where it lets itself be asked to (``allow_mode_override``): usage is read
    and prefill is known to be over, for six times the CPU of a streamed answer."""
    drain_delay: Annotated[float, Field(ge=0, le=86_400)] = 3.0
    """After SIGTERM, how long requests are still taken while health already says no: time for Envoy to notice."""
    tls: TlsSettings = TlsSettings()

    def longest_message(self, max_body_bytes: int) -> int:
        return self.max_message_bytes or max_body_bytes + (1 << 20)


__all__ = ["ExtProcSettings"]
