"""Who serves what: the one description of an engine that every source of discovery produces.

A source (a YAML file, Kubernetes) yields :class:`Change` values; whoever consumes them never learns which
source it was. An engine's ``uid`` is its identity: two lives of one name or one address are two engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Engine:
    """One vLLM (or compatible) server process."""

    uid: str
    """Identity. Differs between two lives of one name (a pod's uid; for static engines the name)."""
    name: str
    """What people call it (``namespace/name`` of a pod, the name in the YAML file): shown in headers, metrics, logs."""
    url: str
    """HTTP base, ``http://host:port`` or ``https://host:port``, without a trailing slash; IPv6 in brackets."""
    model: str
    adapters: tuple[str, ...] = ()
    data_parallel_size: int = 1
    kv_events: bool = True
    """Follow this engine's KV events (needs ``events``)."""
    events: str | None = None
    """PUB endpoint of rank 0, ``tcp://host:port``; rank r is at port + r (facts of vLLM ≥ 0.9.1)."""
    replay: str | None = None
    """ROUTER endpoint of rank 0, or ``None`` when the engine has no replay; rank r is at port + r."""
    spec_decode: str | None = None
    """``"eagle"`` (also for MTP): the engine drops the last matched block; no event says so."""
    attention_chunk_size: int | None = None
    """The model config's value, needed for ``chunked_local_attention``; no event carries it."""
    usable_blocks: int | None = None
    """``num_gpu_blocks`` − 1, when known beforehand; else it is read from the engine's metrics."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """For the ``external-filter`` header."""
    ready: bool = True
    """Route requests to it. An engine that is not ready is still followed."""
    tokenizes: bool = True
    """It may be asked to tokenize (``/tokenize`` as vLLM has it)."""
    policy: str | None = None
    """The routing policy of its model where no header chooses."""
    policy_locked: bool = False
    """``policy`` holds whatever a header says."""

    @property
    def ranks(self) -> range:
        return range(self.data_parallel_size)

    def worker(self, rank: int) -> str:
        """The name under which the worker of this rank is known to index, load and metrics."""
        return self.uid if self.data_parallel_size == 1 else f"{self.uid}#{rank}"


@dataclass(frozen=True, slots=True)
class Change:
    """One step in the fleet's life. ``changed`` carries the whole new description, never a difference."""

    kind: Literal["added", "changed", "gone"]
    engine: Engine


__all__ = ["Change", "Engine"]
