"""Programs that follow event streams, behind one face: kvsync and its peers, each a process of its own."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from bench.environments import pinned
from bench.model import Wrong
from bench.process import Process, Subject, until
from bench.work import BLOCK, Chain, tokens

DYNAMO = f"dynamo.indexer {pinned('dynamo', 'ai-dynamo-runtime')}"
"""As a side's name."""


class Follower(Protocol):
    """Workers are called w0, w1, … in the order of the streams."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def follow(self, streams: Sequence[Sequence[str]]) -> None: ...
    def ready(self) -> bool:
        """Caught up with all streams, as far as it tells."""
        ...

    def held(self, chains: Sequence[Chain]) -> list[dict[str, int]]:
        """Per chain: blocks from its beginning that each worker holds; workers that hold none may be absent."""
        ...

    def check(self, sent: Sequence[int]) -> None:
        """What else it can tell: ``sent`` messages per stream.

        Raises: Wrong.
        """
        ...

    def cpu(self) -> float: ...
    def memory(self) -> int: ...
    @property
    def pid(self) -> int: ...


class Kvsync(Subject):
    def __init__(self) -> None:
        super().__init__("follower", python=sys.executable)

    def follow(self, streams: Sequence[Sequence[str]]) -> None:
        if not self.ask("follow", streams=[(f"w{at}", *stream) for at, stream in enumerate(streams)]):
            raise Wrong("kvsync-core is not installed: this would measure the pure-Python index")

    def ready(self) -> bool:
        return bool(self.ask("live"))

    def held(self, chains: Sequence[Chain]) -> list[dict[str, int]]:
        found: list[dict[str, int]] = self.ask("held", chains=chains)
        return found

    def check(self, sent: Sequence[int]) -> None:
        state = self.ask("state")
        for at, count in enumerate(sent):
            told = state[f"w{at}"]
            if told["last"] != count - 1 or told["trust"] != "exact" or told["connections"] != 1:
                raise Wrong(f"kvsync: after {count} messages stream w{at} is {told}")


class Dynamo(Process):
    """The standalone indexer. It listens on all addresses: there is no setting for that."""

    def __init__(self, python: Path, threads: int = 4) -> None:
        self._port = free_port()
        super().__init__([python, "-m", "dynamo.indexer", "--port", str(self._port), "--threads", str(threads)])
        self._http = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)

    def follow(self, streams: Sequence[Sequence[str]]) -> None:
        until(self._up, 30)
        for at, (events, _) in enumerate(streams):
            self._post("/register", {"instance_id": at, "endpoint": events, "model_name": "m", "block_size": BLOCK})

    def ready(self) -> bool:
        return True

    def held(self, chains: Sequence[Chain]) -> list[dict[str, int]]:
        found = []
        for seed, blocks in chains:
            scores = self._post("/query", {"token_ids": tokens(seed, blocks).tolist(), "model_name": "m"})["scores"]
            found.append({f"w{worker}": int(sum(ranks.values())) // BLOCK for worker, ranks in scores.items()})
        return found

    def check(self, sent: Sequence[int]) -> None:
        pass

    def _up(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), 1):
                return True
        except OSError:
            return False

    def _post(self, path: str, body: Any) -> Any:
        self._http.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = self._http.getresponse()
        data = answer.read()
        if answer.status not in (200, 201):
            raise Wrong(f"dynamo.indexer: {path} → {answer.status} {data[:200]!r}")
        return json.loads(data)

    def end(self, patience: float = 10.0) -> None:
        self._http.close()
        super().end(patience)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def following(follower: Follower, publishers: Sequence[Subject], streams: int) -> Iterator[None]:
    """Have a follower follow ``streams`` fresh streams of each publisher, until all of them are known to listen."""
    endpoints = [stream for publisher in publishers for stream in publisher.ask("open", streams=streams)]
    try:
        follower.follow(endpoints)
        until(lambda: all(publisher.ask("subscribed") for publisher in publishers) and follower.ready(), 30)
        yield
    finally:
        for publisher in publishers:
            publisher.ask("close")


def verify(follower: Follower, chains: Sequence[Chain], holders: Sequence[str]) -> None:
    """Every chain is held as a whole by its one holder, and by nobody else.

    Raises: Wrong.
    """
    for (seed, blocks), holder, found in zip(chains, holders, follower.held(chains), strict=True):
        if found != {holder: blocks}:
            raise Wrong(f"chain {seed} of {blocks} blocks at {holder} is found as {found}")
