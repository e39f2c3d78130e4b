"""Random lives of an engine against a naive oracle: a multiset of held blocks and a brute-force walk.

The oracle knows nothing of hashes, keys, parents or parking: it holds physical copies of blocks, each named by its
whole path from the root, and asks for every length whether all that is needed is held. The index sees events only.
After every step their answers must be equal: credit that is too high is unsound, credit that is too low is incomplete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvsync.index.match import Index
from tests.contract.conftest import IMPLEMENTATIONS
from tests.wire import batch, cleared, removed, stored

BLOCK = 2
DEPTH = 5
MODEL = "m"


class Path(NamedTuple):
    """A block, named by all that makes its content: who asked, and every token up to its end."""

    adapter: str | None
    salt: str | None
    letters: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [letter * 10 + i for letter in self.letters for i in range(BLOCK)]

    def head(self, blocks: int) -> Path:
        return self._replace(letters=self.letters[:blocks])


class Copy(NamedTuple):
    tier: str
    group: int
    path: Path


paths = st.builds(
    Path,
    st.sampled_from([None, "A"]),
    st.sampled_from([None, "A"]),
    st.lists(st.integers(0, 2), min_size=1, max_size=DEPTH).map(tuple),
)


class EngineLife(RuleBasedStateMachine):
    """One engine's cache: full attention in group 1; with ``window`` also a sliding-window group 0."""

    make: Callable[[], Index]
    window = 0
    state = False

    def __init__(self) -> None:
        super().__init__()
        self.index = self.make()
        self.index.add_worker("w", MODEL)
        self.held: Counter[Copy] = Counter()
        self.hashes: dict[Path, Any] = {}
        self.named: set[Path] = set()
        self.waiting: set[Path] = set()
        """Blocks of stores that may still wait for their parent: those name a block even when it was gone meanwhile."""
        self.asked: set[Path] = set()
        self.block_size_known = False

    def hash_of(self, path: Path) -> Any:
        number = len(self.hashes) + 1
        forms = (number, -number, 2**64 - number, b"%032d" % number, str(number))
        return self.hashes.setdefault(path, forms[number % len(forms)])

    def publish(self, *events: Any) -> None:
        self.index.apply("w", batch(*events))

    def store_event(self, path: Path, first: int, **fields: Any) -> Any:
        blocks = [path.head(i + 1) for i in range(first, len(path.letters))]
        keys = [
            [key for key in (path.adapter, path.salt if i == 0 else None) if key is not None] or None
            for i in range(first, len(path.letters))
        ]
        return stored(
            [self.hash_of(b) for b in blocks],
            path.tokens[first * BLOCK :],
            parent=self.hash_of(path.head(first)) if first else None,
            **{"block_size": BLOCK, "lora_name": path.adapter, "extra_keys": keys, "group_idx": 1} | fields,
        )

    def sparse_event(self, path: Path, which: list[int]) -> Any:
        kind: dict[str, Any] = (
            {"kv_cache_spec_kind": "mamba"}
            if self.state
            else {
                "kv_cache_spec_kind": "sliding_window",
                "kv_cache_spec_sliding_window": self.window,
            }
        )
        return stored(
            [self.hash_of(path.head(i + 1)) for i in which],
            [*path.tokens, 7],  # one token too many: never dense
            block_size=BLOCK,
            group_idx=0,
            lora_name=path.adapter,
            extra_keys=[None] * len(which),
            **kind,
        )

    def note_waiting(self, path: Path, first: int) -> None:
        if not all(path.head(i) in self.named for i in range(1, first + 1)):
            self.waiting |= {path.head(i + 1) for i in range(first, len(path.letters))}

    @rule(path=paths, first=st.integers(0, DEPTH - 1), data=st.data())
    def store(self, path: Path, first: int, data: st.DataObject) -> None:
        """Some blocks at the end of a path enter the cache, whether or not their parents are there."""
        first = min(first, len(path.letters) - 1)
        events = [self.store_event(path, first)]
        self.note_waiting(path, first)
        for i in range(first, len(path.letters)):
            self.held[Copy("gpu", 1, path.head(i + 1))] += 1
            self.named.add(path.head(i + 1))
        if self.window or self.state:
            which = sorted(data.draw(st.sets(st.integers(0, len(path.letters) - 1))))
            # as engines do: the other group's event comes in the same batch, even when it names no block
            events.insert(data.draw(st.integers(0, 1)), self.sparse_event(path, which))
            for i in which:
                self.held[Copy("gpu", 0, path.head(i + 1))] += 1
        self.asked.add(path)
        self.block_size_known = True
        self.publish(*events)

    @rule(path=paths, tier=st.sampled_from(["cpu", "STORAGE"]), shown=st.booleans())
    def offload(self, path: Path, tier: str, shown: bool) -> None:
        """A path is copied to another tier; a connector that hides the extra keys can't place an unknown hash."""
        at = len(path.letters) - 1
        fields: dict[str, Any] = {"medium": tier} if shown else {"medium": tier, "extra_keys": ...}
        event = self.store_event(path, at, **fields)
        if shown and self.block_size_known:
            self.note_waiting(path, at)
            self.named.add(path)
        self.held[Copy(tier.lower(), 1, path)] += 1
        self.asked.add(path)
        self.publish(event)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        copies = sorted(self.held, key=repr)
        chosen = data.draw(st.lists(st.sampled_from(copies), min_size=1, max_size=3, unique=True))
        for copy in chosen:
            self.held[copy] -= 1
            if not self.held[copy]:
                del self.held[copy]
            if not any(other.path == copy.path for other in self.held):
                self.named.discard(copy.path)
        self.publish(*(removed([self.hash_of(c.path)], medium=c.tier, group_idx=c.group) for c in chosen))

    @rule(again=st.booleans())
    def clear(self, again: bool) -> None:
        self.held.clear()
        self.named.clear()
        self.waiting.clear()
        self.publish(*[cleared()] * (1 + again))

    def expected(self, path: Path, tokens: int, named: set[Path]) -> int:
        def held(tier: str, group: int, blocks: int) -> bool:
            at = path.head(blocks)
            return at in named and Copy(tier, group, at) in self.held

        limit = min((tokens - 1) // BLOCK, len(path.letters))
        best = 0
        need = -(-(self.window - 1) // BLOCK)
        for length in range(1, limit + 1):
            if not all(held("gpu", 1, i) for i in range(1, length + 1)):
                break
            if self.state and not held("gpu", 0, length):
                continue
            if self.window and not all(held("gpu", 0, i) for i in range(max(1, length - need + 1), length + 1)):
                continue
            best = length
        if not self.window and not self.state:
            while best < limit and any(held(tier, 1, best + 1) for tier in ("cpu", "storage")):
                best += 1
        return best * BLOCK

    @invariant()
    def credit_is_what_is_held(self) -> None:
        for path in self.asked:
            for tokens in ([*path.tokens, 99], path.tokens):
                match = self.index.match(tokens, MODEL, adapter=path.adapter, cache_salt=path.salt)["w"]
                least = self.expected(path, len(tokens), self.named)
                most = self.expected(path, len(tokens), self.named | self.waiting)
                assert least <= match.credit <= most, (path, len(tokens), least, most)
                assert match.trust == "exact"
                assert sum(match.by_tier.values()) == match.credit

    @invariant()
    def nothing_is_kept_of_what_is_gone(self) -> None:
        worker = self.index.stats()["workers"]["w"]  # type: ignore[index]
        assert worker["copies"] == sum(self.held.values())
        assert worker["blocks"] == len({copy.path for copy in self.held})
        assert worker["placed"] <= worker["blocks"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("window", "state"), [(0, False), (4, False), (2, False), (0, True)])
def test_index_equals_the_oracle(implementation: str, window: int, state: bool) -> None:
    attributes = {"make": staticmethod(IMPLEMENTATIONS[implementation]), "window": window, "state": state}
    case = type("Life", (EngineLife,), attributes).TestCase  # type: ignore[attr-defined]
    case.settings = settings(
        max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()
