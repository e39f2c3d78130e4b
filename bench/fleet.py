"""How many gateways a fleet needs, from what scale tests measured (docs/scaling.md).

    python -m bench.fleet --engines 200 --blocks 30000 --block-rate 300 --requests 400 --tokens 8000

A gateway process has one thread that reads events and one that serves requests; each is given ``BUSY`` of a core, so
that queues stay short. Every replica follows all engines of its shard, and has all of their blocks in memory. So
replicas divide the requests; only shards (engines apart, each with gateways of their own) divide the events and the
memory. As many shards as the events need, as many replicas as the requests of a shard need, and one more, since one may
fail.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.scale.costs import Costs, latest, load

BUSY = 0.7
"""Of a core: above that queues grow."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A fleet, and what it is asked."""

    engines: int
    blocks: int
    """That each engine's cache has."""
    block_rate: float
    """Blocks that each engine stores a second (and evicts: caches are full): uncached prompt tokens and generated ones
    a second, by the block size."""
    requests: float
    """A second, of the whole fleet."""
    tokens: int
    """Of a prompt."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What it takes. Cores and bytes are those of one replica, where it does not say otherwise."""

    shards: int
    replicas: int
    """Of each shard, the spare one included."""
    event_cores: float
    request_cores: float
    """While all of them serve."""
    memory: float
    wire: float
    """Bytes a second that each engine sends, to all replicas together."""

    @property
    def processes(self) -> int:
        return self.shards * self.replicas

    @property
    def cores(self) -> float:
        """Of all processes."""
        return self.processes * (self.event_cores + self.request_cores)


def plan(demand: Demand, costs: Costs, request_cpu: float | None = None, memory: float = math.inf) -> Plan:
    """``memory``: bytes that one process may have.

    Raises:
        ValueError: one engine alone is too much for a process, or what a request costs is not known.
    """
    for shards in range(1, demand.engines + 1):
        engines = math.ceil(demand.engines / shards)
        events = costs.of_silence(engines) + engines * demand.block_rate * costs.of_event(engines)
        held = costs.process + engines * (demand.blocks * costs.per_block + costs.per_stream)
        if events <= BUSY and held <= memory:
            break
    else:
        raise ValueError("one engine alone is more than a process can follow")
    of_request = costs.of_request(engines, demand.tokens, request_cpu)
    if of_request is None:
        raise ValueError("what a request costs is not known: give --request-cpu")
    requests = demand.requests / shards * of_request
    replicas = max(1, math.ceil(requests / BUSY)) + 1
    return Plan(
        shards=shards,
        replicas=replicas,
        event_cores=events,
        request_cores=requests / replicas,
        memory=held,
        wire=demand.block_rate * costs.on_the_wire * replicas,
    )


def lines(demand: Demand, made: Plan) -> Iterator[str]:
    if made.shards > 1:
        yield f"{made.shards} shards of {math.ceil(demand.engines / made.shards)} engines, each with"
    yield f"{made.replicas} replicas (one of them to spare): {made.processes} processes, {made.cores:.2g} cores in all"
    yield f"  a replica: {made.event_cores:.2g} cores for events, {made.request_cores:.2g} for requests"
    yield f"             {made.memory / 1e9:.2g} GB of memory"
    yield f"  an engine: {made.wire / 1e3:,.0f} kB/s of events to all its replicas together"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, required=True, help="data-parallel ranks count each")
    parser.add_argument("--blocks", type=int, required=True, help="of each engine's cache (num_gpu_blocks)")
    parser.add_argument("--block-rate", type=float, required=True, help="blocks that each engine stores a second")
    parser.add_argument("--requests", type=float, required=True, help="a second, of the whole fleet")
    parser.add_argument("--tokens", type=int, required=True, help="of a prompt")
    parser.add_argument("--request-cpu", type=float, help="µs of CPU of a request, 512 tokens over 64 workers")
    parser.add_argument("--memory", type=float, default=math.inf, help="GB that one process may have")
    given = parser.parse_args()
    path = latest()
    if path is None:
        parser.error("there is no document of a scale test: python -m bench.scale makes one")
    demand = Demand(given.engines, given.blocks, given.block_rate, given.requests, given.tokens)
    cpu = None if given.request_cpu is None else given.request_cpu / 1e6
    try:
        made = plan(demand, Costs(load(path)), cpu, given.memory * 1e9)
    except ValueError as error:
        parser.error(str(error))
    print(*lines(demand, made), sep="\n")


if __name__ == "__main__":
    main()
