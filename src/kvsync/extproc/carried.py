"""One request's course by way of Envoy.

What must always hold, besides what :mod:`kvsync.requests.course` says:

- Envoy tells how an answer went only as far as it is configured to. What nobody said counts neither for an engine nor
  against it: without an answer's head a request counts as its client's leaving.
- An answer that Envoy made itself, for want of the engine's, is the failure that it stands for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvsync.discovery.model import Engine
from kvsync.extproc.heads import Head
from kvsync.extproc.targets import Targets
from kvsync.requests import errors
from kvsync.requests.admission import Admitted
from kvsync.requests.course import Course
from kvsync.requests.errors import Problem
from kvsync.requests.headers import is_event_stream, printable, withheld
from kvsync.requests.inject import UsageChunk
from kvsync.requests.ports import Outcome
from kvsync.requests.rooms import Rooms
from kvsync.requests.usage import UsageTail

PREFILL_SEEN_AFTER: Final = 1.0
"""Seconds after the head of a stream whose body nobody shows us, when its prompt counts as computed: engines send that
head before they begin."""
_FAILURES: Final[Sequence[tuple[int, Outcome]]] = (
    (0x20, "connect_failed"),  # UF
    (0x40 | 0x10 | 0x8, "reset"),  # UC, UR, LR
    (0x4 | 0x10000 | 0x400000, "first_byte_timeout"),  # UT, SI, DT
    (0x800000, "bad_answer"),  # UPE
    (0x80, "no_resources"),  # UO
)
"""Envoy's response flags: how a try ended for which Envoy made up the answer."""


class Desk(NamedTuple):
    """What all requests of one external processor share."""

    rooms: Rooms
    targets: Targets
    engines: Callable[[str], Sequence[Engine]]
    """Those of a model."""


