"""Values that no honest client, engine or operator sends."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

ODD_NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**40, 0.5, -0.0, 1e308, 1e-320])
ODD_TEXTS = st.sampled_from(
    [
        "",
        " ",
        "\x00",
        "\ud7ff",
        "\U0010ffff",
        "null",
        "{{ 7 * 7 }}",
        "{% for i in x %}",
        "<|begin_of_text|>",
        "a" * 5000,
    ]
)
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), ODD_NUMBERS, st.text(max_size=20), ODD_TEXTS
)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
"""Whatever JSON can say."""


def mostly(sound: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A sound value three times in four, else anything."""
    return st.integers(0, 3).flatmap(lambda n: sound if n else ANYTHING)


def objects(**sound: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields, each mostly sound, and now and then one that nobody knows."""
    known = st.fixed_dictionaries({}, optional={name: mostly(value) for name, value in sound.items()})
    extra = st.dictionaries(st.text(max_size=8), ANYTHING, max_size=1)
    return st.builds(lambda a, b: {**b, **a}, known, extra)


__all__ = ["ANYTHING", "ODD_TEXTS", "SCALARS", "mostly", "objects"]
