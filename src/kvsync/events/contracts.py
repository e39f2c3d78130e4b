"""What this room needs from others, and what it tells them: plain protocols and values.

The index satisfies :class:`Sink` without this room knowing it. Its calls come from the reader's thread, in order; only
``remove_worker`` may come from any thread at any time, so that a removal waits for nothing that is queued. Hence what
was read of a worker before its removal may still come after it, and has to be ignored like everything else about a
worker that is not registered; nothing of it comes after the next ``add_worker``. ``add_worker`` for a registered worker
makes it new (other facts, another place), which is not the same as removing it first: it is the same engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from kvsync.discovery.model import Engine
from kvsync.events.stream import Counts, Position, State
from kvsync.events.types import EventBatch


class Sink(Protocol):
    """Who gets the batches; ``kvsync.index.match.Index`` says what each call means."""

    def add_worker(
        self,
        worker: str,
        model: str,
        *,
        usable_blocks: int | None = None,
        attention_chunk_size: int | None = None,
        spec_decode: str | None = None,
        hit_alignment: int | None = None,
        rank: int | None = None,
    ) -> None: ...

    def remove_worker(self, worker: str) -> None: ...

    def apply_many(self, batches: Iterable[tuple[str, bytes]]) -> None: ...

    def forget(self, worker: str) -> None: ...

    def new_epoch(self, worker: str) -> None: ...

    def relearn(self, worker: str) -> None: ...

    def suspend(self, worker: str) -> None: ...

    def resume(self, worker: str) -> None: ...


class Report(Protocol):
    """What became of one stream while a :class:`Receiver` waited."""

    @property
    def stream(self) -> int: ...
    @property
    def count(self) -> int:
        """Batches that were applied."""

    @property
    def last(self) -> int:
        """The number of the last one."""

    @property
    def times(self) -> bytes:
        """The float64 times of the last ones, oldest first, as they stood in the batches."""

    @property
    def seconds(self) -> float:
        """How long the longest drain took, other streams' batches included."""

    @property
    def messages(self) -> int:
        """Messages that were taken since the queue was last found empty."""

    @property
    def size(self) -> int:
        """Bytes of them."""

    @property
    def emptied(self) -> bool:
        """The queue was found empty."""

    @property
    def asks(self) -> bool:
        """Somebody has to look at the stream's sockets; nothing more is taken of it."""

    @property
    def handed(self) -> list[list[bytes]]:
        """Messages that were read and not taken, as frames."""


class Progress(Protocol):
    """How far a :class:`Receiver` has come with a stream."""

    @property
    def count(self) -> int:
        """Batches that were applied, reported or not. Any thread may ask."""


class Receiver(Protocol):
    """Reads sockets of streams, and applies what continues a stream; ``kvsync_core.Receiver`` says it in full."""

    def add(self, stream: int, socket: int) -> None: ...

    def remove(self, socket: int) -> None: ...

    def follow(self, socket: int, worker: str, next: int, at: float) -> Progress | None: ...

    def leave(self, socket: int) -> None: ...

    def wait(self, seconds: float, messages: int, size: int) -> Sequence[Report]: ...


@runtime_checkable
class DrainingSink(Sink, Protocol):
    """A sink that can read the sockets itself."""

    def receiver(self, library: str, call: int, *, pause: float, backlog: int, backlog_size: int) -> Receiver:
        """Raises: OSError: it can't use this library."""
        ...


@runtime_checkable
class TellingSink(Sink, Protocol):
    """A sink that can tell what it knows of a worker to another replica's."""

    def dump(self, worker: str) -> bytes | None:
        """``None``: that can't be told now. The one call that comes in another thread than the reader's, which
        applies nothing of this worker meanwhile; what happens to it all the same is told wholly or not at all."""
        ...

    def restore(self, worker: str, image: bytes) -> None:
        """Raises: ValueError: it can't be taken; then nothing is changed."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was known of a worker when its stream stood at a position."""

    position: Position
    image: bytes


Warm: TypeAlias = "Callable[[Target], Awaitable[Snapshot | None]]"
"""Gives what another replica told of a worker, if there is something. Whoever asks waits no longer than it wants to."""


class Turn(Protocol):
    """One stream's turn at replaying, asked for or taken."""

    def end(self) -> None:
        """It is over, or wanted no more. Any thread may say so, and more than once."""


