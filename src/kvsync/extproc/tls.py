"""TLS of the port that Envoy asks, with certificates that are renewed while it listens."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from kvsync.config import TlsSettings
from kvsync.config.credentials import BadFile, server_context
from kvsync.config.live import Live


class _Pair(NamedTuple):
    key: bytes
    cert: bytes
    authorities: bytes | None

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.authorities)


class GrpcTls:
    """
    Args:
        settings: with a certificate.

    Raises:
        BadFile: the files can't be used.
    """

    def __init__(self, settings: TlsSettings) -> None:
        files = (settings.cert, settings.key, settings.client_ca)
        self.live = Live("certificates of the external processor's port", lambda: _read(settings), files)
        """To be looked at now and then."""
        self._told = self.live.value
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._told.configuration,
            self._renewed,  # type: ignore[arg-type]  # None is allowed: as before
            require_client_authentication=settings.client_ca is not None,
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked at every handshake, by a thread of gRPC's; ``None``: as before."""
        now = self.live.value
        if now is self._told:
            return None
        self._told = now
        return now.configuration


def _read(settings: TlsSettings) -> _Pair:
    server_context(settings)  # says what is wrong with them in words
    assert settings.cert is not None
    assert settings.key is not None
    try:
        authorities = None if settings.client_ca is None else settings.client_ca.read_bytes()
        return _Pair(settings.key.read_bytes(), settings.cert.read_bytes(), authorities)
    except OSError as error:
        raise BadFile("cert", f"can't be read: {error.strerror or error}", "give readable files") from None


__all__ = ["GrpcTls"]
