"""A running ``kvsync serve`` in front of real engines, seen only through its ports."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import yaml

from .client import Answer, BadAnswer, get, post
from .engines import TOKENIZER, Engine, Spec
from .processes import Server, free_ports
from .run import Decision
from .workload import Turn

DEADLINE = 60.0
"""Seconds for the gateway's start, and for it to apply what the engines published."""
ANSWER = 300.0
"""Seconds that an engine may be silent before its answer: a loaded machine takes its time."""


class Listening(Protocol):
    """An engine, as far as the gateway's configuration names it."""

    spec: Spec
    events_port: int
    replay_port: int

    @property
    def url(self) -> str: ...


def settings(engines: Sequence[Listening], port: int, admin_port: int) -> dict[str, object]:
    """The configuration a user would write for these engines."""
    return {
        "gateway": {"host": "127.0.0.1", "port": port},
        "admin": {"host": "127.0.0.1", "port": admin_port},
        "events": {"enabled": True, "strict": True},
        "tokenizer": {"remote": {"enabled": True, "endpoint": "engines"}},
        "models": [
            {
                "name": "tiny",
                "tokenizer": str(TOKENIZER),
                "engines": [
                    {
                        "name": engine.spec.name,
                        "url": engine.url,
                        "events": f"tcp://127.0.0.1:{engine.events_port}",
                        "replay": f"tcp://127.0.0.1:{engine.replay_port}",
                        "data_parallel_size": engine.spec.ranks,
                    }
                    for engine in engines
                ],
            }
        ],
    }


def live_up_to(worker: Mapping[str, Any], number: int) -> bool:
    """Whether this row of ``/v1/workers`` says that everything up to ``number`` (−1: nothing yet) is in the index."""
    applied = worker["last_sequence"]
    return worker["state"] == "live" and (-1 if applied is None else applied) >= number


class Gateway:
    """One gateway process, from its start to its end."""

    def __init__(self, engines: Sequence[Engine], logs: Path) -> None:
        port, admin_port = free_ports(), free_ports()
        self._url, self._admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
        config = logs / "gateway.yaml"
        config.write_text(yaml.safe_dump(settings(engines, port, admin_port), sort_keys=False))
        command = [str(Path(sys.executable).with_name("kvsync")), "serve", "-c", str(config)]
        self._server = Server("gateway", command, logs / "gateway.log")

    def wait_ready(self) -> None:
        """Return once ``/readyz`` says yes."""
        self._server.wait_until(self._ready, DEADLINE, "not ready")

    def _ready(self) -> bool:
        try:
            get(self._admin, "/readyz", timeout=5)
        except BadAnswer:
            return False
        return True

    def send(self, turn: Turn, policy: str) -> tuple[Answer, Decision]:
        """Send one turn, then fetch the record of where it went and why."""
        answer = post(self._url, turn.path, turn.body, {"routing-strategy": policy}, timeout=ANSWER)
        record = get(self._admin, f"/v1/decisions/{answer.headers['request-id']}", timeout=DEADLINE)
        assert record["policy"] == policy, record
        assert record["tokens"]["comparable"], record
        (chosen,) = (each for each in record["candidates"] if each["worker"] == record["worker"])
        return answer, Decision(chosen["worker"], chosen["credit"], chosen["trust"], record["tokens"]["source"])

    def wait_applied(self, last: Mapping[str, int]) -> None:
        """Return once the index holds every worker's events up to and including that sequence number."""

        def applied() -> bool:
            workers = {worker["worker"]: worker for worker in get(self._admin, "/v1/workers", timeout=5)["workers"]}
            assert set(workers) == set(last), f"the gateway knows {sorted(workers)}, the engines are {sorted(last)}"
            return all(live_up_to(workers[name], number) for name, number in last.items())

        self._server.wait_until(applied, DEADLINE, f"events not applied up to {dict(last)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
