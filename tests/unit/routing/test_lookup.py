"""Asking the index: block keys of images, one lookup per block size, what tells prompts apart, the second look."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.events.types import Image
from kvsync.index.match import Match
from kvsync.routing.lookup import block_keys, holds_beginning, match_prompt, told_apart
from kvsync.tokenize.types import ImageSpan, Prompt
from tests.unit.routing.world import MODEL, Index, tokens


class TestBlockKeys:
    def test_an_image_over_several_blocks_is_in_each_of_them(self) -> None:
        assert block_keys([ImageSpan("a", 6, 7)], 4) == [
            None,
            [Image("a", 2)],
            [Image("a", -2)],
            [Image("a", -6)],
        ]

    def test_two_images_in_one_block_stand_in_order(self) -> None:
        """The second block is that of the recorded shapes: the end of one image and the beginning of another."""
        assert block_keys([ImageSpan("a", 2, 3), ImageSpan("b", 5, 3)], 4) == [
            [Image("a", 2)],
            [Image("a", -2), Image("b", 1)],
        ]

    def test_three_in_one_block_and_the_same_image_twice(self) -> None:
        spans = [ImageSpan("a", 0, 1), ImageSpan("b", 1, 1), ImageSpan("a", 3, 1)]
        assert block_keys(spans, 8) == [[Image("a", 0), Image("b", 1), Image("a", 3)]]

    def test_an_image_that_ends_with_its_block_is_not_in_the_next(self) -> None:
        assert block_keys([ImageSpan("a", 4, 4)], 4) == [None, [Image("a", 0)]]

    def test_no_image_needs_no_keys(self) -> None:
        assert block_keys([], 4) == []

    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), min_size=1, max_size=6), st.integers(1, 24))
    def test_every_block_has_exactly_the_images_that_overlap_it(self, shape: list[tuple[int, int]], size: int) -> None:
        spans, at = [], 0
        for number, (gap, length) in enumerate(shape):
            spans.append(ImageSpan(str(number), at + gap, length))
            at += gap + length
        keys = block_keys(spans, size)
        assert len(keys) == -(-at // size)
        for block, found in enumerate(keys):
            inside = range(block * size, block * size + size)
            overlapping = [s for s in spans if any(s.offset <= token < s.offset + s.length for token in inside)]
            assert (found or []) == [Image(span.identifier, span.offset - block * size) for span in overlapping]


class TestMatching:
    WITH_IMAGE = Prompt(tokens(*range(20)), 20, (ImageSpan("a", 5, 4),))

    def test_a_prompt_without_images_is_one_lookup(self) -> None:
        index = Index()
        index.sizes = {"w": 4, "v": 8}
        index.answer = lambda _: {"w": Match(4), "v": Match(8)}
        assert match_prompt(index, Prompt(tokens(1, 2), 2), MODEL) == {"w": Match(4), "v": Match(8)}
        assert [asked["block_keys"] for asked in index.asked] == [None]

    def test_every_worker_is_judged_by_its_own_block_size(self) -> None:
        index = Index()
        index.sizes = {"w": 4, "v": 8, "u": 4, "new": 0}
        answers = iter([{"w": 1, "v": 2, "u": 3, "new": 0}, {"w": 4, "v": 5, "u": 6, "new": 0}, {"new": 0, "w": 7}])
        index.answer = lambda _: {worker: Match(credit) for worker, credit in next(answers).items()}
        found = match_prompt(index, self.WITH_IMAGE, MODEL, adapter="x", cache_salt="s")
        assert {worker: match.credit for worker, match in found.items()} == {"w": 1, "u": 3, "v": 5, "new": 0}
        assert index.asked == [
            {"model": MODEL, "adapter": "x", "cache_salt": "s", "block_keys": keys}
            for keys in (
                [None, [Image("a", 1)], [Image("a", -3)]],
                [[Image("a", 5)], [Image("a", -3)]],
                None,
            )
        ]

    def test_workers_that_come_between_are_left_out(self) -> None:
        index = Index()
        index.sizes = {"w": 4}
        index.answer = lambda _: {"w": Match(4), "late": Match(16)}
        assert match_prompt(index, self.WITH_IMAGE, MODEL) == {"w": Match(4)}

    def test_no_worker_no_lookup(self) -> None:
        index = Index()
        assert match_prompt(index, self.WITH_IMAGE, MODEL) == {}
        assert index.asked == []


class TestToldApart:
    def prompt(self, *images: ImageSpan) -> Prompt:
        return Prompt(tokens(*range(12)), 12, images)

    def test_it_differs_from_the_prompt_where_images_begin_and_nowhere_else(self) -> None:
        ids = array("I", told_apart(self.prompt(ImageSpan("a", 2, 3), ImageSpan("b", 8, 4))))
        assert [place for place, token in enumerate(ids) if token != place] == [2, 8]

    def test_two_images_differ_from_the_first_one_on(self) -> None:
        one = told_apart(self.prompt(ImageSpan("a", 2, 3), ImageSpan("b", 8, 4)))
        other = told_apart(self.prompt(ImageSpan("a", 2, 3), ImageSpan("c", 8, 4)))
        assert one[:32] == other[:32]
        assert one[32:36] != other[32:36]

    def test_the_same_image_is_the_same(self) -> None:
        assert told_apart(self.prompt(ImageSpan("ä", 2, 3))) == told_apart(self.prompt(ImageSpan("ä", 2, 3)))

    def test_without_images_it_is_the_prompt(self) -> None:
        prompt = self.prompt()
        assert told_apart(prompt) is prompt.tokens


class TestHoldsBeginning:
    """Block size 4: nine tokens are the shortest prompt that says something."""

    def ask(self, index: Index, count: int = 9) -> bool | None:
        return holds_beginning(index, "w", MODEL, "x", "s", tokens(*range(count)))

    @pytest.mark.parametrize(
        ("matches", "held"),
        [
            ({"w": Match(4)}, True),
            ({"w": Match(0)}, False),
            ({"w": Match(0), "v": Match(8)}, True),
            ({"w": Match(0), "v": Match(0, 8, trust="none")}, True),
            ({"w": Match(0, trust="partial")}, None),
            ({"w": Match(0, trust="none"), "v": Match(0)}, None),
            ({"w": Match(4, trust="partial")}, True),
            ({"v": Match(0)}, None),
        ],
    )
    def test_what_is_said(self, matches: dict[str, Match], held: bool | None) -> None:
        index = Index()
        index.sizes = {"w": 4, "v": 4}
        index.answer = lambda _: matches
        assert self.ask(index) is held
        assert index.asked == [{"model": MODEL, "adapter": "x", "cache_salt": "s", "block_keys": None}]

    @pytest.mark.parametrize(("sizes", "count"), [({"w": 4}, 8), ({"w": 0}, 9), ({"v": 4}, 9)])
    def test_what_can_not_be_told_is_not_looked_up(self, sizes: dict[str, int], count: int) -> None:
        index = Index()
        index.sizes = sizes
        assert self.ask(index, count) is None
        assert index.asked == []
