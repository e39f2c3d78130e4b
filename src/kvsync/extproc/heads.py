"""A request's or answer's head as Envoy tells it, in the form in which the rest of the gateway reads one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvsync.extproc.protocol import messages as pb
from kvsync.requests import errors
from kvsync.requests.headers import Field
from kvsync.requests.paths import MAX_URL

_SUBSET: Final = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
"""Of the Gateway API's endpoint-picker protocol: where Envoy says which endpoints may be chosen."""
_FILTER: Final = "envoy.filters.http.ext_proc"


class Head(NamedTuple):
    method: bytes
    """Empty in an answer's."""
    target: bytes
    status: int
    """0 in a request's."""
    fields: list[Field]


def read_head(told: pb.HttpHeaders) -> Head:
    """Pseudo-fields apart, the others in their order."""
    method = target = b""
    status = 0
    fields: list[Field] = []
    for header in told.headers.headers:
        name = header.key.encode()
        value = header.raw_value or header.value.encode()
        if not name.startswith(b":"):
            fields.append((name.lower(), name, value))
        elif name == b":path":
            target = value
        elif name == b":method":
            method = value
        elif name == b":status" and value.isdigit():
            status = int(value)
    return Head(method, target, status, fields)


def check_framing(head: Head, max_body_bytes: int, *, has_body: bool) -> None:
    """Refuse what the gateway's own port refuses, as far as Envoy has not seen to it, and before anything else as
    there.

    Raises:
        Problem: see there.
    """
    if len(head.target) > MAX_URL:
        raise errors.url_too_long(MAX_URL)
    encoded = too_large = False
    for lower, _, value in head.fields:
        if lower == b"expect" and value.strip().lower() != b"100-continue":
            raise errors.expectation()
        if lower == b"content-length" and value.isdigit():
            too_large = too_large or len(value) > 20 or int(value) > max_body_bytes
        elif lower == b"content-encoding":
            encoded = encoded or value.strip().lower() not in (b"", b"identity")
    if too_large:
        raise errors.body_too_large(max_body_bytes)
    if encoded and has_body:
        raise errors.compressed_body()


def read_subset(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints, each ``address:port``, that may be chosen; ``None``: all."""
    namespace, key = _SUBSET
    if namespace not in message.metadata_context.filter_metadata:
        return None
    fields = message.metadata_context.filter_metadata[namespace].fields
    if key not in fields:
        return None
    given = fields[key]
    kind = given.WhichOneof("kind")
    listed: Sequence[str]
    if kind == "list_value":
        listed = [value.string_value for value in given.list_value.values]
    else:
        listed = given.string_value.split(",")  # some proxies write it so; anything else is a list of nobody
    return frozenset(endpoint.strip() for endpoint in listed if endpoint.strip())


def read_flags(message: pb.ProcessingRequest) -> int:
    """``response.flags``: what went wrong between Envoy and the engine. 0 where nothing did, or Envoy does not say."""
    if _FILTER not in message.attributes:
        return 0
    fields = message.attributes[_FILTER].fields
    return int(fields["response.flags"].number_value) if "response.flags" in fields else 0


__all__ = ["Head", "check_framing", "read_flags", "read_head", "read_subset"]
