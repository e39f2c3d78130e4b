"""``kvsync sim``: one simulated vLLM engine in the foreground."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click
import uvloop

from kvsync.extras import how_to_install

if TYPE_CHECKING:
    from kvsync.engine_sim import SimConfig, SimEngine


@click.command(
    "sim",
    help="""Run a simulated vLLM engine: an engine for tests and trials, without a GPU and without weights.

It speaks vLLM's HTTP (completions, chat, streaming, /tokenize, /metrics), keeps a prefix cache with vLLM's own block
policy, and publishes its KV-cache events over ZMQ in the wire form of the version you choose, replay included. What it
answers is made up; how long it takes follows the time model below; "cached_tokens" in its usage is exact.

\b
Two engines to try a gateway with:
  kvsync sim --port 8001 --events-port 5557 --replay-port 6557
  kvsync sim --port 8002 --events-port 5558 --replay-port 6558

\b
Break one on purpose:
  curl -d '{"kind": "drop_batches", "count": 3}' localhost:8001/sim/fault
  curl -d '{"kind": "refuse", "seconds": 5}' localhost:8001/sim/fault
  curl -d '{"kind": "cut_replays", "after": 2}' localhost:8001/sim/fault

\b
These need nothing but their kind: status, reset, cut_stream, freeze, restart; and heal, which ends all of them.
""",
)
@click.option("--model", default="tiny", show_default=True, help="Name under which the model is served.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with tokenizer.json and chat_template.jinja.  [default: a small one, built in]",
)
@click.option("--adapter", "adapters", multiple=True, metavar="NAME", help="A LoRA adapter to serve; may be repeated.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind, for HTTP and events.")
@click.option("--port", default=8000, show_default=True, help="HTTP port; 0 lets the system choose.")
@click.option("--events-port", default=5557, show_default=True, help="Event port; rank r publishes on this + r.")
@click.option("--replay-port", default=6557, show_default=True, help="Replay port; rank r answers on this + r.")
@click.option("--events/--no-events", "kv_events", default=True, help="Publish KV-cache events.  [default: events]")
@click.option("--topic", default="", help="Topic of the events.  [default: empty, as vLLM's]")
@click.option("--buffer-steps", default=10_000, show_default=True, help="Event batches kept for replay.")
@click.option(
    "--version", default="0.32.0", show_default=True, help="vLLM version whose wire form to speak, 0.9.1 to 0.33."
)
@click.option(
    "--hash-form",
    type=click.Choice(["signed", "unsigned", "bytes"]),
    help="Block hashes on the wire.  [default: as that version does]",
)
@click.option(
    "--blocks", default=512, show_default=True, help="Cache blocks per rank, one of them unusable as in vLLM."
)
@click.option("--block-size", default=16, show_default=True, help="Tokens per block.")
@click.option("--sliding-window", type=int, help="Be a hybrid model, with a sliding-window group of this many tokens.")
@click.option("--data-parallel-size", default=1, show_default=True, help="Ranks, each with its own cache and stream.")
@click.option("--max-model-len", default=4096, show_default=True, help="Longest prompt plus output, in tokens.")
@click.option("--max-num-seqs", default=64, show_default=True, help="Sequences that run at once, per rank.")
@click.option("--max-num-batched-tokens", default=2048, show_default=True, help="Tokens of one step, per rank.")
@click.option("--answer-tokens", default=64, show_default=True, help="About how long an answer is that nothing limits.")
@click.option("--prefill-rate", default=8000.0, show_default=True, help="Prompt tokens per second, per rank.")
@click.option("--decode-rate", default=40.0, show_default=True, help="Output tokens per second, per sequence.")
@click.option("--speed", default=1.0, show_default=True, help="Run this many times faster than those rates.")
@click.option("--seed", default=0, show_default=True, help="Seed of the block hashes; engines differ by theirs.")
@click.option("--test-hooks", is_flag=True, help="Obey forced_output_token_ids in request bodies.")
def sim(tokenizer: Path | None, prefill_rate: float, decode_rate: float, speed: float, **options: object) -> None:
    try:
        from kvsync.engine_sim import SimConfig, SimEngine, TimeModel
    except ModuleNotFoundError as missing:
        raise click.ClickException(f"{missing}: it needs the extra 'sim' ({how_to_install('sim')})") from missing
    if tokenizer is not None:
        options["tokenizer"] = tokenizer
    try:
        time = TimeModel(prefill_rate=prefill_rate, decode_rate=decode_rate, speed=speed)
        engine = SimEngine(SimConfig(time=time, **options))  # type: ignore[arg-type]
        uvloop.run(_serve(engine))
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


async def _serve(engine: SimEngine) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with engine:
        for line in _banner(engine):
            click.echo(line)
        await stop.wait()


def _banner(engine: SimEngine) -> list[str]:
    config: SimConfig = engine.config
    ranks = f", {config.data_parallel_size} ranks" if config.data_parallel_size > 1 else ""
    lines = [
        f"{config.model} at {engine.url} as vLLM {config.version}: {config.blocks} blocks of {config.block_size}{ranks}"
    ]
    if engine.events:
        lines.append(f"events {engine.events}  replay {engine.replay}")
    return lines
