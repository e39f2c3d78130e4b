"""Where an engine's event streams are, and the facts about its workers that no event carries.

What is configured wins. What is missing is asked from the engine over HTTP, where it has an answer:

``GET /kv_event_sources`` (vLLM 0.31 and later)
    per rank: ports and whether it publishes at all. Its host is never used: an engine that could name the host to dial
    could send the gateway anywhere. The host is that of the configured events endpoint, else of the engine's URL.
``GET /metrics``
    ``vllm:cache_config_info`` per rank: ``num_gpu_blocks`` and ``cache_hit_alignment_tokens``.

Host names are resolved here, and ZMQ gets numeric addresses only: its one I/O thread waits for name servers while
every other stream stands still.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from kvsync.config.addresses import Address, BadAddress, http_address, tcp_address
from kvsync.discovery.access import EngineAccess, NoPage, fetch
from kvsync.discovery.model import Engine
from kvsync.events.contracts import Located, NotLocated, Target
from kvsync.events.pages import MAX_METRICS_BYTES, rank_of, samples

MAX_SOURCES_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RankSource:
    """One rank's entry of ``/kv_event_sources``, checked."""

    events_port: int | None
    """``None``: this rank publishes nothing."""
    replay_port: int | None


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """One rank's ``vllm:cache_config_info``."""

    usable_blocks: int | None
    hit_alignment: int | None


class BadAnswer(ValueError):
    """An engine's answer can't be used; the text says why."""


class HttpLocator:
    """Finds streams by configuration and by asking engines. Satisfies ``kvsync.events.contracts.Locator``.

    Args:
        timeout: seconds for one HTTP exchange and for one name look-up.
        access: how engines are spoken to.
    """

    def __init__(self, session: aiohttp.ClientSession, timeout: float, access: EngineAccess) -> None:
        self._session = session
        self._access = access
        self._timeout = timeout

    async def locate(self, engine: Engine) -> Located:
        """
        Raises:
            NotLocated: there is no events endpoint yet, or its host has no address.
        """
        ask_sources = engine.events is None or engine.replay is None
        ask_metrics = engine.usable_blocks is None
        sources, facts = await asyncio.gather(
            self._ask(engine, "/kv_event_sources", MAX_SOURCES_BYTES, ask_sources),
            self._ask(engine, "/metrics", MAX_METRICS_BYTES, ask_metrics),
        )
        complete = not (isinstance(sources, Exception) or isinstance(facts, Exception))
        by_rank: dict[int, RankSource] = {}
        try:
            if isinstance(sources, bytes):
                by_rank = parse_sources(sources)
        except BadAnswer as error:
            sources = error
        cache = parse_cache_facts(facts) if isinstance(facts, bytes) else {}
        targets = []
        for rank in engine.ranks:
            events, replay = endpoints(engine, rank, by_rank.get(rank))
            if events is None:
                raise NotLocated(_why_not(engine, rank, sources))
            known = cache.get(rank, CacheFacts(None, None))
            targets.append(
                Target(
                    worker=engine.worker(rank),
                    engine=engine.uid,
                    source_pod=engine.name,
                    model=engine.model,
                    rank=rank,
                    events=str(await numeric(events, self._timeout)),
                    replay=None if replay is None else str(await numeric(replay, self._timeout)),
                    usable_blocks=engine.usable_blocks if engine.usable_blocks is not None else known.usable_blocks,
                    hit_alignment=known.hit_alignment,
                    attention_chunk_size=engine.attention_chunk_size,
                    spec_decode=engine.spec_decode,
                )
            )
        return Located(tuple(targets), complete)

    async def _ask(self, engine: Engine, path: str, limit: int, wanted: bool) -> bytes | Exception | None:
        """The body; ``None`` when the engine has no such page, or it is not wanted; the error when it didn't answer."""
        if not wanted:
            return None
        try:
            return await fetch(self._session, self._access, engine.url, path, limit, self._timeout)
        except NoPage as error:
            return error


