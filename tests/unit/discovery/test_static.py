"""A file's engines as changes: what counts as another engine, and what a broken file does (nothing)."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsync.config import load
from kvsync.discovery.model import Change, Engine
from kvsync.discovery.static import StaticFleet, StaticSource, engines

A = Engine(uid="a", name="a", url="http://h:1", model="m")
B = Engine(uid="b", name="b", url="http://h:2", model="m", events="tcp://h:5557")


def text(*urls: str, more: str = "") -> str:
    lines = [f"      - {{name: e{i}, url: '{url}'{more}}}" for i, url in enumerate(urls)]
    return "\n".join(["models:", "  - name: m", "    engines:", *lines, ""])


def steps(changes: list[Change]) -> list[tuple[str, str]]:
    return [(change.kind, change.engine.uid) for change in changes]


def test_settings_become_engines(tmp_path: Path) -> None:
    file = tmp_path / "kvsync.yaml"
    file.write_text(
        "models:\n"
        "  - name: m\n"
        "    engines:\n"
        "      - name: e\n"
        "        url: http://h:8000\n"
        "        events: tcp://n:5557\n"
        "        replay: tcp://n:5657\n"
        "        kv_events: false\n"
        "        adapters: [x]\n"
        "        data_parallel_size: 2\n"
        "        spec_decode: eagle\n"
        "        attention_chunk_size: 8\n"
        "        usable_blocks: 99\n"
        "        labels: {tier: gold}\n"
    )
    assert engines(load(file, {}, {})) == (
        Engine(
            uid="e",
            name="e",
            url="http://h:8000",
            model="m",
            adapters=("x",),
            data_parallel_size=2,
            kv_events=False,
            events="tcp://n:5557",
            replay="tcp://n:5657",
            spec_decode="eagle",
            attention_chunk_size=8,
            usable_blocks=99,
            labels={"tier": "gold"},
        ),
    )


def test_the_first_list_adds() -> None:
    assert steps(StaticFleet().update([A, B])) == [("added", "a"), ("added", "b")]


def test_the_same_list_changes_nothing() -> None:
    fleet = StaticFleet()
    fleet.update([A, B])
    assert fleet.update([B, A]) == []


@pytest.mark.parametrize("soft", [{"adapters": ("x",)}, {"labels": {"k": "v"}}])
def test_adapters_and_labels_change_the_engine_that_is_there(soft: dict[str, object]) -> None:
    fleet = StaticFleet()
    fleet.update([A])
    new = replace(A, **soft)  # type: ignore[arg-type]
    assert fleet.update([new]) == [Change("changed", new)]


@pytest.mark.parametrize(
    "hard",
    [
        {"url": "http://h:9"},
        {"events": "tcp://h:5557"},
        {"replay": "tcp://h:5558"},
        {"data_parallel_size": 2},
        {"model": "n"},
        {"spec_decode": "eagle"},
        {"kv_events": False},
    ],
)
def test_another_address_is_another_engine(hard: dict[str, object]) -> None:
    fleet = StaticFleet()
    fleet.update([A, B])
    assert steps(fleet.update([replace(A, **hard), B])) == [("gone", "a"), ("added", "a#life2")]  # type: ignore[arg-type]
    assert steps(fleet.update([A, B])) == [("gone", "a#life2"), ("added", "a#life3")]


def test_a_name_that_comes_back_is_a_new_life() -> None:
    fleet = StaticFleet()
    fleet.update([A])
    assert steps(fleet.update([])) == [("gone", "a")]
    assert steps(fleet.update([A])) == [("added", "a#life2")]


def test_gone_comes_before_added() -> None:
    fleet = StaticFleet()
    fleet.update([A])
    assert steps(fleet.update([replace(A, uid="c", name="c"), B])) == [("gone", "a"), ("added", "c"), ("added", "b")]


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), unique_by=lambda e: e[0]), max_size=6))
def test_the_changes_always_lead_to_the_list(lists: list[list[tuple[str, int]]]) -> None:
    fleet, known, ever = StaticFleet(), dict[str, Engine](), set[str]()
    for listed in lists:
        wanted = {Engine(uid=name, name=name, url=f"http://h:{port}", model="m").url + name for name, port in listed}
        for change in fleet.update(Engine(uid=n, name=n, url=f"http://h:{p}", model="m") for n, p in listed):
            if change.kind == "gone":
                assert known.pop(change.engine.uid) == change.engine
            else:
                assert change.engine.uid not in ever
                ever.add(change.engine.uid)
                known[change.engine.uid] = change.engine
        assert {engine.url + engine.name for engine in known.values()} == wanted


class Watched:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.changes: list[Change] = []
        self.reloads: list[str] = []
        self.came = asyncio.Event()
        self.judged = asyncio.Event()
        self.source = StaticSource(
            file, {}, {}, load(file, {}, {}), self._deliver, reloaded=self._reloaded, interval=0.01, settle=0
        )

    def _reloaded(self, result: str) -> None:
        self.reloads.append(result)
        self.judged.set()

    def _deliver(self, change: Change) -> None:
        self.changes.append(change)
        self.came.set()

    def take(self) -> list[tuple[str, str]]:
        taken, self.changes = steps(self.changes), []
        return taken


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    file = tmp_path / "kvsync.yaml"
    file.write_text(text("http://h:1"))
    return Watched(file)


async def test_a_changed_file_changes_the_fleet(watched: Watched) -> None:
    watched.source.start()
    assert watched.take() == [("added", "e0")]
    await watched.source.check()
    assert (watched.take(), watched.reloads) == ([], ["unchanged"])
    watched.file.write_text(text("http://h:1", "http://h:2"))
    await watched.source.check()
    await watched.source.check()
    assert (watched.take(), watched.reloads) == ([("added", "e1")], ["unchanged", "applied"])


async def test_a_broken_file_keeps_the_fleet_and_is_told_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.source.start()
    await watched.source.check()
    watched.take()
    watched.file.write_text(text("ftp://h:1", more=", adaptors: [x]"))
    with caplog.at_level(logging.ERROR, "kvsync.discovery"):
        await watched.source.check()
        await watched.source.check()
    assert watched.take() == []
    assert watched.reloads == ["unchanged", "broken"]
    (record,) = caplog.records
    assert "does not begin with http" in record.getMessage()
    assert "was 'adapters' meant?" in record.getMessage()
    watched.file.write_text(text("http://h:3"))
    await watched.source.check()
    assert watched.take() == [("gone", "e0"), ("added", "e0#life2")]


@pytest.mark.parametrize("content", ["", "\n# comment\n", "gateway: {port: 1}\n", "models:\n"])
async def test_a_file_that_stays_empty_keeps_the_fleet(
    watched: Watched, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """A disk that is full leaves it so: cut, and not written again."""
    watched.source.start()
    watched.take()
    watched.file.write_text(content)
    with caplog.at_level(logging.ERROR, "kvsync.discovery"):
        await watched.source.check()
        await watched.source.check()
    assert (watched.take(), watched.reloads) == ([], ["broken"])
    assert "`models: []` takes all engines out" in caplog.text
    watched.file.write_text("models: []\n")
    await watched.source.check()
    assert watched.take() == [("gone", "e0")]
    watched.file.write_text(content)
    await watched.source.check()
    assert watched.reloads == ["broken", "applied", "unchanged"], "there is nothing left to lose"


async def test_a_file_that_vanishes_keeps_the_fleet(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.source.start()
    watched.take()
    watched.file.unlink()
    with caplog.at_level(logging.ERROR, "kvsync.discovery"):
        await watched.source.check()
        await watched.source.check()
    assert (watched.take(), watched.reloads) == ([], ["broken"])
    assert len(caplog.records) == 1


async def test_a_file_that_is_no_file_keeps_the_fleet(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe would be waited for, and gives its content once; a device may never end."""
    watched.source.start()
    await watched.source.check()
    watched.take()
    folder = watched.file.parent / "folder"
    folder.mkdir()
    os.mkfifo(watched.file.parent / "pipe")
    for other in ("pipe", "folder", "/dev/zero"):
        watched.file.unlink()
        watched.file.symlink_to(watched.file.parent / other)
        async with asyncio.timeout(5):
            await watched.source.check()
    assert (watched.take(), watched.reloads) == ([], ["unchanged", "broken", "broken", "broken"])
    assert caplog.text.count("is no regular file") == 2


