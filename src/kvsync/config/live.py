"""Values that are made from files, and made again when the files change: mounted secrets and certificates are renewed.

What must always hold: the value in force is the last one that could be made. A file that is broken or gone changes
nothing and is told once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar

from kvsync.config.credentials import BadFile

T = TypeVar("T")
Looked: TypeAlias = Literal["unchanged", "applied", "broken"]
_Sign: TypeAlias = tuple[int, int, int, int] | None

_log = logging.getLogger(__name__)


class Live(Generic[T]):
    """One value.

    Args:
        what: the log's word for it.
        make: reads the files. Raises BadFile; from the constructor that reaches the caller.
        files: those that it reads; ``None`` among them are left out.
    """

    def __init__(self, what: str, make: Callable[[], T], files: Iterable[Path | None] = ()) -> None:
        self._what = what
        self._make = make
        self._files = tuple(file for file in files if file is not None)
        self._signs = self._look()
        self.value: T = make()
        """The value now. Replaced as a whole, by whichever thread calls :meth:`check`."""

    def check(self) -> Looked:
        """Make the value again if a file changed. Reads files: call it where that may take its time."""
        signs = self._look()
        if signs == self._signs:
            return "unchanged"
        # Taken before reading: a file that changes meanwhile is read again at the next look.
        self._signs = signs
        try:
            self.value = self._make()
        except BadFile as bad:
            _log.error("%s stay as they are: %s (%s)", self._what, bad, bad.mend)
            return "broken"
        _log.info("%s were read again", self._what)
        return "applied"

    def _look(self) -> tuple[_Sign, ...]:
        return tuple(map(_sign, self._files))


def _sign(file: Path) -> _Sign:
    """What changes when a file is written, replaced, or (as Kubernetes does) reached by another link."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size


__all__ = ["Live", "Looked"]
