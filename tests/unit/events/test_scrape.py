"""What a page of metrics says, hostile ones included, and what is new since the last."""

from __future__ import annotations

import time

import pytest

from kvsync.events.pages import MAX_SAMPLES, samples
from kvsync.events.scrape import EngineMetrics, Page, RankMetrics, parse_page

PAGE = b"""# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79595528515e+09
# HELP vllm:engine_sleep_state Engine sleep state; awake = 0 means engine is sleeping.
# TYPE vllm:engine_sleep_state gauge
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} 0.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="discard_all"} 0.0
vllm:engine_sleep_state{engine="1",model_name="tiny",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="1",model_name="tiny",sleep_state="weights_offloaded"} 1.0
vllm:engine_sleep_state{engine="1",model_name="tiny",sleep_state="discard_all"} 0.0
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1200.0
vllm:prefix_cache_queries_total{engine="1",model_name="tiny"} 7.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7959552853e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 960.0
vllm:prefix_cache_hits_total{engine="1",model_name="tiny"} 0.0
"""


def test_a_page_as_vllm_writes_it() -> None:
    page = parse_page(PAGE)
    assert page.started == 1.79595528515e9
    assert page.asleep == {0: False, 1: True}
    assert page.counted == {0: (1200, 960), 1: (7, 0)}
    assert page.since(None) == EngineMetrics({0: RankMetrics(asleep=False), 1: RankMetrics(asleep=True)}, False)


def test_the_news_are_what_was_counted_since() -> None:
    later = PAGE.replace(b"1200.0", b"1500.0").replace(b"960.0", b"1000.0")
    assert parse_page(later).since(parse_page(PAGE)) == EngineMetrics(
        {0: RankMetrics(False, queries=300, hits=40), 1: RankMetrics(True)}, restarted=False
    )


@pytest.mark.parametrize(
    ("old", "new"), [(b"1.79595528515e+09", b"1.79595528615e+09"), (b"1200.0", b"3.0"), (b"960.0", b"1.0")]
)
def test_another_start_and_counters_that_go_back_hint_at_a_restart(old: bytes, new: bytes) -> None:
    news = parse_page(PAGE.replace(old, new)).since(parse_page(PAGE))
    assert news.restarted
    assert (news.ranks[0].queries, news.ranks[0].hits) == (0, 0)


def test_a_page_without_any_of_it_says_nothing() -> None:
    assert parse_page(b"# nothing\nup 1\n").since(parse_page(PAGE)) == EngineMetrics({}, False)
    assert parse_page(PAGE).since(Page()).restarted is False


@pytest.mark.parametrize(
    ("states", "asleep"),
    [
        ({"awake": b"0"}, True),
        ({"awake": b"1"}, False),
        ({"discard_all": b"1"}, True),
        ({"awake": b"1", "weights_offloaded": b"1"}, True),
        ({"awake": b"0", "weights_offloaded": b"0", "discard_all": b"0"}, True),
        ({"awake": b"NaN"}, None),
        ({"awake": b"0.5"}, None),
        ({"awake": b"-1"}, None),
    ],
)
def test_sleep_in_doubt_is_sleep(states: dict[str, bytes], asleep: bool | None) -> None:
    page = b"".join(
        b'vllm:engine_sleep_state{engine="0",sleep_state="%s"} %s\n' % (state.encode(), value)
        for state, value in states.items()
    )
    assert parse_page(page).asleep.get(0) is asleep


HITS = b"vllm:prefix_cache_hits_total"


@pytest.mark.parametrize(
    "line",
    [
        HITS,
        HITS + b"{",
        HITS + b"{engine=",
        HITS + b'{engine="0"',
        HITS + b'{engine="0"} ',
        HITS + b'{engine="0"} nonsense',
        HITS + b'{engine="0"} +Inf',
        HITS + b'{engine="0"} NaN',
        HITS + b'{engine="0"} -3',
        HITS + b'{engine="0"} 1e300',
        HITS + b'{engine="0"}' + b" " * 100_000 + b"5",
        HITS + b'{engine="0"} ' + b"9" * 100_000,
        HITS + b'{engine="-1"} 5',
        HITS + b'{engine="99999999"} 5',
        HITS + b'{engine="\xff\xfe"} 5',
        HITS + '{engine="²"} 5'.encode(),
        HITS + b'{x="' + b"\\" * 50_001 + b'",engine="0"} 5',
        HITS + b'{engine="0"}5',
        HITS + b'_more{engine="0"} 5',
        b" " + HITS + b'{engine="0"} 5',
    ],
    ids=range(20),
)
def test_what_makes_no_sense_is_left_out(line: bytes) -> None:
    page = parse_page(b"up 1\n" + line + b"\n" + PAGE.replace(HITS, b"other"))
    assert page.counted == {}, "one counter alone says nothing"
    assert page.asleep == {0: False, 1: True}, "and the rest is read"


def test_values_may_have_a_time_behind_them_and_labels_may_hold_anything() -> None:
    line = HITS + b'{model_name="a\\"}{ 7 \\n",engine="3"} 5 1795955285098\n'
    assert list(samples(line, HITS)) == [({"model_name": 'a\\"}{ 7 \\n', "engine": "3"}, 5.0)]


def test_a_page_of_absurd_size_takes_a_bounded_time() -> None:
    line = HITS + b'{engine="0",x="' + b"y" * 100 + b'"} 1\n'
    page = line * ((16 << 20) // len(line))
    started = time.process_time()
    assert len(list(samples(page, HITS))) == MAX_SAMPLES
    parse_page(b"x" * (16 << 20))
    parse_page((b"\n" + HITS) * ((16 << 20) // (len(HITS) + 1)))
    assert time.process_time() - started < 5
