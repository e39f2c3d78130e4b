"""``kvsync watch``: one engine's KV events as they come, one line each, like tcpdump.

It follows the stream exactly as the gateway does (repair, epochs, both dialects), with a sink that keeps nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, TextIO

import click

from kvsync.config.addresses import BadAddress, tcp_address
from kvsync.config.model import EventsSettings
from kvsync.events.types import (
    AllBlocksClearedEvent,
    BlockRemovedEvent,
    BlockStoredEvent,
    Embeds,
    EngineHash,
    EventBatch,
    ExtraKey,
    Image,
    KVEvent,
    Opaque,
    Salt,
    SkippedEvent,
)
from kvsync.extras import how_to_install

if TYPE_CHECKING:
    from kvsync.discovery.model import Engine
    from kvsync.events.contracts import Located

SHOWN_HASHES = 4
WORKER = "engine"


def _endpoint(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else str(tcp_address(value))
    except BadAddress as error:
        raise click.BadParameter(f"{error} ({error.mend})", ctx, param) from None


@click.command()
@click.argument("events", callback=_endpoint, metavar="tcp://HOST:PORT")
@click.option(
    "--replay",
    callback=_endpoint,
    metavar="tcp://HOST:PORT",
    help="The replay endpoint: shows first what the engine still has, and repairs gaps.",
)
@click.option("--from-seq", type=click.IntRange(0, 2**63 - 1), help="With --replay: begin at this sequence number.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per event.")
@click.option("-c", "--count", type=click.IntRange(min=1), help="End after so many batches.")
def watch(events: str, replay: str | None, from_seq: int | None, as_json: bool, count: int | None) -> None:
    """Show the KV-cache events that one vLLM engine publishes, until Ctrl-C.

    \b
    Each line is one event:
      sequence number, time of the batch, data-parallel rank (where there are several),
      stored | removed | cleared | skipped,
      block hashes (shortened), parent, tokens, tier, group, adapter, extra keys

    Lines that begin with "--" are about the connection itself. They and the summary go to standard error.

    \b
    kvsync watch tcp://10.0.0.7:5557
    kvsync watch tcp://10.0.0.7:5557 --replay tcp://10.0.0.7:6557
    kvsync watch tcp://[fd00::7]:5557 --json | jq .block_hashes
    """
    if from_seq is not None and replay is None:
        raise click.UsageError("--from-seq needs --replay: only a replay can go back")
    from kvsync.events.sync import zmq_installed

    if not zmq_installed():
        raise click.ClickException(f"watching KV events requires ZMQ support ({how_to_install('zmq')})")
    asyncio.run(_watch(events, replay, from_seq or 0, as_json, count))


class _Screen:
    """Prints; satisfies the sink's protocol and is the observer. Called in the reader's thread."""

    def __init__(self, as_json: bool, count: int | None, end: asyncio.Event) -> None:
        self.shown: Counter[str] = Counter()
        self.last: int | None = None
        """The number of the last batch shown."""
        self.fault: OSError | None = None
        """Why nothing more can be shown, other than that nobody reads it any more."""
        self._as_json = as_json
        self._left = count
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._closed = threading.Event()

    def observe(self, worker: str, seq: int, batch: EventBatch) -> None:
        if self._closed.is_set():
            return
        self.shown["batches"] += 1
        self.last = seq
        lines = []
        for event in batch.events:
            self.shown[_kind(event)] += 1
            lines.append(json_line(seq, batch, event) if self._as_json else text_line(seq, batch, event))
        if not batch.events and not self._as_json:
            lines.append(f"{seq:>8}  {_time(batch.ts)}  (no events)")
        try:
            if lines:
                print("\n".join(lines), flush=True)
        except BrokenPipeError:  # as with ``| head``: the reader has what it wanted
            _to_nowhere(sys.stdout)
            self._stop()
        except OSError as error:
            self.fault = error
            _to_nowhere(sys.stdout)
            self._stop()
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._stop()

    def add_worker(self, worker: str, model: str, **facts: object) -> None:
        pass

    def remove_worker(self, worker: str) -> None:
        pass

    def apply_many(self, batches: Iterable[tuple[str, bytes]]) -> None:
        pass

    def forget(self, worker: str) -> None:
        """Nothing to show, here and below: the follower's log says it, which is shown too."""

    def suspend(self, worker: str) -> None:
        pass

    def resume(self, worker: str) -> None:
        pass

    def new_epoch(self, worker: str) -> None:
        pass

    def relearn(self, worker: str) -> None:
        pass

    def _stop(self) -> None:
        self._closed.set()
        self._loop.call_soon_threadsafe(self._end.set)