class Carried(Course):
    """One request, from its last byte to the end of Envoy's stream.

    Args:
        subset: the endpoints that Envoy lets choose from; ``None``: all.
        may_inject: see :class:`Course`; the answer will be shown for certain.
    """

    __slots__ = (
        "_begun",
        "_chunk",
        "_desk",
        "_fields",
        "_given",
        "_plain",
        "_shown",
        "_status",
        "_subset",
        "_timer",
        "_usage",
        "_waiter",
        "_whole",
        "address",
        "problem",
        "settled",
    )

    def __init__(
        self,
        desk: Desk,
        admitted: Admitted,
        head: Head,
        raw: bytes,
        *,
        subset: frozenset[str] | None,
        may_inject: bool,
    ) -> None:
        super().__init__(desk.rooms, admitted, head.fields, raw, may_inject=may_inject)
        self._desk = desk
        self._fields = head.fields
        self._given = raw
        self._subset = subset
        self._plain = False
        self._timer: asyncio.TimerHandle | None = None
        # The answer.
        self._status = 0
        self._begun = False
        self._shown = False
        self._whole = True
        self._usage: UsageTail | None = None
        self._chunk: UsageChunk | None = None
        self.address = ""
        """Where it goes."""
        self.problem: Problem | None = None
        """Why it goes nowhere."""
        self.settled = False
        """One of the two is known."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> bytes:
        return self._wishes.request_id

    # ---- the request

    def settlement(self) -> asyncio.Future[None]:
        """Done once it is settled; for one that was not at once."""
        self._waiter = self._rooms.loop.create_future()
        return self._waiter

    def changes(self, target: bytes) -> tuple[list[tuple[str, bytes]], list[str]]:
        """Fields to set and names to remove on the way to the engine; ``target`` is the request's as it came."""
        wishes, decision = self._wishes, self._decision
        address = self.address.encode()
        fields = [
            ("target-pod", address),
            ("x-gateway-destination-endpoint", address),
            ("x-request-id", wishes.request_id),
            ("routing-strategy", printable(decision.policy)),
        ]
        listed = self._route.path.encode() + self._query
        if listed != target:
            fields.append((":path", listed))
        if self._authorization is not None:
            fields.append(("authorization", self._authorization.encode()))
        if decision.chosen.engine.data_parallel_size > 1:
            fields.append(("x-data-parallel-rank", b"%d" % decision.chosen.rank))
        set_already = {name for name, _ in fields}
        passes = self._authorization is None and not self._closed
        remove = {name for name in withheld(self._fields, credentials_pass=passes) if name not in set_already}
        named = [value.strip() for lower, _, value in self._fields if lower == b"request-id"]
        if named and named != [wishes.request_id]:  # ill-formed, or more than one
            remove.add("request-id")
        if self._plain:
            remove.add("accept-encoding")
        return fields, sorted(remove)

    @property
    def body(self) -> bytes:
        """What goes to the engine."""
        return self._raw

    @property
    def changed(self) -> bool:
        return self._raw is not self._given

    def sent(self) -> None:
        """Envoy has it all: an answer may take minutes, and none of this is looked at again."""
        self._raw = self._given = b""
        self._fields = []
        self._wishes.forwarded = []

    # ---- the answer

    def answer_begins(self, head: Head, flags: int, *, last: bool) -> list[tuple[str, bytes]] | None:
        """The answer's head: the fields to set on it. ``None`` when Envoy made it up for want of the engine's: then
        :attr:`problem` is the answer."""
        for mask, outcome in _FAILURES:
            if flags & mask:
                late = outcome == "first_byte_timeout"
                self._fail(outcome, errors.first_byte_timeout(None) if late else errors.engine_unreachable(outcome))
                return None
        self._status = head.status
        stream = is_event_stream(head.fields)
        if not stream:
            self._chunk = None
            self._first_byte()
        elif self._timer is None and not last:
            self._timer = self._rooms.loop.call_later(PREFILL_SEEN_AFTER, self._prefill_over)
        lines = self._told(self.address.encode()).split(b"\r\n")[:-1]
        return [(name.decode(), value) for name, _, value in (line.partition(b": ") for line in lines)]

    def answer_piece(self, piece: bytes, *, last: bool) -> bytes | None:
        """A piece of the answer: what takes its place, or ``None`` when it passes as it is."""
        if not self._shown:
            self._shown = True
            self._whole = False
            self._usage = UsageTail()
            self._first_byte()
        if last:
            self._whole = True
        assert self._usage is not None
        self._usage.add(piece)
        if self._chunk is None:
            return None
        passing = self._chunk.feed(piece)
        if last:
            passing += self._chunk.rest()
        return None if passing == piece else passing

    def answer_trailers(self) -> bytes:
        """The answer's body ended before these: what was held back of it."""
        self._whole = True
        return b"" if self._chunk is None else self._chunk.rest()

    def ended(self, outcome: Outcome) -> None:
        """Envoy's stream is over; ``outcome`` says why, where the answer is not whole."""
        if self._timer is not None:
            self._timer.cancel()
        if self._over:
            return
        if not self._status or not self._whole:
            self.stop(outcome)
            return
        self._over = True
        self._release_answered(self._status)
        self._answered(self._status, self._usage.find() if self._usage is not None and self._status == 200 else None)

    def _first_byte(self) -> None:
        if self._begun:  # of an answer that is no stream the head tells
            return
        self._begun = True
        if self._timer is not None:
            self._timer.cancel()
        if self._ticket is not None:
            self._ticket.first_byte()
        self._rooms.telemetry.first_byte(self._route.path, self._rooms.loop.time() - self._since)

    def _prefill_over(self) -> None:
        if self._ticket is not None and not self._shown:
            self._ticket.first_byte()

    # ---- kvsync.requests.course.Course

    def _choose(self, after: Outcome | None = None) -> None:
        if self._subset is not None:
            engines = self._desk.engines(self._model[0])
            outside = [engine for engine in engines if self._desk.targets.known(engine.url) not in self._subset]
            self._exclude |= {engine.worker(rank) for engine in outside for rank in engine.ranks}
        super()._choose(after)

    def _carry(self) -> None:
        url = self._decision.chosen.engine.url
        address = self._desk.targets.known(url)
        if address is not None:
            self._send_to(address)
        else:
            task = self._rooms.loop.create_task(self._desk.targets.find(url))
            task.add_done_callback(self._on_found)
            self._task = task

    def _on_found(self, task: asyncio.Future[str]) -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if self._over:
            return
        if error is None:
            self._send_to(task.result())
        else:
            self._elsewhere("connect_timeout" if isinstance(error, TimeoutError) else "connect_failed")

    def _send_to(self, address: str) -> None:
        self.address = address
        self._settle()

    def _turn_down(self, problem: Problem) -> None:
        self.problem = problem.with_traceback(None)  # whose frames lead back here
        self._settle()

    def _settle(self) -> None:
        self.settled = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expect_usage(self) -> None:
        self._plain = True
        self._chunk = UsageChunk()


__all__ = ["PREFILL_SEEN_AFTER", "Carried", "Desk"]
