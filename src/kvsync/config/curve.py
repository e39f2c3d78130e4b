"""Keys of ZMQ CURVE, as people write them: Z85, 40 characters for 32 bytes.

No message holds a secret key, or anything read from its file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MOST: Final = 4096
"""Bytes of a key file that are looked at."""


class BadKey(ValueError):
    """A key that can't be used; ``mend`` says what to do."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(message)
        self.mend = mend


def public_key(text: str) -> str:
    """A public key, checked.

    Raises:
        BadKey: it is not Z85 text of 40 characters.
    """
    if not _Z85.fullmatch(text):
        raise BadKey(
            f"{text[:80]!r} is not a CURVE key", "write its 40 characters of Z85 text, in quotes (zmq.curve_keypair())"
        )
    return text


def secret_key(file: Path) -> str:
    """The secret key in a file that has nothing else.

    Raises:
        BadKey: the file can't be read, or has something else.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST)
    except OSError as error:
        raise BadKey(f"{file} can't be read: {error.strerror}", "give a file that this process may read") from None
    text = content.decode("ascii", errors="replace").strip()
    if not _Z85.fullmatch(text):
        raise BadKey(
            f"{file} is not a CURVE secret key", "write its 40 characters of Z85 text into it, and nothing else"
        )
    return text


__all__ = ["BadKey", "public_key", "secret_key"]
