"""kvsync: follow the KV-cache events of a fleet of vLLM engines and know which engine holds which prefix.

This is the library's public surface: reading events, and the prefix index. The gateway is the command ``kvsync serve``.

    >>> index = kvsync.PrefixIndex()
    >>> index.add_worker("engine-a", "my-model")
    >>> index.apply("engine-a", payload)                  # the third frame of a ZMQ message
    >>> index.match(token_ids, "my-model")["engine-a"].credit
"""

from importlib.metadata import version

from kvsync.events.decode import decode_batch
from kvsync.events.types import (
    AllBlocksClearedEvent,
    BlockRemovedEvent,
    BlockStoredEvent,
    EventBatch,
    SkippedEvent,
    UndecodableBatch,
)
from kvsync.index import Match, PrefixIndex

__version__ = version("kvsync")

__all__ = [
    "AllBlocksClearedEvent",
    "BlockRemovedEvent",
    "BlockStoredEvent",
    "EventBatch",
    "Match",
    "PrefixIndex",
    "SkippedEvent",
    "UndecodableBatch",
    "__version__",
    "decode_batch",
]
