"""Pods' verdicts as changes of the fleet: one address is one engine's, whatever was told of whom and when."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from kvsync.discovery.kubernetes.fleet import PodFleet
from kvsync.discovery.kubernetes.pods import Verdict
from kvsync.discovery.model import Change, Engine


def seen(name: str, ip: int = 1, *, uid: str = "", started: int = 0, ending: bool = False, **fields: object) -> Verdict:
    uid = uid or f"uid-{name}"
    engine = Engine(
        uid=f"n/{name}@{uid}", name=f"n/{name}", url=f"http://10.0.0.{ip}:8000", model="m", ready=not ending
    )
    claim = (not ending, f"{started:04}", "")
    return Verdict(("n", name), uid, replace(engine, **fields), claim=claim)  # type: ignore[arg-type]


def refused(name: str, *, uid: str = "") -> Verdict:
    return Verdict(("n", name), uid or f"uid-{name}", None, "no_address", "its status has no podIP")


def steps(changes: list[Change]) -> list[tuple[str, str]]:
    return [(change.kind, change.engine.name.removeprefix("n/")) for change in changes]


def test_coming_changing_and_going() -> None:
    fleet = PodFleet()
    assert steps(fleet.update([], [seen("a"), seen("b", 2), refused("c")])) == [("added", "a"), ("added", "b")]
    assert fleet.update([], [seen("a")]) == []
    assert steps(fleet.update([], [seen("a", kv_events=False, adapters=("x",))])) == [("changed", "a")]
    assert steps(fleet.update([], [refused("a")])) == [("gone", "a")]
    assert fleet.counts() == {"ready": 1, "no_address": 2}
    assert steps(fleet.update([seen("b", 2)], [seen("a", 3)])) == [("gone", "b"), ("added", "a")]
    assert fleet.update([seen("b", 2)], []) == []


def test_a_pod_of_the_same_name_is_another_engine() -> None:
    """(K5) The old one is gone before the new one comes, told or not."""
    fleet = PodFleet()
    fleet.update([], [seen("a")])
    changes = fleet.update([], [seen("a", uid="other")])
    assert steps(changes) == [("gone", "a"), ("added", "a")]
    assert [change.engine.uid for change in changes] == ["n/a@uid-a", "n/a@other"]
    assert fleet.update([seen("a")], []) == []  # told late


def test_another_address_model_or_number_of_ranks_is_another_engine() -> None:
    fleet = PodFleet()
    fleet.update([], [seen("a")])
    for other in (seen("a", 2), seen("a", 2, model="n"), seen("a", 2, model="n", data_parallel_size=2)):
        assert steps(fleet.update([], [other])) == [("gone", "a"), ("added", "a")]


def test_an_address_has_one_owner() -> None:
    """(K2) The pod that was started later has it, one that is about to end never has it beside another, and who lost it
    gets it back."""
    fleet = PodFleet()
    fleet.update([], [seen("old", started=1)])
    assert steps(fleet.update([], [seen("new", started=2)])) == [("gone", "old"), ("added", "new")]
    assert fleet.counts() == {"ready": 1, "address_taken": 1}
    (loser,) = (verdict for verdict in fleet.pods if verdict.engine is None)
    assert loser.detail == "its address is that of n/new, which was started later"
    assert fleet.update([], [seen("old", started=1, adapters=("x",))]) == []
    assert steps(fleet.update([], [seen("new", started=2, ending=True)])) == [("gone", "new"), ("added", "old")]
    assert fleet.engines[0].adapters == ("x",)
    assert steps(fleet.update([seen("old", started=1)], [])) == [("gone", "old"), ("added", "new")]
    assert steps(fleet.update([], [seen("new", 9, started=2)])) == [("gone", "new"), ("added", "new")]


def test_addresses_that_are_exchanged() -> None:
    fleet = PodFleet()
    fleet.update([], [seen("a", 1), seen("b", 2)])
    changes = fleet.update([], [seen("a", 2), seen("b", 1)])
    assert steps(changes) == [("gone", "a"), ("gone", "b"), ("added", "a"), ("added", "b")]


def test_the_order_of_news_does_not_matter() -> None:
    news = [seen("a", started=1), seen("b", started=3), seen("c", started=2), seen("d", started=9, ending=True)]
    for order in permutations(news):
        fleet = PodFleet()
        for each in order:
            fleet.update([], [each])
        assert [engine.name for engine in fleet.engines] == ["n/b"]


def test_pods_that_come_and_go_leave_nothing() -> None:
    """(L2) Whatever their names, addresses and fates were."""
    fleet = PodFleet()
    for turn in range(1000):
        came = [
            seen(f"p{turn}", turn % 200, uid=f"u{turn}"),
            seen("same", turn % 7, uid=f"s{turn}"),
            refused(f"r{turn}"),
        ]
        fleet.update([], came)
        fleet.update(came if turn % 2 else [came[0], refused("same", uid=f"s{turn}"), came[2]], [])
    assert fleet.engines == ()
    assert fleet.pods == ()
    assert not any(vars(fleet).values())


_pods = st.builds(
    seen,
    st.sampled_from("abc"),
    st.integers(1, 3),
    uid=st.sampled_from(["u1", "u2"]),
    started=st.integers(0, 2),
    ending=st.booleans(),
)
_news = st.lists(
    st.tuples(
        st.lists(_pods, max_size=2),
        st.lists(st.one_of(_pods, st.builds(refused, st.sampled_from("abc"), uid=st.just("u1"))), max_size=3),
    ),
    max_size=12,
)


@given(_news)
def test_changes_lead_from_one_sound_fleet_to_the_next(news: list[tuple[list[Verdict], list[Verdict]]]) -> None:
    """At every step of them: no two engines of one address, name or uid; nothing goes twice or changes what is not
    there. In the end they are what the fleet says it has."""
    fleet = PodFleet()
    there: dict[str, Engine] = {}
    for gone, came in news:
        for change in fleet.update(gone, came):
            engine = change.engine
            if change.kind == "gone":
                assert there.pop(engine.uid) is not None
                continue
            assert (engine.uid in there) == (change.kind == "changed")
            there[engine.uid] = engine
            assert len({each.url for each in there.values()}) == len(there)
            assert len({each.name for each in there.values()}) == len(there)
        assert {engine.uid: engine for engine in fleet.engines} == there
