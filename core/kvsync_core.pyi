"""The native prefix index of kvsync. The face is that of ``kvsync.index.match.Index``, where every rule is stated."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, final, overload

from typing_extensions import Buffer

__all__ = ["Match", "Matches", "PrefixIndex", "Progress", "Receiver", "Report", "lift_ids"]

class _Batch(Protocol):
    """An event batch that is decoded already, as ``kvsync.events.types.EventBatch``."""

    @property
    def events(self) -> Sequence[object]: ...
    @property
    def data_parallel_rank(self) -> int | None: ...

@final
class Match:
    """What one worker can do for one prompt. Equal to any object with equal attributes, whatever its ``as_of``. All
    figures but that are tokens."""

    @property
    def credit(self) -> int:
        """The worker can serve the first ``credit`` tokens from its cache. Always 0 under trust ``none``."""

    @property
    def expected(self) -> int:
        """Tokens beyond ``credit`` that it may well have: a hint, never credit."""

    @property
    def by_tier(self) -> Mapping[Literal["gpu", "cpu", "storage"], int]:
        """How ``credit`` divides over the tiers; tiers without tokens are absent."""

    @property
    def trust(self) -> Literal["exact", "partial", "none"]: ...
    @property
    def as_of(self) -> int:
        """Where the worker's losses stood when this was answered; :meth:`PrefixIndex.observe` wants it back."""

@final
class Report:
    """What became of one stream during :meth:`Receiver.wait`."""

    @property
    def stream(self) -> int:
        """As given with its sockets."""

    @property
    def count(self) -> int:
        """Batches that were applied."""

    @property
    def last(self) -> int:
        """The number of the last one; 0 if there was none."""

    @property
    def times(self) -> bytes:
        """The times of the last 256 of them at most, oldest first, 8 bytes each as they stood in the batches."""

    @property
    def seconds(self) -> float:
        """How long the longest round took in which any of them were applied, other streams' included."""

    @property
    def messages(self) -> int:
        """Messages that were applied since the queue was last found empty."""

    @property
    def size(self) -> int:
        """Bytes of them."""

    @property
    def emptied(self) -> bool:
        """The queue was found empty."""

    @property
    def asks(self) -> bool:
        """The stream's sockets have to be looked at; none of them has anything taken from it any more."""

    @property
    def handed(self) -> list[list[bytes]]:
        """Messages that were read and not applied, in order, each as its frames: what comes next in the stream."""

@final
class Progress:
    """How far a receiver has come with a stream. Any thread may look, also while it waits."""

    @property
    def count(self) -> int:
        """Batches that were applied since :meth:`Receiver.follow` gave this; the reports so far have no more."""

@final
class Receiver:
    """Reads ZeroMQ sockets without the GIL and applies to its index what continues their streams. Linux only.

    One thread does everything with it and with the sockets. A socket has to be open when it is added, and removed
    before it is closed: nothing here can check that.
    """

    def add(self, stream: int, socket: int) -> None:
        """Wait for one more socket of a stream (``zmq.Socket.underlying``).

        Raises:
            OSError: it is none that can be waited for, or is waited for already.
            ValueError: 0.
        """

    def remove(self, socket: int) -> None:
        """Wait for a socket no longer. One that is not waited for is ignored."""

    def follow(self, socket: int, worker: str, next: int, at: float) -> Progress | None:
        """Apply a message of three frames from this socket to this worker if it has number ``next``, and a float64 time
        that is not before ``at`` and less than ``pause`` after it; then the one behind it, and so on.

        None: the socket is not waited for, or the worker not registered; then nothing is applied.
        """

    def leave(self, socket: int) -> None:
        """Apply nothing more from this socket."""

    def wait(self, seconds: float, messages: int, size: int) -> list[Report]:
        """Wait and apply until the time is over, ``call`` is readable, or a stream has to be asked about: there is
        a message that is not to be applied, anything on a socket from which nothing is, or too large a backlog.

        What is read when ``call`` or another socket of the stream becomes readable is not applied but reported. One
        round takes about ``messages`` and ``size`` bytes at most, shared among the sockets that have any.

        Raises:
            ValueError: ``seconds`` is negative or no time.
        """

@final
class Matches:
    """A mapping of every registered worker of the model to its :class:`Match`; equal to any mapping with equal items.
    Objects are made of those workers only that are asked for."""

    def hits(self) -> list[tuple[str, Match]]:
        """The workers that hold something of the prompt, or may."""

    def doubts(self) -> dict[str, Literal["exact", "partial", "none"]]:
        """How far those workers can be trusted that can't be trusted to the full."""

    def __eq__(self, other: object, /) -> bool: ...
    def __getitem__(self, worker: str, /) -> Match: ...
    def __contains__(self, worker: object, /) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    @overload
    def get(self, worker: str, /) -> Match | None: ...
    @overload
    def get(self, worker: str, default: Match, /) -> Match: ...
    def keys(self) -> tuple[str, ...]: ...
    def values(self) -> list[Match]: ...
    def items(self) -> list[tuple[str, Match]]: ...

