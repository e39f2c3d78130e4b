"""The messages of ``extproc.proto``, as modules that ``make protocol`` makes of it."""

from kvsync.extproc.protocol import extproc_pb2 as messages

__all__ = ["messages"]
