"""Streams of real vLLM, as what a test does one after the other: publish a batch, or ask with a prompt.

The figure that an ask expects is vLLM's own: what it reported as cached (0.32), or what its scheduler found (older
versions, whose captures were made without HTTP).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from tests.contract.captures import MODEL, payload, records

ONE_PROCESS: Final = ("v0.32_basic", "v0.32_evict", "v0.32_lora", "v0.32_reset")
"""Captures of one server process, in their order."""
HIDE_SALTS: Final = ("0.9.2", "0.11.2")
"""Versions whose events do not tell that a block was stored under a salt."""
_INHERENT: Final = frozenset(
    {("v0.32_basic", 25), ("v0.32_evict", 10), ("v0.32_evict", 12), ("v0.32_reset", 3)},
)
"""Answers that no index can foresee: two samples of one request, requests in one step, a clear not sent yet."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A message of the event stream, as it was on the wire."""

    topic: bytes
    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and what of its prompt is cached at that moment."""

    label: str
    path: str
    body: Mapping[str, Any]
    """With the captured server's model or adapter name."""
    tokens: Sequence[int]
    """The whole prompt, as the engine saw it."""
    cached: int
    foreseeable: bool = True

    @property
    def adapter(self) -> str | None:
        return None if self.body["model"] == MODEL else str(self.body["model"])


Step: TypeAlias = Batch | Ask


@dataclass(frozen=True, slots=True)
class Dialect:
    """One version's stream."""

    version: str
    blocks: int | None
    """That the engine says its cache has; ``None``: it does not say."""
    replay_topic: bool
    """Whether replayed batches carry the topic (since 0.26)."""
    steps: tuple[Step, ...]

    @property
    def adapters(self) -> list[str]:
        return sorted({step.adapter for step in self.steps if isinstance(step, Ask) and step.adapter})

    def until_most_is_cached(self) -> tuple[list[Batch], Ask]:
        """The batches before the ask that finds most cached, and that ask."""
        asks = [step for step in self.steps if isinstance(step, Ask) and step.foreseeable and step.adapter is None]
        best = max(asks, key=lambda ask: ask.cached)
        before = self.steps[: self.steps.index(best)]
        return [step for step in before if isinstance(step, Batch)], best


def dialects() -> list[Dialect]:
    """Every version of which there is a stream that starts from an empty cache."""
    older = [
        Dialect(version, 12, False, tuple(_scheduler_side(f"gen_{version}")))
        for version in ("0.9.2", "0.11.2", "0.23.0", "0.24.0")
    ]
    *before, last = (list(_served(name)) for name in ONE_PROCESS)
    served = [step for steps in before for step in steps]
    # Without the number of blocks, only the requests themselves can tell that this engine announces hits again.
    return [*older, Dialect("0.32", None, True, (*served, _long_evicted(served), *last))]


def _long_evicted(steps: Sequence[Step]) -> Ask:
    """A prompt whose blocks were announced again on hits: as many announcements as copies would make it live for ever,
    but the flushing requests that came since left nothing of it."""
    (reported,) = (step for step in steps if isinstance(step, Ask) and step.label.startswith("v0.32_basic 23:"))
    body = {name: value for name, value in reported.body.items() if name != "vllm_xargs"}
    return Ask("prompt of basic 23, evicted", reported.path, body, reported.tokens, 0)


def _scheduler_side(name: str) -> Iterator[Step]:
    first: Ask | None = None
    for record in records(name):
        note, tokens = record["note"], record["token_ids"]
        ask = None
        if tokens is not None:
            salt = {"cache_salt": "alpha"} if note == "salt" else {}
            body = {"model": MODEL, "prompt": tokens, "max_tokens": 1, **salt}
            ask = Ask(note, "/v1/completions", body, tokens, record["hit"])
        if note == "reset":
            # 2 × 6 full blocks were stored since, in a cache of 11.
            assert first is not None
            yield Ask("P, evicted", first.path, first.body, first.tokens, 0)
        if ask is not None:
            yield ask
        if record["kind"] == "sub":
            yield _batch(record)
        first = first or ask
    # The last record stored P anew.
    assert first is not None
    yield Ask("P, stored anew", first.path, first.body, first.tokens, 48)


def _served(name: str) -> Iterator[Step]:
    lines = list(records(name))
    answers = {record["id"]: record for record in lines if record["kind"] == "resp"}
    for record in lines:
        if record["kind"] == "sub":
            yield _batch(record)
        answer = answers.get(record["id"]) if record["kind"] == "req" else None
        if answer is not None and answer.get("cached_tokens") is not None:
            yield Ask(
                label=f"{name} {record['id']}: {record['note']}",
                path=record["path"],
                body=record["body"],
                tokens=answer["prompt_token_ids"],
                cached=answer["cached_tokens"],
                foreseeable=(name, record["id"]) not in _INHERENT and "prompt_logprobs" not in record["body"],
            )


def _batch(record: Mapping[str, Any]) -> Batch:
    topic, sequence = (base64.b64decode(frame) for frame in record["frames"][:2])
    content = payload(dict(record))
    assert content is not None
    return Batch(topic, int.from_bytes(sequence, "big"), content)


def question(body: Mapping[str, Any]) -> str:
    """What of a request decides its tokens, as a key: the same for a request and for its ``/tokenize`` call."""
    return json.dumps([body.get("prompt"), body.get("messages"), body.get("tools")], sort_keys=True)
