"""What a gateway costs: requests that are answered at once, streams, the wait that it adds, and all that under events.

The gateways are whole processes with real files or command lines; clients and engines are processes of their own, as
cheap as can be, on the same cores. So requests/s say what the machine gives to all three, and the CPU per request (all
threads) is the steady figure.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.asked import CHUNK_EVERY, CHUNKS, FAMILIES, PREFIX_BLOCKS, PROMPT, chat_start, family_start, system_text
from bench.environments import pinned
from bench.gateways import Gateway, Kvsync, sglang_router, smg, vllm_router
from bench.model import OURS, Figures, Measure, Row, Run, Sides, Target, Wrong
from bench.process import Subject, quiet_cpu, until
from bench.vocabularies import folder
from bench.work import BLOCK

WORKERS: Final = 64
CONNECTIONS: Final = 32
ALONE: Final = "engine alone"
"""The side without a gateway."""
VLLM_ROUTER: Final = f"vllm-router {pinned('vllm-router', 'vllm-router')}"
SMG: Final = f"smg {pinned('smg', 'smg')}"
SGLANG: Final = f"sglang-router {pinned('sglang-router', 'sglang-router')}"
FILLER: Final = 1_000_000
"""Where the seeds of prompts begin that nobody asks for."""

CHAIN: Final = 1024
"""Blocks of each."""
STREAMS: Final = (128, 256)
QUIET: Final = "kvsync without events"
RATE: Final = 50_000
"""Blocks a second that all engines together publish."""
BATCH: Final = 16
LENGTH: Final = 64
"""Blocks of a prompt that comes and goes."""
LIVE: Final = 1_024
"""Blocks of such prompts that an engine holds at any time."""
RESIDENT: Final = 14_600
"""Blocks that stay on each engine meanwhile: with those that come and go, 1 M on all."""
CHURN: Final = 100_000_000
"""Where their seeds begin, 100,000 for each engine."""


@dataclass(slots=True)
class Stage:
    """Engines and clients, as long as a row runs."""

    engines: Subject
    clients: Subject
    ports: Sequence[int]

    def answered(self) -> int:
        """Requests that engines answered so far."""
        count: int = self.engines.ask("counts")["requests"]
        return count


@contextmanager
def stage(held: Sequence[Sequence[int]], start: Callable[[int], bytes] = family_start) -> Iterator[Stage]:
    """
    Args:
        held: for each engine, the families that it holds.
        start: what the prompts of a family begin with.
    """
    starts = json.dumps([[start(family).decode() for family in families] for families in held])
    with ExitStack() as stack:
        engines = stack.enter_context(Subject("engines", starts, python=sys.executable))
        clients = stack.enter_context(Subject("clients", python=sys.executable))
        yield Stage(engines, clients, engines.ask("opened"))


@dataclass(frozen=True, slots=True)
class Streams:
    publisher: Subject
    endpoints: Sequence[Sequence[str]]
    publish: Callable[[], None]
    """All that the engines hold, once they are followed."""


@contextmanager
def streams(held: Sequence[Sequence[int]], blocks: int) -> Iterator[Streams]:
    """The event streams of engines that hold their families and, with a filler, so many blocks each."""
    scripts = []
    for number, families in enumerate(held):
        left = blocks - PREFIX_BLOCKS * len(families)
        filler = [[FILLER + 1000 * number + at, min(CHAIN, left - at * CHAIN)] for at in range(-(-left // CHAIN))]
        wanted = [[family, PREFIX_BLOCKS] for family in families] + filler
        scripts.append({"kind": "store", "wanted": wanted, "per_batch": 64})
    with Subject("publisher", python=sys.executable) as publisher:
        endpoints = publisher.ask("open", streams=len(held))

        def publish() -> None:
            until(lambda: publisher.ask("subscribed"))
            publisher.ask("stream", scripts=scripts, rate=4000.0)

        yield Streams(publisher, endpoints, publish)


# ---- requests that are answered at once


def measure_json(run: Run, stage: Stage, gateway: Gateway | None) -> Figures:
    """One repeat: a warm-up, then all of the requests."""
    clients = stage.clients
    clients.ask("open", port=stage.ports[0] if gateway is None else gateway.port, kind="json", connections=CONNECTIONS)
    clients.ask("run", name="warm")
    credited = gateway.total("kvsync_credited_tokens_total") if isinstance(gateway, Kvsync) else 0.0
    answered = stage.answered()
    before = gateway.cpu() if gateway is not None else 0.0
    went = clients.ask("run", name="all")
    used = gateway.cpu() - before if gateway is not None else 0.0
    clients.ask("close")
    if stage.answered() - answered != went["requests"]:
        raise Wrong(f"{went['requests']} requests were answered, and engines had {stage.answered() - answered}")
    if isinstance(gateway, Kvsync):
        _check(gateway, gateway.total("kvsync_credited_tokens_total") - credited, went)
    figures = {
        "requests": went["requests"] / went["seconds"],
        "p50": went["p50"],
        "p99": went["p99"],
        "client_cpu": went["cpu"] / went["requests"],
    }
    if gateway is None:
        return figures
    return figures | {
        "cpu": used / went["requests"],
        "cores": used / went["seconds"],
        "hits": went["hits"] / went["requests"],
    }


def _check(gateway: Kvsync, credited: float, went: Mapping[str, Any]) -> None:
    """What was credited is what engines held, and nothing is left open."""
    if credited != went["hits"] * PREFIX_BLOCKS * BLOCK:
        raise Wrong(
            f"{credited:g} tokens credited, and {went['hits']} prompts went to engines that held their beginning"
        )
    if over := gateway.total("kvsync_audit_answers_total", 'verdict="over"'):
        raise Wrong(f"{over:g} answers had less than was credited")
    if running := gateway.total("kvsync_worker_running"):
        raise Wrong(f"{running:g} requests count as running after the last answer")


@contextmanager
def open_json(run: Run) -> Iterator[Sides]:
    blocks = run.pick(1_000_000, 64_000) // WORKERS
    held = [[worker % FAMILIES] for worker in range(WORKERS)]
    with ExitStack() as stack:
        there = stack.enter_context(stage(held))
        ours, peers = stack.enter_context(streams(held, blocks)), stack.enter_context(streams(held, blocks))
        gateway = stack.enter_context(Kvsync(run.folder, there.ports, ours.endpoints))
        python = run.environment("vllm-router")
        peer = stack.enter_context(vllm_router(python, there.ports, "kv_aware", peers.endpoints))
        ours.publish()
        gateway.holds(blocks * WORKERS, WORKERS)
        peers.publish()
        quiet_cpu(peer.pid)
        there.clients.ask("make", name="warm", kind="ids", count=run.pick(2_000, 500), seed=1)
        there.clients.ask("make", name="all", kind="ids", count=run.pick(10_000, 2_000), seed=2)
        yield {
            OURS: lambda: measure_json(run, there, gateway),
            VLLM_ROUTER: lambda: measure_json(run, there, peer),
            ALONE: lambda: measure_json(run, there, None),
        }


# ---- text


@contextmanager
def open_text(run: Run) -> Iterator[Sides]:
    vocabulary = folder("Qwen, 152 k", run.environment("vocabularies"))
    held = [[worker % FAMILIES] for worker in range(WORKERS)]
    prefixes = _system_ids(vocabulary)
    repeats = itertools.count(1)
    with ExitStack() as stack:
        there = stack.enter_context(stage(held, chat_start))
        there.engines.ask("tokenizer", folder=str(vocabulary))
        publisher = stack.enter_context(Subject("publisher", python=sys.executable))
        endpoints = publisher.ask("open", streams=WORKERS)
        gateway = stack.enter_context(Kvsync(run.folder, there.ports, endpoints, vocabulary))
        until(lambda: publisher.ask("subscribed"))
        scripts = [
            {"kind": "given", "prompts": [prefixes[family] for family in families], "per_batch": 64}
            for families in held
        ]
        publisher.ask("stream", scripts=scripts)
        gateway.holds(PREFIX_BLOCKS * WORKERS, WORKERS)
        count = run.pick(4_000, 1_000)
        there.clients.ask("make", name="all", kind="text", count=count, seed=1)
        there.clients.ask("open", port=gateway.port, kind="json", connections=CONNECTIONS)
        there.clients.ask("run", name="all")  # local tokens must be proved first
        there.clients.ask("close")

        def measure() -> Figures:
            there.clients.ask("make", name="all", kind="text", count=count, seed=1 + next(repeats))
            there.clients.ask("make", name="warm", kind="ids", count=CONNECTIONS, seed=1)
            local = gateway.total("kvsync_tokenized_total", 'source="local"')
            figures = measure_json(run, there, gateway)
            local = gateway.total("kvsync_tokenized_total", 'source="local"') - local
            return {**figures, "local": local / count}

        yield {OURS: measure}


def _system_ids(vocabulary: Path) -> list[list[int]]:
    """What engines hold of each family of chats."""
    from tokenizers import Tokenizer

    texts = [f"<|im_start|>system\n{system_text(family)}" for family in range(FAMILIES)]
    encoded = Tokenizer.from_file(str(vocabulary / "tokenizer.json")).encode_batch(texts, add_special_tokens=False)
    return [one.ids[: PREFIX_BLOCKS * BLOCK] for one in encoded]


# ---- streams


def measure_streams(run: Run, stage: Stage, gateway: Gateway | None) -> Figures:
    """One repeat: for each number of open streams, one round of answers as a warm-up, then some that count."""
    clients = stage.clients
    port = stage.ports[0] if gateway is None else gateway.port
    figures: dict[str, float] = {}
    for count in STREAMS:
        clients.ask("open", port=port, kind="stream", connections=count)
        if not run.quick:
            clients.ask("run", name=f"warm {count}", spread=CHUNKS * CHUNK_EVERY)
        before = gateway.cpu() if gateway is not None else 0.0
        went = clients.ask("run", name=f"all {count}", spread=CHUNKS * CHUNK_EVERY)
        if gateway is not None:
            used = gateway.cpu() - before
            figures |= {f"cpu {count}": used / went["requests"], f"cores {count}": used / went["seconds"]}
        clients.ask("close")
        figures |= {f"p50 {count}": went["p50"], f"p99 {count}": went["p99"]}
    return figures


@contextmanager
def _all(run: Run, stage: Stage) -> Iterator[dict[str, Gateway | None]]:
    """Every gateway in front of the same engines, without events."""
    with ExitStack() as stack:
        made: list[tuple[str, Gateway]] = [
            (OURS, Kvsync(run.folder, stage.ports)),
            (VLLM_ROUTER, vllm_router(run.environment("vllm-router"), stage.ports, "cache_aware")),
            (SMG, smg(run.environment("smg"), stage.ports)),
            (SGLANG, sglang_router(run.environment("sglang-router"), stage.ports)),
        ]
        for _, gateway in made:
            stack.enter_context(gateway)
        for _, gateway in made:
            quiet_cpu(gateway.pid)
        yield {ALONE: None, **dict(made)}


@contextmanager
def open_streams(run: Run) -> Iterator[Sides]:
    with stage([[], [], [], []]) as there, _all(run, there) as gateways:
        for count in STREAMS:
            there.clients.ask("make", name=f"warm {count}", kind="stream", count=count, size=2_000)
            there.clients.ask("make", name=f"all {count}", kind="stream", count=count * run.pick(2, 1), size=2_000)
        yield {name: measure_of(measure_streams, run, there, gateway) for name, gateway in gateways.items()}


def measure_of(
    measure: Callable[[Run, Stage, Gateway | None], Figures], run: Run, stage: Stage, gateway: Gateway | None
) -> Measure:
    return lambda: measure(run, stage, gateway)


# ---- the wait that a gateway adds


@contextmanager
def open_latency(run: Run) -> Iterator[Sides]:
    with stage([[], [], [], []]) as there, _all(run, there) as gateways:
        count = run.pick(1_000, 200)
        there.clients.ask("make", name="warm", kind="chat", count=100, size=2_000)
        there.clients.ask("make", name="all", kind="chat", count=count, size=2_000)
        alone: dict[str, float] = {}

        def measure(run: Run, stage: Stage, gateway: Gateway | None) -> Figures:
            port = stage.ports[0] if gateway is None else gateway.port
            stage.clients.ask("one", port=port, name="warm")
            before = 0.0 if gateway is None else gateway.cpu()
            taken: dict[str, float] = stage.clients.ask("one", port=port, name="all")
            if gateway is None:  # the first of each turn
                alone.update(taken)
                return taken
            added = {f"added {part}": taken[part] - alone[part] for part in ("p50", "p99")}
            return {**taken, **added, "cpu": (gateway.cpu() - before) / count}

        yield {name: measure_of(measure, run, there, gateway) for name, gateway in gateways.items()}


# ---- all that while engines publish


@dataclass(slots=True)
class Churn:
    """What the engines go on publishing: each stores and evicts prompts of its own in a cache that stays full."""

    publisher: Subject
    seconds: float
    told: int = 0
    """Prompts per engine so far."""

    def scripts(self, kind: str, count: int) -> list[dict[str, Any]]:
        return [
            {"kind": kind, "first": at + self.told, "count": count, "length": LENGTH, "per_batch": BATCH, "live": LIVE}
            for at in (CHURN + worker * 100_000 for worker in range(WORKERS))
        ]

    def fill(self) -> None:
        """The full caches to begin with."""
        numbers = [range(at - LIVE // LENGTH, at) for at in (CHURN + worker * 100_000 for worker in range(WORKERS))]
        wanted = [[(number, LENGTH) for number in some] for some in numbers]
        self.publisher.ask("stream", scripts=[{"kind": "store", "wanted": w, "per_batch": LENGTH} for w in wanted])

    def begin(self) -> None:
        count = int(self.seconds * RATE / WORKERS / LENGTH)
        self.publisher.ask("load", scripts=self.scripts("churn", count))
        self.told += count
        self.publisher.tell("publish", rate=RATE / BATCH)

    def end(self) -> float:
        """Wait until all is published; returns blocks a second.

        Raises:
            Wrong: it ended before this was asked, or was slower than it should be.
        """
        asked = time.monotonic()
        went = self.publisher.answer()
        if went["began"] + went["seconds"] < asked:
            raise Wrong(f"the engines published for {went['seconds']:.1f} s only: the requests took longer")
        rate = float(went["messages"] * BATCH / went["seconds"])
        if rate < 0.95 * RATE:
            raise Wrong(f"the engines published {rate:,.0f} blocks/s only")
        return rate


def _under_events(stage: Stage, gateway: Kvsync, churn: Churn | None) -> Figures:
    """One repeat: the wait that is added on one connection, then the CPU of requests on many."""
    clients = stage.clients
    alone = clients.ask("one", port=stage.ports[0], name="one")
    if churn is not None:
        churn.begin()
        time.sleep(1.0)
    before, begun = gateway.cpu(), time.monotonic()
    time.sleep(2.0)
    events = (gateway.cpu() - before) / (time.monotonic() - begun)
    taken = clients.ask("one", port=gateway.port, name="one")
    clients.ask("open", port=gateway.port, kind="json", connections=CONNECTIONS)
    before = gateway.cpu()
    went = clients.ask("run", name="all")
    used = gateway.cpu() - before - events * went["seconds"]
    clients.ask("close")
    published = 0.0 if churn is None else churn.end()
    gateway.holds(WORKERS * (RESIDENT + LIVE), WORKERS)
    return {
        "added p50": taken["p50"] - alone["p50"],
        "added p99": taken["p99"] - alone["p99"],
        "cpu": used / went["requests"],
        "events": events,
        "published": published,
        "hits": went["hits"] / went["requests"],
    }


@contextmanager
def open_events(run: Run) -> Iterator[Sides]:
    held = [[worker % FAMILIES] for worker in range(WORKERS)]
    with ExitStack() as stack:
        there = stack.enter_context(stage(held))
        fleet = stack.enter_context(streams(held, RESIDENT))
        gateway = stack.enter_context(Kvsync(run.folder, there.ports, fleet.endpoints))
        fleet.publish()
        churn = Churn(fleet.publisher, run.pick(12, 6))
        churn.fill()
        gateway.holds(WORKERS * (RESIDENT + LIVE), WORKERS)
        there.clients.ask("make", name="one", kind="ids", count=run.pick(1_000, 200), seed=3)
        there.clients.ask("make", name="all", kind="ids", count=run.pick(5_000, 1_000), seed=4)
        yield {
            OURS: lambda: _under_events(there, gateway, churn),
            QUIET: lambda: _under_events(there, gateway, None),
        }


ROWS: Final = (
    Row(
        "gateway-json",
        "gateway with routing, JSON answers, 32 connections",
        f"10,000 distinct prompts of {PROMPT} token ids in {FAMILIES} families, {PREFIX_BLOCKS * BLOCK} tokens of each "
        f"in common; {WORKERS} engines publish 1 M blocks, each family held by two. Both route by events (kv-aware, "
        "kv_aware). Answers are 450 bytes and come at once. After each run every request is accounted for at the "
        "engines; ours must have credited just what the engines held. Clients and engines share the cores with the "
        "gateway: `cores` is what it had of them.",
        (
            Target("JSON: requests", "requests", "requests/s", "higher", ratio=1.5, peers=(VLLM_ROUTER,)),
            Target("JSON: CPU per request", "cpu", "µs", factor=1e6, peers=(VLLM_ROUTER,)),
            Target("JSON: cores used", "cores", "", peers=(VLLM_ROUTER,)),
            Target("JSON: prompts sent where their family is held", "hits", "%", "higher", 100.0, peers=(VLLM_ROUTER,)),
            Target("JSON: time to the answer, p99", "p99", "ms", factor=1e3, peers=(VLLM_ROUTER,)),
        ),
        open_json,
        notes={
            "requests": "One process serves with one thread, and fills one core; the peer's threads take more "
            "than that of the two, which clients and engines share. For the CPU that it takes kvsync is ahead of "
            "it. Tried: load kept in columns, ids lifted out of bodies without Python objects, lookups that make "
            "objects of those workers only that hold something, metrics of our own, structs for records, no task "
            "for text that nobody tokenizes. What would help: a second process on the same port."
        },
    ),
    Row(
        "gateway-text",
        "gateway with routing, text prompts, half of them unseen",
        f"Chats of about {PROMPT} tokens in {FAMILIES} families, local tokenizer (Qwen's vocabulary, 152 k), proved "
        f"before by the engines' `/tokenize`; {WORKERS} engines, {CONNECTIONS} connections. Half of the chats were "
        "asked once before. Checked as the row above. No peer tokenizes HTTP requests in its own process.",
        (
            Target("text: requests", "requests", "requests/s", "higher"),
            Target("text: CPU per request", "cpu", "µs", factor=1e6),
            Target("text: tokenized locally", "local", "%", "higher", 100.0),
            Target("text: prompts sent where their family is held", "hits", "%", "higher", 100.0),
        ),
        open_text,
        repeats=3,
    ),
    Row(
        "gateway-streams",
        "gateway, 128 and 256 open SSE streams",
        f"Chats of 2 kB; an answer is {CHUNKS} chunks, one every {CHUNK_EVERY * 1000:g} ms, compared as a whole. Each "
        "connection asks again when it has its answer, so that as many streams stay open. Routing by load or by the "
        "router's own cache_aware, no events.",
        tuple(
            target
            for count in STREAMS
            for target in (
                Target(
                    f"CPU per answer, {count} streams",
                    f"cpu {count}",
                    "ms",
                    factor=1e3,
                    ratio=1.25,
                    peers=(VLLM_ROUTER, SMG),
                ),
                Target(
                    f"time to the first token, p99, {count} streams",
                    f"p99 {count}",
                    "ms",
                    factor=1e3,
                    ratio=1.0,
                    peers=(VLLM_ROUTER, SMG),
                ),
            )
        ),
        open_streams,
        notes={f"p99 {count}": "Beside the best peer, from run to run on either side of it." for count in STREAMS},
        repeats=3,
    ),
    Row(
        "gateway-latency",
        "latency that a gateway adds, one connection",
        "One connection, chats of 2 kB one after the other, JSON answers at once, no tokenizing. What the same engine "
        "takes without a gateway, measured just before, is subtracted.",
        (
            Target("one connection: added, p50", "added p50", "ms", factor=1e3, at_most=0.2),
            Target("one connection: added, p99", "added p99", "ms", factor=1e3),
            Target("one connection: CPU per request", "cpu", "µs", factor=1e6),
        ),
        open_latency,
    ),
    Row(
        "gateway-events",
        f"gateway while {WORKERS} engines publish {RATE:,} blocks/s",
        f"{PROMPT} token ids a prompt, kv-aware, an index of 1 M blocks. Each engine stores {BATCH} blocks a batch and "
        "evicts as many, one event a block. One connection first: what it waits beside the same engine asked "
        f"directly. Then {CONNECTIONS}: CPU per request is what the process used beyond what events alone cost just "
        "before. At the end the index holds just what the engines do, and trusts them.",
        (
            Target("under events: added, p50", "added p50", "ms", factor=1e3, at_most=0.2),
            Target("under events: added, p99", "added p99", "ms", factor=1e3, at_most=5.0),
            Target("under events: CPU per request", "cpu", "µs", factor=1e6),
            Target("under events: cores for them alone", "events", ""),
        ),
        open_events,
        repeats=3,
        notes={
            "added p50": "Rounds are either just below the bound or half as much again above it, on one machine and in "
            "one run: gateway, engines, publishers and clients share the cores, and who of them is woken beside the "
            "gateway decides."
        },
    ),
)
