"""The arithmetic of fleets, the page that it is shown on, and what the scale test stores."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from bench.fleet import BUSY, Demand, lines, plan
from bench.scale import page
from bench.scale.content import FAMILIES, LONG, LONGS, MIDDLE, PREFIX, SHORT, Fleet, Prompt, payloads
from bench.scale.costs import Costs, between, latest, load
from bench.work import BLOCK

from kvsync.events.decode import decode_batch
from kvsync.events.types import BlockStoredEvent

MS = 1e-3
US = 1e-6


def held(workers: int, millions: int, choice: float) -> dict[str, Any]:
    """A choice takes so long for 1,000 tokens, and twice as long for 2,000."""
    choices = [{"tokens": tokens, "cpu": {"p50": choice * tokens / 1_000}} for tokens in (1_000, 2_000)]
    return {
        "workers": workers,
        "millions": millions,
        "blocks": millions * 10**6,
        "process": 50e6,
        "bytes_per_block": 40.0,
        "choices": choices,
    }


def followed(workers: int, millions: int, per_block: float) -> dict[str, Any]:
    return {
        "workers": workers,
        "millions": millions,
        "cpu_per_block": per_block,
        "idle_cpu": workers * 1e-4,
        "memory_of_streams": workers * 50_000,
        "wire_bytes_per_block": 150.0,
    }


def costs(request_cpu: float | None = 100 * US) -> Costs:
    return Costs(
        {
            "request_cpu": request_cpu,
            "held": [held(100, 5, 0.1 * MS), held(1_000, 5, 1 * MS), held(1_000, 20, 9 * MS)],
            "followed": [followed(100, 5, 5 * US), followed(1_000, 5, 10 * US), followed(1_000, 20, 90 * US)],
        }
    )


@pytest.mark.parametrize(
    ("at", "value"), [(0, 0.0), (10, 10.0), (15, 20.0), (20, 30.0), (30, 40.0), (40, 50.0), (-90, 0.0)]
)
def test_between_and_beyond_points_are_straight_lines(at: float, value: float) -> None:
    assert between([(20, 30.0), (10, 10.0), (30, 40.0)], at) == pytest.approx(value)


def test_one_point_is_all_that_is_known() -> None:
    assert between([(10, 7.0)], 1_000) == 7.0


def test_what_costs_by_workers_is_taken_at_one_size_of_the_index() -> None:
    assert costs().of_event(1_000) == pytest.approx(10 * US)
    assert costs().of_event(550) == pytest.approx(7.5 * US)
    assert costs().of_choice(550, 1_500) == pytest.approx(0.55 * 1.5 * MS)


def test_a_request_costs_what_it_does_beyond_the_one_measured() -> None:
    one = costs()
    assert one.of_request(64, 512) == pytest.approx(100 * US)
    assert one.of_request(64, 2_000) == pytest.approx(100 * US + one.of_choice(64, 2_000) - one.of_choice(64, 512))
    assert costs(None).of_request(64, 512) is None
    assert costs(None).of_request(64, 512, cpu=70 * US) == pytest.approx(70 * US)


def test_a_small_fleet_is_one_shard_with_a_spare_replica() -> None:
    made = plan(Demand(100, 10_000, 100.0, 10.0, 1_000), costs())
    assert (made.shards, made.replicas, made.processes) == (1, 2, 2)
    assert made.event_cores == pytest.approx(100 * 1e-4 + 100 * 100 * 5 * US)
    assert made.memory == pytest.approx(50e6 + 100 * (10_000 * 40 + 50_000))
    assert made.wire == pytest.approx(100 * 150 * 2)
    assert made.request_cores == pytest.approx(10 * (costs().of_request(100, 1_000) or math.nan) / 2)


def test_requests_make_replicas_and_events_make_shards() -> None:
    many = plan(Demand(100, 10_000, 100.0, 10_000.0, 1_000), costs())
    assert many.shards == 1
    assert many.replicas == math.ceil(10_000 * (costs().of_request(100, 1_000) or math.nan) / BUSY) + 1
    busy = plan(Demand(1_000, 10_000, 200.0, 10.0, 1_000), costs())
    engines = math.ceil(1_000 / busy.shards)
    assert busy.shards > 1
    assert busy.event_cores <= BUSY < 1_000 * 1e-4 + 1_000 * 200 * 10 * US
    assert busy.event_cores == pytest.approx(engines * 1e-4 + engines * 200 * costs().of_event(engines))


def test_memory_makes_shards_as_well() -> None:
    demand = Demand(100, 1_000_000, 1.0, 1.0, 1_000)
    assert plan(demand, costs()).shards == 1
    assert plan(demand, costs(), memory=2.1e9).shards == 2


def test_what_can_not_be_served_is_said() -> None:
    with pytest.raises(ValueError, match="one engine alone"):
        plan(Demand(3, 1_000, 1e9, 1.0, 1_000), costs())
    with pytest.raises(ValueError, match="--request-cpu"):
        plan(Demand(3, 1_000, 1.0, 1.0, 1_000), costs(None))


def test_a_plan_is_told_with_its_shards() -> None:
    demand = Demand(1_000, 10_000, 200.0, 10.0, 1_000)
    made = plan(demand, costs())
    told = "\n".join(lines(demand, made))
    assert told.startswith(f"{made.shards} shards of {math.ceil(1_000 / made.shards)} engines")
    assert f"{made.processes} processes" in told


def test_the_page_is_what_its_document_gives() -> None:
    path = latest()
    assert path is not None
    assert page.PAGE.read_text(encoding="utf-8") == page.render(load(path), path.name), "python -m bench.scale.page"


def test_a_prompt_is_stored_with_the_tokens_that_it_has() -> None:
    prompt = Prompt(number=7, worker=3, blocks=SHORT)
    events = []
    for worker, body in payloads([prompt]):
        assert worker == 3
        (event,) = decode_batch(body).events
        assert isinstance(event, BlockStoredEvent)
        events.append(event)
    told = array("I", b"".join(b"".join(event.token_ids) for event in events))
    told.byteswap()
    assert told == prompt.tokens()[:-1]
    hashes = [hash_ for event in events for hash_ in event.block_hashes]
    assert len(set(hashes)) == SHORT
    parents = [None, *(event.block_hashes[-1] for event in events)]
    assert [event.parent_block_hash for event in events] == parents[:-1]


def test_prompts_of_two_numbers_share_their_system_prompt_and_nothing_else() -> None:
    one, same, other = (Prompt(number, 0, SHORT).tokens() for number in (1, 1 + FAMILIES, 2))
    assert one[: PREFIX * BLOCK] == same[: PREFIX * BLOCK] != other[: PREFIX * BLOCK]
    assert one[PREFIX * BLOCK : (PREFIX + 1) * BLOCK] != same[PREFIX * BLOCK : (PREFIX + 1) * BLOCK]


def test_a_fleet_holds_the_blocks_that_it_should() -> None:
    fleet = Fleet(workers=10, blocks=2 * LONG * LONGS)
    prompts = list(fleet.prompts())
    assert [prompt.blocks for prompt in prompts[: LONGS + 1]] == [LONG] * LONGS + [MIDDLE]
    stored = 16 * sum(1 for _ in payloads(prompts))
    assert fleet.blocks - MIDDLE < stored <= fleet.blocks