async def test_a_file_that_is_too_large_is_not_read_to_its_end(watched: Watched) -> None:
    watched.source.start()
    await watched.source.check()
    watched.take()
    os.truncate(watched.file, 1 << 40)
    async with asyncio.timeout(5):
        await watched.source.check()
    assert (watched.take(), watched.reloads) == ([], ["unchanged", "broken"])


@pytest.mark.parametrize("written", ["", "models:\n", text("http://h:1")])
async def test_a_file_that_is_being_written_is_not_believed(
    watched: Watched, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = text("http://h:1", "http://h:2")
    watched.file.write_text(whole)
    await watched.source.check()
    watched.take()
    watched.file.write_text(written)
    with monkeypatch.context() as patched:

        async def meanwhile(_: float) -> None:
            watched.file.write_text(whole + "# and more\n")

        patched.setattr(asyncio, "sleep", meanwhile)
        await watched.source.check()
    assert watched.take() == []
    await watched.source.check()
    assert watched.take() == []
    assert watched.reloads[-1] == "unchanged"


async def test_a_file_replaced_by_one_of_equal_size_and_time_is_seen(watched: Watched) -> None:
    watched.source.start()
    await watched.source.check()
    watched.take()
    stat = watched.file.stat()
    watched.file.write_text(text("http://h:7"))
    os.utime(watched.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert watched.file.stat().st_size == stat.st_size
    await watched.source.check()
    assert watched.take() == [("gone", "e0"), ("added", "e0#life2")]


async def test_settings_that_need_a_restart_are_named(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.source.start()
    watched.file.write_text("gateway: {port: 9}\n" + text("http://h:1"))
    with caplog.at_level(logging.WARNING, "kvsync.discovery"):
        await watched.source.check()
    assert "next start only: gateway.port" in caplog.text
    assert watched.source.settings.gateway.port == 9


async def test_run_sees_a_change_and_a_trigger_judges_the_same_file_again(watched: Watched) -> None:
    watched.source.start()
    watched.came.clear()
    task = asyncio.create_task(watched.source.run())
    try:
        watched.file.write_text(text("http://h:2"))
        async with asyncio.timeout(10):
            await watched.came.wait()
            watched.judged.clear()
            watched.source.trigger()
            await watched.judged.wait()
        assert watched.reloads[-1] == "unchanged"
    finally:
        task.cancel()


async def test_without_a_file_nothing_is_looked_at() -> None:
    changes: list[Change] = []
    source = StaticSource(None, {}, {}, load(None, {}, {}), changes.append)
    source.start()
    await source.check()
    assert changes == []


def test_names_that_come_and_go_for_ever_are_forgotten_those_that_are_listed_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(L2) Of a fleet whose engines never have the same name twice, a bounded number of names stays."""
    monkeypatch.setattr("kvsync.discovery.static._NAMES", 10)
    fleet = StaticFleet()
    for turn in range(100):
        fleet.update([A, replace(A, uid=f"e{turn}", name=f"e{turn}", url=f"http://h:{turn + 2}")])
    assert len(fleet._lives) <= 10
    # Listed all the time: another process at another address is another life of it.
    assert steps(fleet.update([replace(A, url="http://h:500")])) == [
        ("gone", "a"),
        ("gone", "e99"),
        ("added", "a#life2"),
    ]
