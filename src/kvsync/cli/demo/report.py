"""What the demo prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvsync.cli.demo.figures import Figures
from kvsync.cli.demo.stage import Fleet
from kvsync.cli.demo.workload import Size


def opening(console: Console, fleet: Fleet, size: Size, conversations: int, requests: int, load: float) -> None:
    blocks = size.working_set // fleet.block_size
    console.print(
        f"{fleet.engines} simulated vLLM engines, {fleet.usable_blocks} blocks of {fleet.block_size} tokens each: "
        f"together {fleet.blocks / blocks:.0%} of the {blocks} blocks that the trace touches.\n"
        f"{conversations} conversations, {requests} requests, {size.prompt_tokens} prompt tokens, arriving at "
        f"{load:.0%} of the engines' capacity (all prompts computed, nothing cached)."
    )


def closing(console: Console, plays: Sequence[Figures]) -> None:
    table = Table(title=None)
    table.add_column("the same trace with")
    for play in plays:
        table.add_column(play.policy, justify="right")
    table.add_row("prompt tokens served from cache", *(f"{play.hit_rate:.1%}" for play in plays))
    table.add_row("  a router that knows everything", *(f"{play.best_hit_rate:.1%}" for play in plays))
    table.add_row("time to first token, median", *(f"{play.first_token_p50 * 1e3:.0f} ms" for play in plays))
    table.add_row("time to first token, p90", *(f"{play.first_token_p90 * 1e3:.0f} ms" for play in plays))
    table.add_row("audited credit that proved right", *(_share(play) for play in plays))
    table.add_row("requests per engine", *(" / ".join(map(str, play.engines.values())) for play in plays))
    console.print(table)
    first, last = plays[0], plays[-1]
    console.print(
        f"{last.policy} against {first.policy}: {last.hit_rate / first.hit_rate:.2f} × the hit rate, "
        f"{last.first_token_p90 / first.first_token_p90:.2f} × the p90 time to first token."
    )


def _share(play: Figures) -> str:
    if play.credit_right is None:
        return "none given"
    return f"{play.credit_right:.2%} of {play.credited_tokens}"


__all__ = ["closing", "opening"]
