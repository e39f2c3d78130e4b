"""Both plays, one after the other, on fresh stages."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvsync.cli.demo import report
from kvsync.cli.demo.bound import all_knowing_hits
from kvsync.cli.demo.figures import Figures, figures
from kvsync.cli.demo.play import play
from kvsync.cli.demo.stage import MODEL, Fleet, Stage, stage
from kvsync.cli.demo.workload import Conversation, Shape, conversations, paced, size
from kvsync.engine_sim.config import TINY_LLAMA
from kvsync.engine_sim.tokens import ModelTokenizer

POLICIES = ("round-robin", "kv-aware")
LOAD = 0.7
"""Of the engines' capacity."""
SHARE = 3
"""The working set is so many times what all pools hold together."""


async def run(seed: int, engines: int, keep: bool, console: Console) -> list[Figures]:
    """The same trace once per policy, each on fresh engines; with ``keep`` the last stage stays until SIGINT."""
    trace = conversations(seed, Shape())
    tokenizer = ModelTokenizer(TINY_LLAMA)
    needs = size(trace, lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
    fleet = Fleet(engines=engines, usable_blocks=needs.working_set // 16 // SHARE // engines)
    trace = paced(trace, LOAD * fleet.capacity * len(trace) / needs.prompt_tokens)
    requests = sum(len(talk.messages) for talk in trace)
    report.opening(console, fleet, needs, len(trace), requests, LOAD)
    plays: list[Figures] = []
    for policy in POLICIES:
        async with stage(fleet) as built:
            plays.append(await _play(console, fleet, built, policy, trace, requests))
            if policy == POLICIES[-1]:
                report.closing(console, plays)
                if keep:
                    await _stay(console, built)
    return plays


async def _play(
    console: Console, fleet: Fleet, built: Stage, policy: str, trace: Sequence[Conversation], requests: int
) -> Figures:
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(policy, total=requests)
        turns = await play(built.url, MODEL, policy, trace, lambda _: progress.advance(bar))
    best = await asyncio.to_thread(all_knowing_hits, turns, fleet.blocks, fleet.block_size)
    return figures(policy, turns, built.app.audit, best)


async def _stay(console: Console, built: Stage) -> None:
    console.print(
        f"\nStill running (Ctrl-C ends it):\n"
        f"  curl {built.url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "hello"}}]}}\'\n'
        f"  curl {built.admin_url}/v1/workers\n"
        f"  curl {built.admin_url}/metrics\n"
        f"  {sys.argv[0]} watch {built.engines[0].events} --replay {built.engines[0].replay}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    await end.wait()


__all__ = ["run"]