class Turns(Protocol):
    """Lets few replays of one engine run at a time, over all replicas."""

    def ask(self, engine: str, granted: Callable[[], object]) -> Turn:
        """Ask for a turn. ``granted`` is called in any thread, after a bounded while in any case."""
        ...


class Timer(Protocol):
    """Hears how long hand-overs to the sink took. All other figures are read from :class:`WorkerStatus`."""

    def applied(self, worker: str, seconds: float) -> None:
        """A drain with batches of this worker (and perhaps of others) took so long; of drains that come between two
        turns of the reader, the longest is told."""


@dataclass(frozen=True, slots=True)
class Target:
    """One stream to follow, with all that the index must know of its worker. Two equal targets are the same stream."""

    worker: str
    engine: str
    """The engine's uid."""
    source_pod: str
    """The engine's name, as it stands in events handed to observers."""
    model: str
    rank: int
    events: str
    """Endpoint with a numeric address."""
    replay: str | None
    usable_blocks: int | None = None
    hit_alignment: int | None = None
    attention_chunk_size: int | None = None
    spec_decode: str | None = None


@dataclass(frozen=True, slots=True)
class Located:
    """Where an engine's streams are."""

    targets: tuple[Target, ...]
    complete: bool
    """Whatever the engine itself could tell was asked and answered; else it is worth asking again."""


class NotLocated(Exception):
    """It can't be told yet where an engine's streams are; the text says why, for a log."""


class TooManyStreams(NotLocated):
    """It is known where a stream is, and there is no room for it; the text says why, for a log."""


class ReaderEnded(RuntimeError):
    """The reader thread has ended, by order or by a fault, and takes no commands."""


class Locator(Protocol):
    """Finds an engine's streams; ``kvsync.events.sources`` has the one that is used."""

    async def locate(self, engine: Engine) -> Located:
        """Raises: NotLocated."""
        ...


Alarm: TypeAlias = Literal["not_located", "no_connection", "handshake", "silent"]
"""What keeps a stream from being of use: it is not known where it is; nobody listens there; who does speaks no ZMQ, or
not with us; the engine serves requests and publishes nothing."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker's stream at one moment."""

    engine: str
    """The engine's uid."""
    name: str
    """The engine's name."""
    worker: str
    rank: int
    state: State
    whole: bool
    """Nothing of the current epoch was lost."""
    last_sequence: int | None
    endpoint: str | None
    replay_endpoint: str | None
    connected: bool
    connected_since: float | None
    """Unix time."""
    asleep: bool = False
    """Its engine sleeps, as its metrics say: the cache is gone, and no credit is given until it is awake."""
    counts: Counts = field(default_factory=Counts)
    restored: bool = False
    """What is known of it began with another replica's snapshot, and that was shown to be of this epoch."""
    caught_up_in: float | None = None
    """Seconds from its registration until it had caught up for the first time; ``None`` until then."""
    connections: int = 0
    disconnections: int = 0
    reconnect_attempts: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """By reason: ``frame_count``, ``sequence_size``, ``sequence_range``, ``handshake``, ``connect_timeout``,
    ``endpoint``, ``overrun``, ``sink``, ``snapshot``, ``undecodable``."""
    scrapes_failed: Mapping[str, int] = field(default_factory=dict)
    """Looks at its engine's ``/metrics``, by reason: ``unreachable``, ``timeout``, ``status``, ``too_large``."""
    alarm: Alarm | None = None
    problem: str | None = None
    """The alarm as a sentence, with the mend."""


Observer: TypeAlias = Callable[[str, int, EventBatch], None]
"""Gets (worker, sequence number, batch with ``model_name`` and ``source_pod`` filled in), in the order of application
and in the reader's thread: be quick. One that raises is dropped."""


__all__ = [
    "Alarm",
    "DrainingSink",
    "Located",
    "Locator",
    "NotLocated",
    "Observer",
    "Progress",
    "ReaderEnded",
    "Receiver",
    "Report",
    "Sink",
    "Snapshot",
    "Target",
    "TellingSink",
    "Timer",
    "TooManyStreams",
    "Turn",
    "Turns",
    "Warm",
    "WorkerStatus",
]
