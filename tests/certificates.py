"""Certificates for tests: authorities in memory, and the PEM files that settings name."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Authority:
    """One authority, and the files of what it signs."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA(organization_name=name)
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, *hosts: str, name: str = "port") -> tuple[Path, Path]:
        """Certificate and key for these hosts, as the files ``NAME.crt`` and ``NAME.key``; written anew each time."""
        issued = self._ca.issue_cert(*hosts)
        cert, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        issued.private_key_pem.write_to_path(key)
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return cert, key

    def server(self, *hosts: str, clients: Authority | None = None) -> ssl.SSLContext:
        """The context of a server with a certificate of this authority; ``clients``: whose certificates it wants."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(*hosts).configure_cert(context)
        if clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            clients._ca.configure_trust(context)
        return context

    def client(self, identity: Authority | None = None) -> ssl.SSLContext:
        """The context of a client that trusts this authority; ``identity``: who signs the certificate that it shows."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._ca.configure_trust(context)
        if identity is not None:
            identity._ca.issue_cert("client.test").configure_cert(context)
        return context


__all__ = ["Authority"]
