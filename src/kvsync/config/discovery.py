"""What can be set about finding engines: in Kubernetes, and which adapters they have loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from kvsync.config.access import Seconds, Section
from kvsync.config.addresses import http_address, loopback

ALL: str = "*"
"""Stands for every namespace."""


def _server(text: str) -> str:
    return str(http_address(text, path_allowed=True))


Namespace = Annotated[str, Field(pattern=r"^(\*|[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)$")]
Selector = Annotated[str, Field(max_length=4096, pattern=r"^[A-Za-z0-9 ._/=!,()-]*$")]


class DiscoverySettings(Section):
    """What engines are asked about themselves, however they were found."""

    adapters: bool = True
    """Ask engines which adapters they have loaded (``/v1/models``)."""
    adapters_interval: Seconds = 30.0
    """Between two such questions to one engine."""


class KubernetesSettings(Section):
    """Engines that are pods. Whose labels say what is in docs/kubernetes.md."""

    enabled: bool = False
    """Find engines among pods, beside those that the file lists."""
    namespaces: tuple[Namespace, ...] = ()
    """Where to look; none: the gateway's own namespace, ``*``: everywhere (needs a ClusterRole)."""
    selector: Selector | None = None
    """Label selector: the API server tells of such pods only."""
    api_server: Annotated[str, AfterValidator(_server)] | None = None
    """Base URL of the API server; that of the cluster it runs in when not set."""
    token_file: Path | None = None
    """The token to show, read again for every request; the pod's own in a cluster."""
    ca_file: Path | None = None
    """PEM: who signs the API server's certificate; the cluster's own in a cluster."""
    connect_timeout: Seconds = 5.0
    """For a connection to the API server."""
    list_timeout: Seconds = 60.0
    """For one page of a list, and for the beginning of the answer to a watch."""
    watch_timeout: Seconds = 60.0
    """The API server is asked to end a watch after this long. One that stays silent for longer is given up, so this is
    how long a connection that is dead and does not say so can hide changes."""
    relist_interval: Seconds = 300.0
    """Between two whole lists, whatever the watch says: an open watch outlives the right to it."""
    degraded_after: Seconds = 60.0
    """Without word from the API server for this long, discovery counts as degraded."""


class Unfit(NamedTuple):
    """Settings that don't go together."""

    field: str
    message: str
    mend: str


def unfit(settings: KubernetesSettings | None) -> Iterator[Unfit]:
    """What of the Kubernetes settings can't work, files aside."""
    if settings is None or not settings.enabled:
        return
    if len(settings.namespaces) > 1 and ALL in settings.namespaces:
        yield Unfit("namespaces", "names others beside *, which is all of them", "give either * or the names")
    if len(set(settings.namespaces)) < len(settings.namespaces):
        yield Unfit("namespaces", "names one twice", "name each once")
    if settings.api_server is None:
        return
    server = http_address(settings.api_server, path_allowed=True)
    if server.scheme == "http" and settings.token_file is not None and not loopback(server.host):
        yield Unfit("token_file", "would be sent in the clear", "use https for api_server, or give no token")
    if not settings.namespaces:
        mend = "name the namespaces to look in, or * for all"
        yield Unfit("namespaces", "is missing beside api_server: outside a cluster there is no own namespace", mend)


__all__ = ["ALL", "DiscoverySettings", "KubernetesSettings", "Unfit", "unfit"]