async def numeric(address: Address, patience: float) -> Address:
    """The address with its host resolved, IPv4 first, within ``patience`` seconds.

    Raises:
        NotLocated: the host has no address.
    """
    if address.numeric:  # not looked up: that waits for a thread, and all of them may hang at a name server
        return address
    look_up = asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    try:
        async with asyncio.timeout(patience):
            found = await look_up
    except (OSError, TimeoutError, UnicodeError) as error:
        why = str(error) or "timeout"
        raise NotLocated(f"host {address.host!r} of the event stream has no address: {why}") from None
    # Engines listen on IPv4 unless told otherwise, and "localhost" has both.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return address._replace(host=str(found[0][4][0]).partition("%")[0])


def endpoints(engine: Engine, rank: int, source: RankSource | None) -> tuple[Address | None, Address | None]:
    """Events and replay endpoint of a rank: each as configured (port + rank), else as the engine says.

    Raises:
        NotLocated: a configured endpoint is none, or its port + rank is beyond 65535.
    """
    try:
        events = _shifted(engine.events, rank)
        replay = _shifted(engine.replay, rank)
        host = events.host if events is not None else http_address(engine.url, path_allowed=True).host
    except BadAddress as error:
        raise NotLocated(str(error)) from None
    if source is not None:
        if events is None and source.events_port is not None:
            events = Address("tcp", host, source.events_port)
        if replay is None and source.replay_port is not None:
            replay = Address("tcp", host, source.replay_port)
    return events, replay


def _shifted(endpoint: str | None, rank: int) -> Address | None:
    if endpoint is None:
        return None
    address = tcp_address(endpoint)
    if address.port + rank > 65_535:
        raise NotLocated(f"{endpoint} has no port for rank {rank}")
    return address._replace(port=address.port + rank)


def _why_not(engine: Engine, rank: int, sources: bytes | Exception | None) -> str:
    if isinstance(sources, Exception):
        return f"no events endpoint is configured, and {engine.url} does not tell it: {sources}"
    if sources is None:
        return f"no events endpoint is configured, and {engine.url} has no /kv_event_sources (vLLM 0.31 and later)"
    return f"rank {rank} of {engine.url} publishes no KV events (vLLM's --kv-events-config turns them on)"


def parse_sources(body: bytes) -> dict[int, RankSource]:
    """The answer of ``/kv_event_sources``, by rank. Ranks that don't publish over ZMQ have no events port.

    Raises:
        BadAnswer: it is not what vLLM sends.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"/kv_event_sources is not JSON: {error}") from None
    if not isinstance(answer, dict):
        raise BadAnswer("/kv_event_sources is not an object")
    found = {}
    for rank, entry in answer.items():
        if not (rank.isascii() and rank.isdecimal() and len(rank) <= 4 and isinstance(entry, dict)):
            raise BadAnswer(f"/kv_event_sources has an entry that is no rank: {rank[:40]!r}")
        on = entry.get("enable_kv_cache_events") is True and entry.get("publisher") == "zmq"
        found[int(rank)] = RankSource(
            _port(entry.get("endpoint"), rank) if on else None,
            _port(entry.get("replay_endpoint"), rank) if on else None,
        )
    return found


def _port(endpoint: Any, rank: str) -> int | None:
    if endpoint is None:
        return None
    text = endpoint.rpartition(":")[2] if isinstance(endpoint, str) and endpoint.startswith("tcp://") else ""
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) <= 65_535):
        raise BadAnswer(f"/kv_event_sources: rank {rank} has no TCP port in {str(endpoint)[:80]!r}")
    return int(text)


def parse_cache_facts(body: bytes) -> dict[int, CacheFacts]:
    """``vllm:cache_config_info`` of each rank, as far as it is there and makes sense."""
    found = {}
    for labels, _ in samples(body, b"vllm:cache_config_info"):
        blocks, alignment = _count(labels.get("num_gpu_blocks")), _count(labels.get("cache_hit_alignment_tokens"))
        rank = rank_of(labels)
        if rank is not None:
            # Block 0 is the null block and never holds anything.
            found[rank] = CacheFacts(blocks - 1 if blocks is not None and blocks > 1 else None, alignment)
    return found


def _count(text: str | None) -> int | None:
    """A positive count; vLLM writes ``None`` where it has none."""
    if text is None or not (text.isascii() and text.isdecimal() and len(text) <= 12):
        return None
    return int(text) or None


__all__ = [
    "BadAnswer",
    "CacheFacts",
    "HttpLocator",
    "RankSource",
    "endpoints",
    "numeric",
    "parse_cache_facts",
    "parse_sources",
]
