"""A process of its own that follows one engine into an index: ``EVENTS REPLAY``. Each line on its standard input is
answered by one of JSON: how the stream is doing and what the index has."""

from __future__ import annotations

import asyncio
import json
import sys

from kvsync.config.model import EventsSettings
from kvsync.discovery.model import Engine
from kvsync.events.manager import EventManager
from kvsync.index import PrefixIndex


async def main(events: str, replay: str) -> None:
    index = PrefixIndex()
    settings = EventsSettings(
        replay_timeout=1.0, poll_timeout=0.02, heartbeat_interval=0.1, heartbeat_timeout=0.3, connect_timeout=1.0
    )
    manager = EventManager(index, settings)
    await manager.start()
    engine = Engine(uid="a", name="a", url="http://127.0.0.1:9", model="m", events=events, replay=replay)
    await manager.add(engine)
    while await asyncio.to_thread(sys.stdin.readline):
        (status,) = manager.workers()
        workers = index.stats()["workers"]
        assert isinstance(workers, dict)
        known = workers.get("a", {})
        answer = {
            "state": status.state.value,
            "last": status.last_sequence,
            "received": status.counts.received,
            "trust": known.get("trust"),
            "blocks": known.get("blocks"),
        }
        print(json.dumps(answer), flush=True)
    await manager.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
