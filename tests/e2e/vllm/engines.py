"""Starting real vLLM engines (``scripts/vllm``) and knowing where they listen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .client import BadAnswer, get
from .processes import Server, free_ports

ROOT = Path(__file__).parents[3]
VENV = ROOT / ".make" / "vllm-venv"
DATA = ROOT / "tests" / "data"
TOKENIZER = DATA / "tiny-llama"
BLOCK_SIZE = 32
READY = 600.0
"""Seconds that an engine may take to start: on a loaded machine it needs minutes."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One engine to be started. ``blocks`` is each rank's cache, in blocks of :data:`BLOCK_SIZE` tokens."""

    name: str
    model: str
    blocks: int
    ranks: int = 1


class Engine:
    """One engine, from its start to its end. The worker names are those that the gateway gives its ranks."""

    def __init__(self, spec: Spec, logs: Path) -> None:
        self.spec = spec
        self.port = free_ports()
        self.events_port = free_ports(spec.ranks)
        self.replay_port = free_ports(spec.ranks)
        more = ["--num-gpu-blocks-override", str(spec.blocks), "--tokenizer", str(TOKENIZER)]
        if spec.ranks > 1:
            more += ["--data-parallel-size", str(spec.ranks)]
        ports = [str(self.port), str(self.events_port), str(self.replay_port)]
        command = [str(ROOT / "scripts/vllm/serve.sh"), str(VENV), str(DATA / spec.model), *ports, *more]
        self.server = Server(spec.name, ["nice", *command], logs / f"{spec.name}.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def replays(self) -> dict[str, str]:
        """Worker → its replay endpoint."""
        name, ranks = self.spec.name, range(self.spec.ranks)
        workers = [name] if self.spec.ranks == 1 else [f"{name}#{rank}" for rank in ranks]
        return {
            worker: f"tcp://127.0.0.1:{self.replay_port + rank}" for worker, rank in zip(workers, ranks, strict=True)
        }

    def wait_ready(self) -> None:
        """Return once the engine answers ``/health``.

        Raises:
            AssertionError: it died, or :data:`READY` seconds passed.
        """
        self.server.wait_until(self._healthy, READY, "no healthy answer")

    def _healthy(self) -> bool:
        try:
            get(self.url, "/health", timeout=5)
        except BadAnswer:
            return False
        return True
