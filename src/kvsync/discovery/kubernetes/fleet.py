"""Pods' verdicts as changes of the fleet. Pure.

What must always hold: one address is one engine's, and so is one port that events or replays come from. Where two pods
say that they have it (one that ended was not removed, or not told of; two on one node were given the same ports), the
one with the greater claim has it, and the other gets it back when that one goes. Where nothing tells which of them has
it, neither does: the events of one must not be credited to the other. A pod of the same name is another engine, and so
is one whose address, model or ranks changed: the old one is gone before the new one is added, so nothing known of the
old one is credited to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from kvsync.discovery.kubernetes.pods import EVENTS_PORT_NAME, REPLAY_PORT_NAME, Stream, Verdict
from kvsync.discovery.kubernetes.reflector import Key
from kvsync.discovery.model import Change, Engine


class PodFleet:
    """All pods that were judged, and the engines among them as last told."""

    def __init__(self) -> None:
        self._pods: dict[Key, Verdict] = {}
        self._at: dict[str, set[Key]] = {}
        """By address, and by host that events come from: the pods that say they have it."""
        self._told: dict[Key, Engine] = {}

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._told.values())

    @property
    def pods(self) -> tuple[Verdict, ...]:
        """Those that have to do with models, engines or not."""
        look = _Look(self._pods, self._at)
        return tuple(map(look.present, self._pods.values()))

    def among(self, keys: Iterable[Key]) -> Iterator[Verdict]:
        """Those of these names."""
        look = _Look(self._pods, self._at)
        return (look.present(self._pods[key]) for key in keys if key in self._pods)

    def counts(self) -> Counter[str]:
        """Pods by what they are: ``ready``, ``followed`` (an engine that is not ready), or why they are no engine."""
        found: Counter[str] = Counter()
        for verdict in self.pods:
            if verdict.engine is None:
                found[str(verdict.reason)] += 1
            else:
                found["ready" if verdict.engine.ready else "followed"] += 1
        return found

    def update(self, gone: Iterable[Verdict], seen: Iterable[Verdict]) -> list[Change]:
        """Take over what happened; returns what that changes, those that are gone first and new ones last."""
        touched: set[Key] = set()
        places: set[str] = set()
        for verdict in gone:
            held = self._pods.get(verdict.key)
            if held is not None and held.uid == verdict.uid:
                del self._pods[verdict.key]
                touched.add(verdict.key)
                places |= self._leave(held)
        for verdict in seen:
            held = self._pods.get(verdict.key)
            self._pods[verdict.key] = verdict
            touched.add(verdict.key)
            if held is not None:
                places |= self._leave(held)
            for place in _places(verdict):
                self._at.setdefault(place, set()).add(verdict.key)
                places.add(place)
        return self._settle(touched.union(*(self._at.get(place, ()) for place in places)))

    def _leave(self, verdict: Verdict) -> set[str]:
        left = set(_places(verdict))
        for place in left:
            there = self._at[place]
            there.discard(verdict.key)
            if not there:
                del self._at[place]
        return left

    def _settle(self, touched: Iterable[Key]) -> list[Change]:
        gone: list[Change] = []
        changed: list[Change] = []
        added: list[Change] = []
        look = _Look(self._pods, self._at)
        for key in sorted(touched):
            held = self._pods.get(key)
            new = look.present(held).engine if held is not None else None
            old = self._told.pop(key, None)
            if new is not None:
                self._told[key] = new
            if old is not None and (new is None or not _same_process(old, new)):
                gone.append(Change("gone", old))
            if new is None or new == old:
                continue
            if old is not None and _same_process(old, new):
                changed.append(Change("changed", new))
            else:
                added.append(Change("added", new))
        return gone + changed + added


class _Look:
    """Who has what, of that which several pods say they have: one look, of one moment."""

    def __init__(self, pods: Mapping[Key, Verdict], at: Mapping[str, set[Key]]) -> None:
        self._pods = pods
        self._at = at
        self._owners: dict[str, Key] = {}
        """By address."""
        self._ports: dict[str, dict[int, Key | None]] = {}
        """By host that events come from: whose each port is; ``None``: nobody knows."""

    def present(self, verdict: Verdict) -> Verdict:
        """The verdict, with those taken into account that say they have the same."""
        engine = verdict.engine
        if engine is None:
            return verdict
        owner = self._owner(_address(engine))
        if owner != verdict.key:
            detail = f"its address is that of {'/'.join(owner)}, which was started later"
            return replace(verdict, engine=None, reason="address_taken", detail=detail)
        if engine.events is None or len(self._at[_host(engine.events)]) == 1:
            return verdict
        ports = self._ports_of(_host(engine.events))
        notes = list(verdict.notes)
        for stream, port in _streams(engine):
            if ports[port] == verdict.key:
                continue
            notes.append(_shared(stream, port, engine, ports[port]))
            if stream == "events":
                engine = replace(engine, kv_events=False, events=None, replay=None)
                break
            engine = replace(engine, replay=None)
            break
        return replace(verdict, engine=engine, notes=tuple(notes))

    def _owner(self, address: str) -> Key:
        found = self._owners.get(address)
        if found is None:
            found = self._owners[address] = max(self._at[address], key=lambda key: (self._pods[key].claim, key))
        return found

    def _ports_of(self, host: str) -> Mapping[int, Key | None]:
        found = self._ports.get(host)
        if found is not None:
            return found
        found = self._ports[host] = {}
        claims: dict[int, tuple[bool, tuple[bool, str, str], Key]] = {}
        for key in self._at[host]:
            verdict = self._pods[key]
            assert verdict.engine is not None
            if self._owner(_address(verdict.engine)) != key:
                continue
            for stream, port in _streams(verdict.engine):
                own = stream not in verdict.assumed
                mine, best = (own, verdict.claim, key), claims.get(port)
                if best is None or mine > best:
                    claims[port] = mine
                    found[port] = key if own or best is None else None
                elif not own and not best[0]:
                    found[port] = None
        return found


def _same_process(old: Engine, new: Engine) -> bool:
    """What else differs, a running engine can change: its readiness, labels, adapters, whether it is followed."""
    return (old.uid, old.url, old.model, old.data_parallel_size) == (
        new.uid,
        new.url,
        new.model,
        new.data_parallel_size,
    )


def _address(engine: Engine) -> str:
    """Host and port: whether it is spoken to by TLS makes no second engine of it."""
    return engine.url.partition("://")[2]


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]


def _places(verdict: Verdict) -> Iterator[str]:
    """All that no other pod may have."""
    engine = verdict.engine
    if engine is not None:
        yield _address(engine)
        if engine.events is not None:
            yield _host(engine.events)


def _streams(engine: Engine) -> Iterator[tuple[Stream, int]]:
    """The ports that events and replays of its ranks come from, those of events first."""
    endpoints: tuple[tuple[Stream, str | None], ...] = (("events", engine.events), ("replay", engine.replay))
    for stream, endpoint in endpoints:
        if endpoint is not None:
            first = int(endpoint.rpartition(":")[2])
            for rank in engine.ranks:
                yield stream, first + rank


def _shared(stream: Stream, port: int, engine: Engine, owner: Key | None) -> str:
    name = EVENTS_PORT_NAME if stream == "events" else REPLAY_PORT_NAME
    whose = "that of another pod" if owner is None else f"that of {'/'.join(owner)}"
    result = (
        "its events are not followed"
        if stream == "events"
        else "replay is asked of the engine instead (vLLM 0.31 and later)"
    )
    where = _host(str(engine.events)).partition("://")[2]
    mend = f"Give it an address or a container port {name} of its own"
    return f"its port {port} at {where} is {whose}, too: {result}. {mend}"


__all__ = ["PodFleet"]
