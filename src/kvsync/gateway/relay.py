"""An engine's answer on its way to the client.

What must always hold: status, end-to-end fields and body bytes pass as they came, but for the usage that was asked for
in the client's name; and an answer that the engine does not say is whole is never passed on as a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvsync.gateway.http1 import ClientConnection
from kvsync.requests.headers import Field, answer_fields, is_event_stream
from kvsync.requests.inject import STREAMS, UsageChunk
from kvsync.requests.usage import UsageTail


class Relay:
    """One answer. The status is 0 until it begins."""

    __slots__ = ("_chunk", "_client", "_must_say_done", "_usage", "begun", "status")

    def __init__(self, client: ClientConnection) -> None:
        self._client = client
        self._usage = UsageTail()
        self._chunk: UsageChunk | None = None
        self._must_say_done = False
        self.status = 0
        self.begun = False
        """Its first body byte came."""

    def expect_usage(self) -> None:
        """The engine was asked for usage that the client did not ask for."""
        self._chunk = UsageChunk()

    def start(
        self,
        path: str,
        status: int,
        phrase: bytes,
        fields: list[Field],
        own: bytes,
        length: int | None,
        until_close: bool,
    ) -> None:
        """The head; ``own`` are the gateway's fields. The rest is as :meth:`kvsync.gateway.upstream.Listener.on_head`
        has it."""
        self.status = status
        if until_close or self._chunk is not None:
            stream = status == 200 and is_event_stream(fields)
            # A killed engine's connections are closed by its kernel, in good order: only the stream itself can tell.
            self._must_say_done = until_close and stream and path in STREAMS
            if not stream:
                self._chunk = None
            elif self._chunk is not None:
                length = None  # it will be shorter
        self._client.start(status, phrase, [*answer_fields(fields), own], length, until_close=until_close)

    def body(self, piece: bytes) -> None:
        self.begun = True
        self._usage.add(piece)
        if self._chunk is None:
            self._client.body(piece)
        elif passing := self._chunk.feed(piece):  # an empty piece would end the answer
            self._client.body(passing)

    def chunks(self, chunks: bytes, body: bytes) -> None:
        """More of the body, and the chunks as which it came; sent at once."""
        if self._chunk is None:
            self._usage.add(body)
            self._client.chunks(chunks, body)
        else:
            self.body(body)
            self._client.flush()

    def whole(self) -> bool:
        """Whether what came up to the engine's last byte was all of it."""
        return not self._must_say_done or self._usage.ends_with_done()

    def end(self) -> None:
        """The answer is whole."""
        self._pass_rest()
        self._client.end()

    def cut(self) -> None:
        """The answer breaks off."""
        self._pass_rest()
        self._client.cut()

    def usage(self) -> Mapping[str, object] | None:
        """The last usage object of a good answer."""
        return self._usage.find() if self.status == 200 else None

    def _pass_rest(self) -> None:
        if self._chunk is not None and (rest := self._chunk.rest()):
            self._client.body(rest)


__all__ = ["Relay"]
