"""A document of a scale test → docs/scaling.md. All figures are the document's, or follow from it; here are the words.

``python -m bench.scale.page`` renders the last document again. What must always hold: the same document gives the same
bytes (a test compares them with the page), so no figure on it can be typed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.fleet import BUSY, Demand, lines, plan
from bench.judge import number
from bench.process import ROOT
from bench.scale.costs import ASKED, Costs, Document, Line, latest, load

PAGE = ROOT / "docs" / "scaling.md"

EXAMPLES = (
    ("a team's fleet", Demand(16, 20_000, 300.0, 50.0, 4_000)),
    ("a large fleet", Demand(64, 30_000, 300.0, 400.0, 8_000)),
    ("the same, every engine at its limit", Demand(64, 30_000, 1_250.0, 400.0, 8_000)),
    ("long prompts of agents", Demand(200, 50_000, 400.0, 300.0, 32_000)),
    ("a thousand engines", Demand(1_000, 20_000, 50.0, 2_000.0, 2_000)),
    ("a thousand engines, busy", Demand(1_000, 50_000, 500.0, 5_000.0, 8_000)),
)
MEMORY = 16e9
"""Of a process, for what one can't hold."""

HEAD = """# Scaling

How far one gateway process reaches, what it takes beyond that, and how many a given fleet needs.
Measured by `python -m bench.scale`, rendered from `bench/results/{name}`; no figure is typed by hand.

"""

CONTENT = """Each line is a process of its own, with its caches full of prompts of 131,072, 16,384 and 2,048 tokens; the
first 512 tokens of each are one of 64 system prompts, so that a lookup finds many workers that hold a little and one
that holds all. Blocks have 16 tokens. After each part it is checked that all blocks are there and that every lookup
credited what was held.
"""


def render(document: Document, name: str) -> str:
    costs = Costs(document)
    parts = [HEAD.format(name=name), _machine(document), "\n\n", CONTENT, "\n"]
    for title, body in (
        ("Memory", _memory(document)),
        ("Lookups", _lookups(document)),
        ("Losing a worker", _losing(document)),
        ("Events", _events(document)),
        ("How it grows", _growth(document)),
        ("What one process can't do", _limits(document, costs)),
        ("How many gateways a fleet needs", _fleets(document, costs)),
    ):
        parts += [f"## {title}\n", *(line + "\n" for line in body), "\n"]
    return "".join(parts).rstrip() + "\n"


