"""A scripted engine: real event streams, a real HTTP port, no model and no cache policy. It does what a test says.

What it holds is what it was told to hold (:meth:`Engine.store`, :meth:`Engine.evict`, :meth:`Engine.clear`), and unless
``cached`` says otherwise its answers report exactly that. So whatever was lost, late or doubled on the way, a test can
hold the gateway's credit against the truth.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

from tests import wire

from .client import until
from .http import SSE_HEAD, FakeEngine, Received, Talk, chunk, reply
from .publisher import Publisher, neighbours

BLOCK = 16
CHAT = b"/v1/chat/completions"
Body: TypeAlias = Mapping[str, Any]
Misdeed: TypeAlias = Callable[[Received, Talk], Awaitable[None]]
"""What happens to one request instead of an answer."""


def words(body: Body) -> list[int]:
    """Token ids of a question to ``/tokenize``: one per word, the same in every engine."""
    if "messages" in body:
        text = " ".join(str(message["content"]) for message in body["messages"])
    else:
        text = str(body.get("prompt", body.get("input", "")))
    return [int.from_bytes(hashlib.blake2b(word.encode(), digest_size=2).digest(), "big") for word in text.split()]


class Engine:
    """See the module. Use it as an asynchronous context manager, on the event loop of the test.

    Args:
        name: under which the gateway's configuration lists it.
        blocks: ``num_gpu_blocks`` of its metrics, or ``None``: they do not tell.
        ranks: streams, on ports that follow each other (more than one: without replay).
        version: of the events' positional form (a key of :data:`tests.wire.ARRAY_LENGTHS`); ``None``: maps.
        topic_frame: whether replayed batches carry the topic (since 0.26).
        bodies: batches published before anybody could listen: only a replay brings them.
        hashes: what makes an engine's hashes different from another's, as a hash seed does.
        tokenizes: answers ``/tokenize``, and says what a request's own tokens are.
    """

    def __init__(
        self,
        name: str = "a",
        *,
        model: str = "tiny",
        blocks: int | None = 1_000,
        ranks: int = 1,
        version: str | None = None,
        topic_frame: bool = True,
        bodies: Sequence[bytes] = (),
        hashes: str = "",
        tokenizes: Callable[[Body], Sequence[int]] = words,
        **stream: Any,
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizes = tokenizes
        self.cached: int | None = None
        """What answers report as cached tokens; ``None``: what it holds of the prompt."""
        self.caches = False
        """Hold every prompt that is asked, and tell so, as a real engine does."""
        self.served: list[str] = []
        """The paths of the requests to generate, in their order."""
        self.open = asyncio.Event()
        """While it is not set, requests to generate wait."""
        self.open.set()
        self.next: deque[Misdeed] = deque()
        """What happens to the next requests to generate, one each."""
        self.always: Misdeed | None = None
        """What happens to every request to generate."""
        self.pages: dict[str, bytes] = {}
        """Whole answers to GET, by path, in place of its own."""
        self.gauges: dict[str, float] = {'vllm:engine_sleep_state{engine="0",sleep_state="awake"}': 1}
        """Series of its ``/metrics``."""
        if blocks is not None:
            self.gauges[f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{blocks}"}}'] = 1
        self.http = FakeEngine(name, lambda _, talk: self._talk(talk))
        self._version = version
        self._seed = hashes
        self._held: list[set[int]] = [set() for _ in range(ranks)]
        self._stream = {"topic_frame": topic_frame, **stream}
        self.publishers = neighbours(ranks) if ranks > 1 else [Publisher(bodies=bodies, **self._stream)]

    @property
    def publisher(self) -> Publisher:
        """The stream of its only rank."""
        (publisher,) = self.publishers
        return publisher

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.port}"

    @property
    def entry(self) -> dict[str, object]:
        """Its line in the configuration; a test puts a proxy's addresses over it."""
        first = self.publishers[0]
        found: dict[str, object] = {"name": self.name, "url": self.url, "events": first.events}
        if first.replay is not None:
            found["replay"] = first.replay
        if len(self.publishers) > 1:
            found["data_parallel_size"] = len(self.publishers)
        return found

    async def __aenter__(self) -> Self:
        await self.http.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def subscribed(self) -> None:
        """Return once each stream has had a subscriber: what is published before that reaches nobody."""

        async def look() -> bool:
            return all(publisher.subscribed.is_set() for publisher in self.publishers)

        await until(look, f"{self.name} has subscribers")

    async def stop(self) -> None:
        """Die: connections are cut and addresses are free."""
        await self.http.stop()
        for publisher in self.publishers:
            publisher.close()

    # ---- its cache, and what it tells of it

    def store(self, prompt: Sequence[int], *, rank: int = 0, lost: bool = False, **fields: Any) -> int:
        """Hold a prompt's whole blocks, and publish that in one batch (``lost``: only a replay has it).

        Returns the batch's number; ``fields`` are put over the event's.
        """
        names = self.names(prompt, rank)
        self._held[rank].update(names)
        event = wire.stored(names, prompt[: len(names) * BLOCK], block_size=BLOCK, **fields)
        return self.tell(event, rank=rank, lost=lost)

    def evict(self, prompt: Sequence[int], keep: int = 0, *, rank: int = 0, lost: bool = False) -> int:
        """Drop a prompt's blocks behind the first ``keep`` tokens, tail first as engines do, in one batch."""
        gone = self.names(prompt, rank)[keep // BLOCK :]
        self._held[rank].difference_update(gone)
        return self.tell(*(wire.removed([name]) for name in reversed(gone)), rank=rank, lost=lost)

    def clear(self, *, rank: int = 0, told: bool = True) -> None:
        """Drop everything; an engine that is not asked anything afterwards has not told it (``told=False``)."""
        self._held[rank].clear()
        if told:
            self.tell(wire.cleared(), rank=rank)

    def tell(self, *events: wire.Event, rank: int = 0, lost: bool = False) -> int:
        """Publish one batch of these events, whatever it holds."""
        forms: list[Any] = [wire.as_array(event, self._version) if self._version else event for event in events]
        publisher = self.publishers[rank]
        return publisher.send(lambda seq: wire.batch(*forms, ts=publisher.started + seq, rank=rank), lost=lost)

    def holds(self, prompt: Sequence[int], *, rank: int = 0) -> int:
        """Tokens of the prompt that it can serve from its cache: the truth that credit must not exceed."""
        run = 0
        for name in self.names(prompt, rank)[: (len(prompt) - 1) // BLOCK]:
            if name not in self._held[rank]:
                break
            run += BLOCK
        return run

    def restart(self, *, started: float | None = None) -> None:
        """Another process at the same event addresses: nothing held, numbers from 0, other timestamps."""
        for rank, old in enumerate(self.publishers):
            at = {"events_port": _port(old.events), "replay_port": _port(old.replay) if old.replay else None}
            old.close()
            self._held[rank].clear()
            self.publishers[rank] = Publisher(**{**self._stream, **at}, started=started or old.started + 500_000)

    def names(self, prompt: Sequence[int], rank: int = 0) -> list[int]:
        """Its hashes of a prompt's whole blocks, as vLLM sends them by default: unsigned integers of 64 bits."""
        state = hashlib.blake2b(f"{self._seed}/{rank}".encode(), digest_size=8)
        found = []
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            state.update(array("I", prompt[end - BLOCK : end]).tobytes())
            found.append(int.from_bytes(state.copy().digest(), "big"))
        return found

    # ---- its HTTP port

    async def _talk(self, talk: Talk) -> None:
        while (request := await talk.request()) is not None:
            path = request.line.split()[1].partition(b"?")[0]
            if path.startswith(b"/v1/") and request.line.startswith(b"POST "):
                self.served.append(path.decode())
                await self.open.wait()
                misdeed = self.next.popleft() if self.next else self.always
                await (misdeed(request, talk) if misdeed else self._generate(request, talk, path))
                self.http.requests.append(request)
            elif path == b"/tokenize":
                tokens = list(self.tokenizes(json.loads(request.body)))
                await talk.send(_json({"count": len(tokens), "max_model_len": 100_000, "tokens": tokens}))
            elif path.decode() in self.pages:
                await talk.send(reply(self.pages[path.decode()]))
            elif path == b"/metrics":
                await talk.send(reply("".join(f"{name} {value}\n" for name, value in self.gauges.items()).encode()))
            else:
                await talk.send(reply(b'{"detail":"Not Found"}', b"404 Not Found"))

    async def _generate(self, request: Received, talk: Talk, path: bytes) -> None:
        body = json.loads(request.body)
        asked = body.get("prompt", "")
        prompt = asked if asked and isinstance(asked[0], int) else self.tokenizes(body)
        rank = int((request.get(b"x-data-parallel-rank") or [b"0"])[0])
        cached = self.holds(prompt, rank=rank) if self.cached is None else self.cached
        if self.caches and not self._held[rank].issuperset(self.names(prompt, rank)):
            self.store(prompt, rank=rank)
        details = {"cached_tokens": cached}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 2, "prompt_tokens_details": details}
        chat = path == CHAT
        if not body.get("stream"):
            said: Body = {"message": {"role": "assistant", "content": "o k"}} if chat else {"text": "o k"}
            await talk.send(_json({"choices": [{"index": 0, **said}], "usage": usage}))
            return
        await talk.send(SSE_HEAD)
        for word in ("o", " k"):
            part: Body = {"delta": {"content": word}} if chat else {"text": word}
            await talk.send(event({"choices": [{"index": 0, **part}]}))
        if (body.get("stream_options") or {}).get("include_usage"):
            await talk.send(event({"choices": [], "usage": usage}))
        await talk.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")


# ---- misdeeds


def status(code: int, body: bytes = b'{"error":{"message":"injected"}}') -> Misdeed:
    """An error, properly said."""

    async def answer(_: Received, talk: Talk) -> None:
        await talk.send(reply(body, b"%d Injected" % code, b"content-type: application/json"))

    return answer


async def reset(_: Received, talk: Talk) -> None:
    """The connection is reset before one byte of an answer."""
    talk.reset()


async def stall(_: Received, talk: Talk) -> None:
    """Nothing is answered, until the gateway gives up."""
    await talk.closed()


def cut(*pieces: bytes) -> Misdeed:
    """The head of a stream and these pieces, then the connection is reset."""

    async def answer(_: Received, talk: Talk) -> None:
        await talk.send(SSE_HEAD, *(chunk(piece) for piece in pieces))
        talk.reset()

    return answer


def event(content: Body) -> bytes:
    """One event of a stream, as a chunk."""
    return chunk(b"data: " + json.dumps(content).encode() + b"\n\n")


def _json(content: Body) -> bytes:
    return reply(json.dumps(content).encode(), b"200 OK", b"content-type: application/json")


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
