"""The allow-list: which request targets exist, and which do not.

A target is decoded once, its slashes and dots are resolved, and the result must be one of the listed paths letter for
letter. What goes to an engine is the *listed* path, never the client's spelling: no encoding trick can reach an
engine's admin routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from kvsync.requests import errors

OPENAI_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)
TOKENIZE_PATHS = ("/tokenize", "/detokenize")
MODELS = "/v1/models"
MAX_URL = 8 << 10
"""Bytes of a target."""


@dataclass(frozen=True, slots=True)
class Route:
    """What a request target means."""

    path: str
    """The listed path; :data:`MODELS` for the model list and for one model."""
    methods: tuple[bytes, ...]
    model: str | None = None
    """The id in ``/v1/models/{id}``."""

    @property
    def allow(self) -> bytes:
        return b", ".join((*self.methods, b"OPTIONS"))


class Paths:
    """The allow-list of one gateway."""

    def __init__(self, extra: Iterable[str] = (), *, expose_tokenize: bool = False) -> None:
        listed = [*OPENAI_PATHS, *extra]
        if expose_tokenize:
            listed += TOKENIZE_PATHS
        self._routes: dict[bytes, Route] = {}
        for path in listed:
            raw = path.encode()
            if normalise(raw) != raw or path == MODELS or path.startswith(MODELS + "/"):
                raise ValueError(f"not a path that can be listed: {path!r}")
            self._routes[raw] = Route(path, (b"POST",))
        self._routes[MODELS.encode()] = Route(MODELS, (b"GET", b"HEAD"))
        self._one_model = MODELS.encode() + b"/"

    def find(self, target: bytes) -> tuple[Route, bytes]:
        """The route of a request target and its query string (``b""``, or with its question mark).

        Raises :class:`~kvsync.requests.errors.Problem`: 400 for a target that is none, 501 for one that is not listed.
        """
        route = self._routes.get(target)
        if route is not None:  # the common spelling
            return route, b""
        path, mark, query = target.partition(b"?")
        decoded = normalise(_origin_form(path))
        route = self._routes.get(decoded)
        if route is None:
            if not decoded.startswith(self._one_model):
                raise errors.unknown_path()
            try:
                model = decoded[len(self._one_model) :].decode()
            except UnicodeDecodeError:
                raise errors.bad_request("the URL is not UTF-8") from None
            route = Route(MODELS, (b"GET", b"HEAD"), model)
        return route, mark + query


def _origin_form(target: bytes) -> bytes:
    """The path of an absolute-form target (``http://host/path``); the host is not looked at."""
    if target.startswith(b"/"):
        return target
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        raise errors.unknown_path()
    return b"/" + rest.partition(b"/")[2]


def normalise(path: bytes) -> bytes:
    """Decode once, then resolve empty, ``.`` and ``..`` segments. Raises ``Problem`` on control bytes and fragments."""
    if b"%" in path:
        path = unquote_to_bytes(path)
    if b"#" in path or b"\\" in path or any(byte < 0x20 or byte == 0x7F for byte in path):
        raise errors.bad_request("the URL holds a character that it may not")
    kept: list[bytes] = []
    for segment in path.split(b"/"):
        if segment == b"..":
            if kept:
                kept.pop()
        elif segment not in (b"", b"."):
            kept.append(segment)
    return b"/" + b"/".join(kept)


__all__ = ["MAX_URL", "MODELS", "OPENAI_PATHS", "TOKENIZE_PATHS", "Paths", "Route", "normalise"]
