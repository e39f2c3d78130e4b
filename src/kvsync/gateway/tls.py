"""TLS of a listening port whose certificate is renewed while it listens.

asyncio keeps the context that a server was started with. So that one only hands each handshake on to the context in
force: certificate, key and the authorities of client certificates all come from there. What is connected stays so.
"""

from __future__ import annotations

import ssl

from kvsync.config import TlsSettings
from kvsync.config.credentials import server_context
from kvsync.config.live import Live


class PortTls:
    """The TLS of one port.

    Args:
        what: the log's word for the port's certificate.
        settings: with a certificate.

    Raises:
        BadFile: the files can't be used.
    """

    def __init__(self, what: str, settings: TlsSettings) -> None:
        files = (settings.cert, settings.key, settings.client_ca)
        self.live = Live(what, lambda: server_context(settings), files)
        """To be looked at now and then."""
        self.context = self.live.value
        """For the server, for as long as it listens."""
        self.context.sni_callback = self._hand_on

    def _hand_on(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake, whether the client names a host or not."""
        connection.context = self.live.value


def port_tls(what: str, settings: TlsSettings) -> PortTls | None:
    """``None`` for a port without TLS."""
    return None if settings.cert is None else PortTls(what, settings)


__all__ = ["PortTls", "port_tls"]
