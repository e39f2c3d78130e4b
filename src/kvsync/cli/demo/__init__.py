"""``kvsync demo``: the main job, shown on simulated engines in a minute.

``workload`` makes the conversations, ``stage`` builds fleet and gateway, ``play`` sends the requests and measures,
``bound`` says what a router that knows everything could have reached, ``plays`` does it for each policy, ``report``
prints. The command stands here, so that its help needs none of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import click
import uvloop

from kvsync.extras import how_to_install
from kvsync.telemetry import logs


@click.command("demo")
@click.option("--seed", default=1, show_default=True, help="Of the conversations.")
@click.option("--engines", default=4, show_default=True, type=click.IntRange(2, 16), help="Simulated engines.")
@click.option("--keep", is_flag=True, help="Leave engines and gateway running afterwards, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON and nothing else.")
def demo(seed: int, engines: int, keep: bool, as_json: bool) -> None:
    """Show what cache-aware routing does, on this machine, in about a minute.

    Starts simulated vLLM engines (real HTTP, real KV events over ZMQ, vLLM's own cache policy, no GPU) whose caches
    hold a third of what the conversations touch, and the gateway in front of them. Then the same conversations are
    played twice, each time from empty caches: once with round-robin, once with kv-aware.

    Printed are the share of prompt tokens that the engines served from cache, by their own account, beside what a
    router that knows everything could have reached; the time to the first token; and how much of the credit that the
    gateway gave to the engines it chose was confirmed by their answers.
    """
    try:
        from rich.console import Console

        from kvsync.cli.demo.plays import run
    except ModuleNotFoundError as missing:
        raise click.ClickException(f"{missing}: the demo needs the extra 'sim' ({how_to_install('sim')})") from missing
    logs.setup("warning", "text")
    plays = uvloop.run(run(seed, engines, keep, Console(quiet=as_json)))
    if as_json:
        click.echo(json.dumps([asdict(play) for play in plays]))


__all__ = ["demo"]
