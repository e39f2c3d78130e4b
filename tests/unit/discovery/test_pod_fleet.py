"""Pods' verdicts as changes of the fleet: one address is one engine's, whatever was told of whom and when."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

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


def test_tls_makes_no_second_engine_of_an_address() -> None:
    fleet = PodFleet()
    fleet.update([], [seen("old", started=1)])
    changes = fleet.update([], [seen("new", started=2, url="https://10.0.0.1:8000")])
    assert steps(changes) == [("gone", "old"), ("added", "new")]


def publishing(name: str, port: int = 8000, events: int = 5557, replay: int | None = 5558, **more: Any) -> Verdict:
    """A pod at the one host; ``assumed``: of its ports, those that no container names, in the host's network."""
    assumed = frozenset(more.pop("assumed", ()))
    url, streams = f"http://10.0.0.1:{port}", "tcp://10.0.0.1"
    told = None if replay is None else f"{streams}:{replay}"
    verdict = seen(name, url=url, events=f"{streams}:{events}", replay=told, **more)
    return replace(verdict, assumed=assumed)


def followed(fleet: PodFleet) -> dict[str, tuple[str | None, str | None]]:
    return {engine.name.removeprefix("n/"): _ports(engine) for engine in fleet.engines}


def _ports(engine: Engine) -> tuple[str | None, str | None]:
    assert engine.kv_events is (engine.events is not None)
    events, replay = engine.events or "", engine.replay or ""
    return events.rpartition(":")[2] or None, replay.rpartition(":")[2] or None


def test_a_port_that_events_come_from_has_one_owner() -> None:
    """An address is another pod's before the end of the one that had it is told, and that one served another port:
    requests to it fail, but its events would be the other's."""
    fleet = PodFleet()
    fleet.update([], [publishing("old", started=1)])
    changes = fleet.update([], [publishing("new", 9000, started=2)])
    assert steps(changes) == [("changed", "old"), ("added", "new")]
    assert followed(fleet) == {"old": (None, None), "new": ("5557", "5558")}
    (note,) = next(fleet.among([("n", "old")])).notes
    assert note == (
        "its port 5557 at 10.0.0.1 is that of n/new, too: its events are not followed. Give it an address or a "
        "container port kv-events of its own"
    )
    assert next(fleet.among([("n", "new")])).notes == ()
    assert steps(fleet.update([publishing("new", 9000, started=2)], [])) == [("gone", "new"), ("changed", "old")]
    assert followed(fleet) == {"old": ("5557", "5558")}


def test_ports_of_further_ranks_have_one_owner() -> None:
    fleet = PodFleet()
    ranks = publishing("ranks", events=5555, replay=None, data_parallel_size=3, started=1)
    fleet.update([], [ranks, publishing("one", 9000, 5557, 6557, started=2)])
    assert followed(fleet) == {"ranks": (None, None), "one": ("5557", "6557")}
    fleet.update([], [publishing("one", 9000, 5558, 6557, started=2)])
    assert followed(fleet) == {"ranks": ("5555", None), "one": ("5558", "6557")}


def test_in_a_nodes_network_who_names_a_port_has_it() -> None:
    """The second pod leaves its replay port to chance, and the first, which was started before it, names it."""
    fleet = PodFleet()
    fleet.update([], [publishing("one", started=1), publishing("two", 9000, 6557, started=2, assumed=["replay"])])
    assert followed(fleet) == {"one": ("5557", "5558"), "two": ("6557", None)}
    (note,) = next(fleet.among([("n", "two")])).notes
    assert "port 5558 at 10.0.0.1 is that of n/one, too: replay is asked of the engine instead" in note


def test_in_a_nodes_network_nobody_has_what_none_of_two_names() -> None:
    """Which of them publishes there can't be told, so neither is credited with what the other holds."""
    fleet = PodFleet()
    chance = ["events", "replay"]
    two = publishing("two", 9000, started=2, assumed=chance)
    fleet.update([], [publishing("one", started=1, assumed=chance), two])
    assert followed(fleet) == {"one": (None, None), "two": (None, None)}
    assert "is that of another pod, too" in next(fleet.among([("n", "one")])).notes[0]
    fleet.update([], [publishing("three", 9001, started=3, assumed=chance)])
    assert followed(fleet)["three"] == (None, None)
    fleet.update([], [publishing("three", 9001, started=3)])
    assert followed(fleet) == {"one": (None, None), "two": (None, None), "three": ("5557", "5558")}
    fleet.update([publishing("three", 9001, started=3), two], [])
    assert followed(fleet) == {"one": ("5557", "5558")}
    late = publishing("late", started=9, assumed=chance)  # has one's address, so that one is no engine any more
    fleet.update([], [late])
    assert followed(fleet) == {"late": ("5557", "5558")}


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


_pods = st.one_of(
    st.builds(
        seen,
        st.sampled_from("abc"),
        st.integers(1, 3),
        uid=st.sampled_from(["u1", "u2"]),
        started=st.integers(0, 2),
        ending=st.booleans(),
    ),
    st.builds(
        publishing,
        st.sampled_from("abc"),
        st.integers(8000, 8002),
        st.integers(5557, 5559),
        st.sampled_from([None, 5558, 6557]),
        started=st.integers(0, 2),
        data_parallel_size=st.integers(1, 2),
        assumed=st.sets(st.sampled_from(["events", "replay"])),
    ),
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
    """At every step of them: no two engines of one address, name or uid, nor of one port that events or replays come
    from; nothing goes twice or changes what is not there. In the end they are what the fleet says it has."""
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
        events = [port for each in there.values() if each.events for port in _all(each, each.events)]
        replays = [port for each in there.values() if each.replay for port in _all(each, each.replay)]
        assert len(set(events)) == len(events)
        assert len(set(replays)) == len(replays)
        assert {engine.uid: engine for engine in fleet.engines} == there


def _all(engine: Engine, endpoint: str) -> list[int]:
    return [int(endpoint.rpartition(":")[2]) + rank for rank in engine.ranks]
