"""Which places of a text are boundaries."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from kvsync.tokenize.boundaries import Boundaries, Cut, longest_of, spaced


def boundaries(*tokens: AddedToken) -> Boundaries:
    return Boundaries(enumerate(tokens))


def test_only_tokens_whose_match_nothing_behind_can_undo() -> None:
    found = boundaries(
        AddedToken("<a>", normalized=False),
        AddedToken("<normalized>", normalized=True),
        AddedToken("<word>", normalized=False, single_word=True),
        AddedToken("\n<b>", normalized=False),
        AddedToken("<r>", normalized=False, rstrip=True),
    )
    assert found.ids == {"<a>": 0, "<r>": 4}


def test_a_tokenizer_without_added_tokens_has_none() -> None:
    assert boundaries().cuts("a<a>b") == []


def test_the_longest_token_in_a_place_counts() -> None:
    found = boundaries(AddedToken("<a", normalized=False), AddedToken("<a>", normalized=False))
    assert found.cuts("x<a>y<az") == [Cut(4, "<a>"), Cut(7, "<a")]


def test_a_token_that_is_no_boundary_hides_one_inside_it() -> None:
    found = boundaries(AddedToken("<a>", normalized=False), AddedToken(" <a>", normalized=False))
    assert found.cuts("x <a><a>") == [Cut(8, "<a>")]


def test_special_characters_are_literal() -> None:
    assert boundaries(AddedToken("[.*]", normalized=False)).cuts("[.*] [ab]") == [Cut(4, "[.*]")]


def test_spacing_depends_on_what_comes_before_alone() -> None:
    cuts = [Cut(end, "<a>") for end in (3, 8, 11, 30)]
    assert [cut.end for cut in spaced(cuts, 8)] == [8, 30]
    for length in range(len(cuts)):
        assert spaced(cuts, 8)[: len(spaced(cuts[:length], 8))] == spaced(cuts[:length], 8)


@given(st.sets(st.text("ab<|(.", min_size=1, max_size=5), min_size=1, max_size=8), st.text("ab<|(.", max_size=40))
def test_the_longest_at_each_place(texts: set[str], text: str) -> None:
    longest_first = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    assert re.findall(longest_of(texts), text) == re.findall(longest_first, text)