class _Fixed:
    """A locator that knows one stream."""

    def __init__(self, events: str, replay: str | None, patience: float) -> None:
        self._events = events
        self._replay = replay
        self._patience = patience

    async def locate(self, engine: Engine) -> Located:
        from kvsync.events.contracts import Located, Target
        from kvsync.events.sources import numeric

        events = str(await numeric(tcp_address(self._events), self._patience))
        replay = None if self._replay is None else str(await numeric(tcp_address(self._replay), self._patience))
        target = Target(
            worker=WORKER, engine=engine.uid, source_pod=engine.name, model="", rank=0, events=events, replay=replay
        )
        return Located((target,), complete=True)


async def _watch(events: str, replay: str | None, start: int, as_json: bool, count: int | None) -> None:
    from kvsync.discovery.model import Engine
    from kvsync.events.manager import EventManager

    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    _log_to_stderr()
    if replay is None:
        _notice("only what comes from now on; --replay tcp://HOST:PORT shows first what the engine still has")
    settings = EventsSettings()
    screen = _Screen(as_json, count, end)
    locator = _Fixed(events, replay, settings.connect_timeout)
    manager = EventManager(screen, settings, locator=locator, start_sequence=start)
    manager.subscribe(screen.observe)
    await manager.start()
    try:
        await manager.add(Engine(uid=WORKER, name=events, url="", model=""))
        await end.wait()
        status = manager.workers()[0]
    finally:
        await manager.stop()
    counts, shown = status.counts, screen.shown
    _notice(
        f"{shown['batches']} batches: {shown['stored']} stored, {shown['removed']} removed, "
        f"{shown['cleared']} cleared, {shown['skipped']} skipped events; "
        f"{status.errors.get('undecodable', 0)} batches undecodable"
    )
    _notice(
        f"last sequence {'none' if screen.last is None else screen.last}, missed {counts.missed}, lost {counts.lost}, "
        f"replays {counts.replays_answered} of {counts.replays} answered, connections {status.connections}"
        + "".join(f", {reason} {n}" for reason, n in sorted(status.errors.items()) if reason != "undecodable")
    )
    if screen.fault is not None:
        raise click.ClickException(f"standard output: {screen.fault.strerror}")


def text_line(seq: int, batch: EventBatch, event: KVEvent | SkippedEvent) -> str:
    """One event for people. Strings from the wire are quoted, so that none can steer a terminal."""
    parts = [f"{seq:>8}", _time(batch.ts)]
    if batch.data_parallel_rank:
        parts.append(f"rank {batch.data_parallel_rank}")
    parts.append(f"{_kind(event):<7}")
    if isinstance(event, BlockStoredEvent):
        parts.append(_hashes(event.block_hashes))
        parts.append(f"parent {'-' if event.parent_block_hash is None else _short(event.parent_block_hash)}")
        parts.append(f"{len(event.raw_token_ids) // 4} tokens")
        parts.extend(_place(event.medium, event.group_idx, event.kv_cache_spec_kind))
        if event.lora_name is not None:
            parts.append(f"adapter {event.lora_name!r}")
        elif event.lora_id != -1:
            parts.append(f"adapter #{event.lora_id}")
        keys = [key for block in event.extra_keys or () for key in block or ()]
        if keys:
            parts.append("keys " + ", ".join(map(_key, dict.fromkeys(keys))))
    elif isinstance(event, BlockRemovedEvent):
        parts.append(_hashes(event.block_hashes))
        parts.extend(_place(event.medium, event.group_idx, None))
    elif isinstance(event, SkippedEvent):
        parts.append(f"{event.tag!r} {event.reason}")
    return "  ".join(parts)