@final
class PrefixIndex:
    """The global prefix index.

    Any number of threads may call :meth:`match` while one applies; a match sees each worker's batch wholly or not at
    all. What is asked of a worker that is not registered is ignored.
    """

    def __init__(self, max_blocks: int | None = None, max_bytes: int | None = None) -> None:
        """``max_blocks``, ``max_bytes``: the most that all workers together may have and take here; ``None``: no cap.

        Raises:
            ValueError: one of them is below 1.
        """
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
    ) -> None:
        """Register a worker, empty and trusted ``exact``; a known one becomes new, but for its marks.

        Raises:
            ValueError: a fact that can't be: not positive, or an unknown ``spec_decode``.
        """

    def remove_worker(self, worker: str) -> None: ...
    def apply(self, worker: str, payload: Buffer | _Batch) -> None:
        """Apply one batch, without the GIL. Never raises because of what a payload of bytes holds."""

    def apply_many(self, batches: Iterable[tuple[str, Buffer | _Batch]]) -> None:
        """Apply batches in order, all of them without the GIL.

        Raises:
            TypeError, ValueError, OverflowError: an item is no (worker, payload), or an event object holds what no
                wire can carry; the items before it are applied.
        """

    def receiver(self, library: str, call: int, *, pause: float, backlog: int, backlog_size: int) -> Receiver:
        """A way from ZeroMQ sockets into this index. Linux only.

        Args:
            library: path of a shared object that is loaded and has, or was linked to, the libzmq of these sockets.
            call: a descriptor; while it is readable :meth:`Receiver.wait` returns at once, and applies nothing.
            pause: seconds; a batch so much later than the one before it, or more, is not applied.
            backlog, backlog_size: a stream of which more messages, or bytes, were applied since its queue was found
                empty is asked about.

        Raises:
            OSError: there is no such library, or ``call`` is no descriptor.
        """

    def forget(self, worker: str) -> None:
        """A loss beyond repair: drop all that is known and go on as ``partial``."""

    def new_epoch(self, worker: str) -> None:
        """Another process answers for this worker: drop all that is known, begin again as ``exact``."""

    def relearn(self, worker: str) -> None:
        """Its batches come again from this epoch's number 0 on: drop what is known, begin again as ``exact``. The same
        process: marks stay."""

    def suspend(self, worker: str) -> None:
        """What is known may be out of date: until ``resume`` its trust is ``none``, would-be credit is expected."""

    def resume(self, worker: str) -> None:
        """All that its stream said so far is applied."""

    def mark_reannouncing(self, worker: str) -> None:
        """A request with ``kv_cache_report_mode=full`` goes to this worker."""

    def mark_hidden_keys(self, worker: str) -> None:
        """A request with a salt or an image goes to this worker: if its dialect hides those, trust is ``none``."""

    def drops_last_block(self, worker: str) -> None:
        """As if registered with ``spec_decode="eagle"``: its answers show that it decodes with EAGLE or MTP."""

    def observe(
        self,
        worker: str,
        tokens: Buffer | Sequence[int],
        model: str,
        cached: int,
        credit: int,
        as_of: int,
        until: float,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        block_keys: Sequence[Sequence[object] | None] | None = None,
    ) -> Literal["steady", "evicted", "unknown"]:
        """Learn from an answer: its engine said that it had ``cached`` tokens of this prompt. ``credit`` and ``as_of``
        are those of the match that the worker was chosen by; what this teaches ends ``until``, in seconds of the clock
        that :meth:`expire` is told.

        Raises:
            TypeError, ValueError, OverflowError: as :meth:`match`; ``cached`` or ``credit`` is negative; ``until`` is
                not a number.
        """

    def expire(self, now: float) -> None:
        """End what answers taught for no longer than this.

        Raises:
            ValueError: ``now`` is not a number.
        """

    def match(
        self,
        tokens: Buffer | Sequence[int],
        model: str,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        block_keys: Sequence[Sequence[object] | None] | None = None,
    ) -> Matches:
        """What each worker of ``model`` can do for this prompt.

        Raises:
            TypeError: not ints, or a buffer of another item type than uint32 (format 'I') or bytes.
            ValueError: bytes whose length is no multiple of 4, or a buffer that is not contiguous.
            OverflowError: a token below 0 or above 2**32 − 1.
        """

    def block_sizes(self, model: str) -> dict[str, int]:
        """Tokens per block of each worker of ``model``; 0 before its first store."""

    def dump(self, worker: str) -> bytes | None:
        """What is known of a worker, for :meth:`restore`, here or elsewhere. Of one moment, whichever thread
        asks, while all others go on; to be called where no batches come for the worker meanwhile. None: that can't be
        told now, or the worker is not registered."""

    def restore(self, worker: str, image: bytes) -> None:
        """Have a worker that is registered, and of which nothing is known yet, know what an image tells.

        Raises:
            ValueError: the image is damaged or of another version or model, or something is known of the worker; then
                nothing is changed.
        """

    def stats(self) -> dict[str, object]:
        """State per worker, and what was counted since it was added."""

def lift_ids(text: bytes, member: str, most: int = 1) -> tuple[bytes, list[bytes]] | None:
    """Prompts of token ids, taken out of a JSON object without making Python objects of them.

    Looks for the top-level ``member`` whose value is an array of ids, or an array of at most ``most`` arrays of ids;
    none of them empty, each id an integer of 32 bits.

    Returns:
        The text with ``[]`` in the value's place, and each prompt as packed native-endian uint32. The rest is not
        judged: it is JSON exactly if ``text`` is. ``None`` where it can't be said for certain that a parser would find
        just these (the member comes twice, a name has an escape, …): then nothing is known.
    """