def _machine(document: Document) -> str:
    machine = document["machine"]
    loads = [load for part in ("held", "followed") for line in document[part] for load in line["machine_load"]]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    return (
        f"**{document['date'].replace('T', ' ').replace('+00:00', ' UTC')}**, commit `{machine['commit']}`"
        f"{' with changes' if machine['changed'] else ''}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, Python {machine['python']}; {versions}. Load of the machine {min(loads)} – "
        f"{max(loads)} (above {machine['cores']}, others had part of it: then times on the clock are too long, and CPU "
        "times nearly right)."
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def ms(seconds: float) -> str:
    return number(seconds * 1e3)


def us(seconds: float) -> str:
    return number(seconds * 1e6)


def size(line: Line) -> str:
    return f"{line['workers']:,} workers, {line['millions']} M"


# -- what was measured


def _memory(document: Document) -> Iterator[str]:
    yield (
        "What the process has in RAM beside files, more than with an empty index; *counted* is what the index says "
        "that it takes, which `index.max_bytes` bounds."
    )
    yield ""
    yield from table(
        ("workers", "blocks", "distinct", "memory, MB", "counted, MB", "bytes a block", "CPU of storing a block, µs"),
        (
            (
                f"{line['workers']:,}",
                f"{line['blocks']:,}",
                f"{line['distinct']:,}",
                number(line["memory"] / 1e6),
                number(line["counted"] / 1e6),
                number(line["bytes_per_block"]),
                us(line["apply_seconds_per_block"]),
            )
            for line in document["held"]
        ),
    )


def _lookups(document: Document) -> Iterator[str]:
    counts = {found["count"] for line in document["held"] for found in line["lookups"]}
    yield (
        f"Milliseconds, p50 and p99 of {_several(counts)} each. `match` from Python; its answer has an entry for each "
        "worker. *Held*: a system prompt that many have, and the rest at one worker. *New*: nobody has its first "
        "block. *Choice*: `Router.choose` (kv-aware) for a held prompt: lookup, policy, record, metrics. *CPU*: of the "
        "thread; where others use the cores, its p99 is the one that says something of kvsync."
    )
    yield ""
    rows = []
    for line in document["held"]:
        for held, new, choice in zip(_kind(line, "held"), _kind(line, "new"), line["choices"], strict=True):
            cells = [cell for one in (held, new, choice) for cell in (_pair(one), _pair(one["cpu"]))]
            rows.append((size(line), f"{held['tokens']:,}", *cells))
    heads = ("index", "tokens", "match, held", "CPU", "match, new", "CPU", "choice", "CPU")
    yield from table(heads, rows)


def _kind(line: Line, kind: str) -> list[Mapping[str, Any]]:
    return [found for found in line["lookups"] if found["kind"] == kind]


def _pair(found: Mapping[str, float]) -> str:
    return f"{ms(found['p50'])}, {ms(found['p99'])}"


def _losing(document: Document) -> Iterator[str]:
    yield (
        "One worker after the other, each filled again afterwards; times in milliseconds, the longest in brackets. "
        "While it is done, another thread looks prompts of 2,048 tokens up without a pause, and waits for the GIL like "
        "the one that removes. *Call*: from then on no lookup finds the worker's blocks. *Sweep*: what `kvsync serve` "
        "does each second, until all that the worker held can be used again. *Free*: what the index says that it takes "
        "less, and what the process has less in RAM, for each block lost. *Kept*: what the process has more after all "
        "were filled again."
    )
    yield ""
    rows = []
    for line in document["held"]:
        for what in ("removal", "clear"):
            lost = line[what]
            rows.append(
                (
                    size(line),
                    what,
                    f"{lost['blocks']:,.0f}",
                    f"{ms(lost['call']['p50'])} ({ms(lost['call']['most'])})",
                    f"{ms(lost['sweep']['p50'])} ({ms(lost['sweep']['most'])})",
                    ms(lost["longest_lookup"]),
                    f"{lost['uncounted_per_block']:.1f}, {lost['returned_per_block']:.1f} B",
                    f"{lost['kept_after_refill'] / 1e6:.1f} MB",
                )
            )
    heads = ("index", "what", "blocks lost", "call", "sweep", "longest lookup", "free", "kept")
    yield from table(heads, rows)


def _events(document: Document) -> Iterator[str]:
    first = document["followed"][0]
    yield (
        "Over ZMQ on loopback, every engine with a PUB and a ROUTER socket of its own (two processes have them all): "
        f"{number(first['blocks_per_second'])} blocks a second stored by all together, and as many evicted, 16 a "
        f"batch, for {number(first['seconds'])} s; meanwhile prompts of all three lengths are looked up. *Lag*: from "
        "just before a batch is sent until `match` credits its block. *CPU*: of all threads of the process, ZMQ's "
        "included, lookups not. *Waited*: how long threads of the process, all together, were ready and had no core. "
        "Afterwards every stream had all its batches, in one connection, and the index as many blocks as before."
    )
    yield ""
    heads = ("index", "lag p50, ms", "p99", "p99 of the median second", "CPU, cores", "CPU a block, µs", "idle, cores")
    yield from table(
        (*heads, "match p50, p99, ms", "waited"),
        (
            (
                size(line),
                ms(line["lag"]["p50"]),
                ms(line["lag"]["p99"]),
                ms(line["lag_p99_of_median_second"]),
                number(line["cpu_of_events"] / line["seconds"]),
                us(line["cpu_per_block"]),
                number(line["idle_cpu"]),
                "; ".join(f"{found['tokens']:,}: {_pair(found)}" for found in line["lookups"]),
                f"{line['waited'] / line['seconds']:.0%}",
            )
            for line in document["followed"]
        ),
    )
    yield ""
    yield (
        f"A stream takes {number(Costs(document).per_stream / 1e3)} kB of memory; a block stored and evicted is "
        f"{number(Costs(document).on_the_wire)} bytes on the wire."
    )


# -- what follows from it


def _growth(document: Document) -> Iterator[str]:
    held, followed = document["held"], document["followed"]
    yield "Figures of the last line over those of the first one, at equal size otherwise."
    yield ""
    rows = []
    held_by_workers, held_by_blocks = _row_of(held, "millions"), _row_of(held, "workers")
    for step, first, last in (
        (_step("workers", held_by_workers), held_by_workers[0], held_by_workers[-1]),
        (_step("millions", held_by_blocks), held_by_blocks[0], held_by_blocks[-1]),
    ):
        rows.append((step, "bytes a block", _ratio(last["bytes_per_block"], first["bytes_per_block"])))
        stored = "apply_seconds_per_block"
        rows.append((step, "CPU of storing a block", _ratio(last[stored], first[stored])))
        for before, after in zip(first["choices"], last["choices"], strict=True):
            what = f"CPU of a choice, {after['tokens']:,} tokens"
            rows.append((step, what, _ratio(after["cpu"]["p50"], before["cpu"]["p50"])))
    streams = _row_of(followed, "millions")
    first, last = streams[0], streams[-1]
    step = _step("workers", streams).replace("workers", "streams")
    rows.append((step, "CPU of an event's block", _ratio(last["cpu_per_block"], first["cpu_per_block"])))
    lag = "lag_p99_of_median_second"
    rows.append((step, "lag, p99 of the median second", _ratio(last[lag], first[lag])))
    choices = max(held, key=lambda line: line["millions"])["choices"]
    step = f"tokens: {choices[0]['tokens']:,} → {choices[-1]['tokens']:,}"
    rows.append((step, "CPU of a choice", _ratio(choices[-1]["cpu"]["p50"], choices[0]["cpu"]["p50"])))
    yield from table(("from → to", "what", "becomes"), rows)


def _row_of(found: Sequence[Line], equal: str) -> list[Line]:
    """The longest row of measurements that have this in common."""
    values = sorted({line[equal] for line in found})
    rows = [[line for line in found if line[equal] == value] for value in values]
    longest = max(len(row) for row in rows)
    return sorted(
        next(row for row in reversed(rows) if len(row) == longest), key=lambda line: (line["workers"], line["millions"])
    )


def _step(what: str, row: Sequence[Line]) -> str:
    first, last = row[0], row[-1]
    if what == "workers":
        return f"workers: {first[what]:,} → {last[what]:,} ({last['millions']} M blocks)"
    return f"blocks: {first[what]} M → {last[what]} M ({last['workers']:,} workers)"


def _ratio(last: float, first: float) -> str:
    return f"{number(last / first)}×"


def _limits(document: Document, costs: Costs) -> Iterator[str]:
    streams = costs.workers("followed")
    yield (
        "By extrapolation. Assumed: one thread reads the events of all streams and one serves all requests, each up to "
        f"{BUSY:.0%} of a core like these, and neither keeps the other from running (the GIL); a block costs as much "
        "at other rates as at the one measured; batches of 16 blocks; every block has one holder (further holders cost "
        "less memory); between and beyond what was measured, straight lines."
    )
    yield ""
    rows = []
    for engines in streams:
        rate = max(0.0, BUSY - costs.of_silence(engines)) / costs.of_event(engines)
        rows.append(
            (f"events of {engines:,} engines", f"{number(rate)} blocks/s, {number(rate / engines)} of each engine")
        )
    for engines in (64, 1_000):
        for tokens in (2_048, 32_768):
            cpu = costs.of_request(engines, tokens)
            said = f"{number(BUSY / cpu)} requests/s" if cpu is not None else "not known"
            rows.append((f"requests of {tokens:,} tokens over {engines:,} engines", said))
    blocks = (MEMORY - costs.process) / costs.per_block
    rows.append((f"blocks in {MEMORY / 1e9:.0f} GB", f"{number(blocks / 1e6)} M"))
    yield from table(("one process: at most", ""), rows)
    yield ""
    yield (
        "Beyond the first of these limits, engines are divided among shards (by model or pool, each with its own "
        "gateways and address): nothing in one process becomes faster by a second replica, since each follows all "
        "engines. Beyond the second, replicas are added. The third is a matter of the machine."
    )


def _fleets(document: Document, costs: Costs) -> Iterator[str]:
    yield "`python -m bench.fleet` does this arithmetic for any fleet, with these costs:"
    yield ""
    yield "```"
    yield "memory of a replica    a process + engines × (blocks × bytes a block + bytes a stream)"
    yield "cores for events       idle(engines) + engines × blocks/s × CPU a block(engines)"
    yield "cores for requests     requests/s × (CPU a request + CPU of a choice − that of 512 tokens, 64 workers)"
    yield f"shards                 until a replica's cores for events are at most {BUSY}"
    yield f"replicas of a shard    cores for requests ÷ {BUSY}, rounded up, and one to spare"
    yield "```"
    yield ""
    if document["request_cpu"] is None:
        yield "What a request costs was not measured in that run: the script takes it as `--request-cpu`."
        return
    yield (
        f"A request with {ASKED[1]} tokens over {ASKED[0]} workers takes {us(document['request_cpu'])} µs of CPU "
        f"(from {document['request_cpu_from']})."
    )
    yield ""
    for title, demand in EXAMPLES:
        yield (
            f"**{title[0].upper()}{title[1:]}**: {demand.engines:,} engines of {demand.blocks:,} blocks, each storing "
            f"{demand.block_rate:,.0f} blocks/s; {demand.requests:,.0f} requests/s of {demand.tokens:,} tokens:"
        )
        yield ""
        yield "```"
        yield from lines(demand, plan(demand, costs))
        yield "```"
        yield ""


def _several(counts: Iterable[int]) -> str:
    ordered = sorted(counts)
    return f"{ordered[0]}" if len(ordered) == 1 else f"{ordered[0]} – {ordered[-1]}"


def write(path: Path) -> None:
    PAGE.write_text(render(load(path), path.name), encoding="utf-8")


def main() -> None:
    path = latest()
    if path is None:
        raise SystemExit("There is no document of a scale test: python -m bench.scale makes one.")
    write(path)


if __name__ == "__main__":
    main()