def json_line(seq: int, batch: EventBatch, event: KVEvent | SkippedEvent) -> str:
    """One event for programs. Hashes of bytes are in hex; what the event does not carry is left out."""
    out: dict[str, object] = {"seq": seq, "ts": batch.ts, "rank": batch.data_parallel_rank, "type": _kind(event)}
    if isinstance(event, BlockStoredEvent):
        out |= {
            "block_hashes": [_plain(h) for h in event.block_hashes],
            "parent": None if event.parent_block_hash is None else _plain(event.parent_block_hash),
            "tokens": len(event.raw_token_ids) // 4,
            "block_size": event.block_size,
            "medium": event.medium,
            "group": event.group_idx,
            "kind": event.kv_cache_spec_kind,
            "adapter": event.lora_name,
            "lora_id": None if event.lora_id == -1 else event.lora_id,
            "extra_keys": None
            if event.extra_keys is None
            else [[_key(key) for key in block or ()] for block in event.extra_keys],
        }
    elif isinstance(event, BlockRemovedEvent):
        out |= {
            "block_hashes": [_plain(h) for h in event.block_hashes],
            "medium": event.medium,
            "group": event.group_idx,
        }
    elif isinstance(event, SkippedEvent):
        out |= {"tag": event.tag, "reason": event.reason}
    return json.dumps({name: value for name, value in out.items() if value is not None})


def _kind(event: KVEvent | SkippedEvent) -> str:
    match event:
        case BlockStoredEvent():
            return "stored"
        case BlockRemovedEvent():
            return "removed"
        case AllBlocksClearedEvent():
            return "cleared"
        case SkippedEvent():
            return "skipped"


def _time(ts: float) -> str:
    try:
        return datetime.fromtimestamp(ts).strftime("%H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):
        return f"{ts!r}"


def _hashes(hashes: tuple[EngineHash, ...]) -> str:
    shown = " ".join(map(_short, hashes[:SHOWN_HASHES]))
    more = len(hashes) - SHOWN_HASHES
    return f"{len(hashes)} blocks" + (f" {shown}" if hashes else "") + (f" +{more}" if more > 0 else "")


def _plain(engine_hash: EngineHash) -> int | str:
    return engine_hash.hex() if isinstance(engine_hash, bytes) else engine_hash


def _short(engine_hash: EngineHash) -> str:
    if isinstance(engine_hash, int):
        return f"{engine_hash & 0xFFFF_FFFF_FFFF_FFFF:016x}"[:8]
    return engine_hash.hex()[:8] if isinstance(engine_hash, bytes) else repr(engine_hash[:8])


def _place(medium: str | None, group: int | None, kind: str | None) -> list[str]:
    parts = [] if medium is None else [medium.lower() if medium.isalnum() else repr(medium)]
    if group is not None:
        parts.append(f"group {group}")
    if kind is not None:
        parts.append(kind if kind.isidentifier() else repr(kind))
    return parts


def _key(key: ExtraKey) -> str:
    match key:
        case Salt(value):
            return f"salt {value!r}"
        case Image(identifier, offset):
            return f"image {identifier!r}" + ("" if offset is None else f" at {offset}")
        case Embeds(digest):
            return f"embeds {digest.hex()[:16]}"
        case Opaque(raw):
            return f"unknown {raw.hex()[:16]}"


def _notice(text: str) -> None:
    try:
        click.echo(f"-- {text}", err=True)
    except BrokenPipeError:  # as with ``2>&1 | head``
        _to_nowhere(sys.stderr)


def _to_nowhere(stream: TextIO) -> None:
    """What a failed write left in the stream's buffer is flushed at exit, where it would fail again, aloud."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("-- %(message)s"))
    logger = logging.getLogger("kvsync.events")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


__all__ = ["json_line", "text_line", "watch"]
