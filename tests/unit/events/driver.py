"""Drives a stream by hand and shows its actions as short words."""

from __future__ import annotations

import struct
from typing import Any

from kvsync.events.stream import MAX_BARREN_ROUNDS, SETTLING, Action, Apply, AskReplay, Budget, Position, Stream


def batch(seq: int, epoch: float = 0, size: int = 0) -> bytes:
    return b"\x93\xcb" + struct.pack(">d", 10_000.0 * epoch + seq) + b"\x90\x00" + b"x" * size


def words(actions: list[Action]) -> list[Any]:
    """Applied numbers as ints, a request as ("ask", n), the rest by name."""
    out: list[Any] = []
    for action in actions:
        if isinstance(action, Apply):
            out.append(action.seq)
        elif isinstance(action, AskReplay):
            out.append(("ask", action.start))
        else:
            out.append(type(action).__name__)
    return out


class S:
    def __init__(
        self, *, can_replay: bool = True, budget: int = 1 << 20, start: int = 0, since: Position | None = None
    ) -> None:
        self.budget = Budget(budget)
        self.stream = Stream(
            can_replay=can_replay,
            budget=self.budget,
            replay_timeout=1.0,
            replay_round_timeout=30.0,
            start=start,
            since=since,
        )
        self.now = 100.0

    def connected(self) -> list[Any]:
        return words(self.stream.connected(self.now))

    def disconnected(self) -> list[Any]:
        return words(self.stream.disconnected(self.now))

    def live(self, *seqs: int, epoch: float = 0, size: int = 0) -> list[Any]:
        return [w for s in seqs for w in words(self.stream.live(s, batch(s, epoch, size), self.now))]

    def round(self, *seqs: int, epoch: float = 0, end: bool = True, size: int = 0) -> list[Any]:
        """The asked round is answered with these numbers, and by its end marker or a timeout."""
        out = words(self.stream.replay_started(self.now))
        for s in seqs:
            out += words(self.stream.replayed(s, batch(s, epoch, size), self.now))
        if end:
            return out + words(self.stream.replay_ended(self.now))
        return out + self.later(1.0)

    def resync(self) -> list[Any]:
        return words(self.stream.resync(self.now))

    def hint(self) -> list[Any]:
        return words(self.stream.hint_restart(self.now))

    def started(self) -> None:
        self.stream.replay_started(self.now)

    def replayed(self, seq: int, epoch: float = 0) -> list[Any]:
        return words(self.stream.replayed(seq, batch(seq, epoch), self.now))

    def ended(self) -> list[Any]:
        return words(self.stream.replay_ended(self.now))

    def dead_rounds(self) -> list[Any]:
        """Nobody answers until the rounds are given up."""
        out: list[Any] = []
        for _ in range(MAX_BARREN_ROUNDS):
            out = self.round(end=False)
        return out

    def later(self, seconds: float, served: float = float("-inf")) -> list[Any]:
        self.now += seconds
        return words(self.stream.tick(self.now, served))

    def caught_up(self, last: int) -> S:
        """Connected, with 0 … last applied."""
        assert self.connected() == [("ask", 0)]
        out = self.round(*range(last + 1))
        assert out == [*range(last + 1), "StopReplay", ("ask", last)]
        assert self.round(last) == ["StopReplay"]
        assert self.state == "live"
        assert self.later(SETTLING) == [("ask", last)]
        assert self.round(last) == ["StopReplay"]
        assert self.state == "live"
        return self

    @property
    def state(self) -> str:
        return self.stream.state

    @property
    def counts(self) -> Any:
        return self.stream.counts
