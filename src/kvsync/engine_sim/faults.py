"""What can go wrong on demand: the bodies of ``POST /sim/fault``, and what is armed at the moment.

Each fault is something that happened to real fleets. They add up: arming one does not disarm another; ``heal`` ends
all of them. What they do is done where it happens (server, ranks, publisher).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, RootModel

Count = Annotated[int, Field(ge=1)]
Pause = Annotated[float, Field(gt=0, le=3_600)]


class _Fault(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DropBatches(_Fault):
    """The next batches are not published; a replay still has them (with ``forever``, not even that)."""

    kind: Literal["drop_batches"] = "drop_batches"
    count: Count = 1
    rank: int = 0
    forever: bool = False


class CutReplays(_Fault):
    """Replays stop after some batches, without the end marker."""

    kind: Literal["cut_replays"] = "cut_replays"
    after: Annotated[int, Field(ge=0)]
    rank: int = 0


class AnswerStatus(_Fault):
    """The next calls are answered with an error."""

    kind: Literal["status"] = "status"
    status: Literal[500, 503] = 500
    count: Count = 1


class ResetConnection(_Fault):
    """The connection of the next calls is reset before the first byte of an answer."""

    kind: Literal["reset"] = "reset"
    count: Count = 1


class CutStream(_Fault):
    """The connection of the next streamed answers is reset after some chunks."""

    kind: Literal["cut_stream"] = "cut_stream"
    after: Count = 1
    count: Count = 1


class Refuse(_Fault):
    """New connections are refused for a while; open ones go on."""

    kind: Literal["refuse"] = "refuse"
    seconds: Pause


class Freeze(_Fault):
    """Nothing moves, connections are accepted and hang, until ``heal`` or for a while."""

    kind: Literal["freeze"] = "freeze"
    seconds: Pause | None = None


class Restart(_Fault):
    """The process dies and comes back at the same addresses: open answers are cut, the cache is empty, no event says
    so, and sequence numbers begin at 0 again."""

    kind: Literal["restart"] = "restart"


class Heal(_Fault):
    """Everything works again."""

    kind: Literal["heal"] = "heal"


Fault: TypeAlias = (
    DropBatches | CutReplays | AnswerStatus | ResetConnection | CutStream | Refuse | Freeze | Restart | Heal
)


class FaultBody(RootModel[Annotated[Fault, Field(discriminator="kind")]]):
    """A fault as JSON, told apart by ``kind``."""


@dataclass(slots=True)
class Armed:
    """The faults that wait for calls, in the order in which they were armed."""

    _statuses: list[int] = field(default_factory=list)
    _resets: int = 0
    _cuts: list[int] = field(default_factory=list)

    def arm(self, fault: AnswerStatus | ResetConnection | CutStream) -> None:
        match fault:
            case AnswerStatus():
                self._statuses += [fault.status] * fault.count
            case ResetConnection():
                self._resets += fault.count
            case CutStream():
                self._cuts += [fault.after] * fault.count

    def disarm(self) -> None:
        self._statuses.clear()
        self._resets = 0
        self._cuts.clear()

    def take_reset(self) -> bool:
        """Whether this call's connection is to be reset."""
        if not self._resets:
            return False
        self._resets -= 1
        return True

    def take_status(self) -> int | None:
        """The error that this call gets."""
        return self._statuses.pop(0) if self._statuses else None

    def take_cut(self) -> int | None:
        """After how many chunks this stream is to be cut."""
        return self._cuts.pop(0) if self._cuts else None
