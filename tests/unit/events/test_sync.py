"""The conditions of KV event sync, and its start by itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest

from kvsync.config.model import EventsSettings, RemoteTokenizerSettings, Settings, TokenizerSettings
from kvsync.discovery.model import Change, Engine
from kvsync.events.contracts import Snapshot, WorkerStatus
from kvsync.events.stream import State
from kvsync.events.sync import KVSync, KVSyncRefused, Probe, unmet_conditions, zmq_installed

ENDPOINT = "http://tokenizer:8000"


def settings(
    enabled: bool = True,
    remote: bool = True,
    endpoint: str | None = ENDPOINT,
    type: str | None = None,
    strict: bool = False,
) -> Settings:
    return Settings(
        events=EventsSettings(enabled=enabled, strict=strict, condition_interval=0.02),
        tokenizer=TokenizerSettings(
            type=type,
            remote=RemoteTokenizerSettings(enabled=remote, endpoint=endpoint, connect_timeout=0.1, timeout=0.1),
        ),
    )


# -- the conditions --------------------------------------------------------------------------------------------------


def test_all_conditions_met() -> None:
    assert unmet_conditions(settings(), zmq_installed=lambda: True) == ()


def test_the_engines_themselves_may_tokenize() -> None:
    assert unmet_conditions(settings(endpoint="engines"), zmq_installed=lambda: True) == ()


def test_the_type_remote_is_fine() -> None:
    assert unmet_conditions(settings(type="remote"), zmq_installed=lambda: True) == ()


@pytest.mark.parametrize(
    ("without", "names"),
    [
        ({"enabled": False}, ("AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED=true", "events.enabled: true")),
        ({"remote": False}, ("AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER=true", "tokenizer.remote.enabled: true")),
        ({"type": "character"}, ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "tokenizer.type", "'character'")),
        (
            {"endpoint": None},
            ("AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT", "tokenizer.remote.endpoint", "engines"),
        ),
    ],
)
def test_each_condition_names_its_variable_its_field_and_its_mend(
    without: dict[str, Any], names: tuple[str, ...]
) -> None:
    (sentence,) = unmet_conditions(settings(**without), zmq_installed=lambda: True)
    for name in names:
        assert name in sentence


def test_missing_zmq_is_a_condition() -> None:
    (sentence,) = unmet_conditions(settings(), zmq_installed=lambda: False)
    assert sentence == "KV event sync requires ZMQ support (pip install 'kvsync[zmq]', or '.[zmq]' in its checkout)"


def test_all_that_is_unmet_is_named_at_once() -> None:
    bare = Settings(tokenizer=TokenizerSettings(type="tiktoken"))
    assert len(unmet_conditions(bare, zmq_installed=lambda: False)) == 5


def test_nothing_of_this_needs_zmq_to_be_imported() -> None:
    program = (
        "import sys; sys.modules['zmq'] = None\n"
        "import kvsync.events.manager, kvsync.events.sources, kvsync.events.sync as sync, kvsync.cli.watch\n"
        "print(sync.zmq_installed())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_zmq_is_found_where_it_is() -> None:
    assert zmq_installed()


# -- starting by itself ----------------------------------------------------------------------------------------------


STATUS = WorkerStatus("a", "a", "a", 0, State.LIVE, True, None, None, None, False, None)


class FakeManager:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.failed = False
        self.asleep: Collection[str] = ()
        self.fail_to_start: Exception | None = None

    async def start(self) -> None:
        if self.fail_to_start is not None:
            raise self.fail_to_start
        self.calls.append("start")

    async def stop(self) -> None:
        self.calls.append("stop")

    async def add(self, engine: Engine) -> None:
        self.calls.append(("add", engine.uid))

    async def change(self, engine: Engine) -> None:
        self.calls.append(("change", engine.uid))

    async def remove(self, uid: str) -> None:
        self.calls.append(("remove", uid))

    def served(self, worker: str) -> None:
        self.calls.append(("served", worker))

    def resync(self, worker: str) -> None:
        self.calls.append(("resync", worker))

    def workers(self) -> list[WorkerStatus]:
        return [STATUS]

    async def snapshot(self, worker: str) -> Snapshot | None:
        return None


class Rig:
    def __init__(self, first: Settings, probe: Probe | None = None) -> None:
        self.managers: list[FakeManager] = []
        self.made_with: list[EventsSettings] = []
        self.problem: str | None = None
        self.start_error: Exception | None = None
        self.sync = KVSync(first, self._make, probe or self._probe, zmq_installed=lambda: True)

    def _make(self, events: EventsSettings) -> FakeManager:
        manager = FakeManager()
        manager.fail_to_start = self.start_error
        self.managers.append(manager)
        self.made_with.append(events)
        return manager

    async def _probe(self, now: Settings) -> str | None:
        return self.problem

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, self.sync.status()
            await asyncio.sleep(0.002)


def engine(uid: str) -> Engine:
    return Engine(uid=uid, name=uid, url="http://e:1", model="m")


async def test_it_starts_when_everything_holds_and_knows_the_engines_told_before() -> None:
    rig = Rig(settings())
    await rig.sync.apply(Change("added", engine("a")))
    await rig.sync.start()
    assert rig.sync.status().state == "running"
    await rig.sync.apply(Change("added", engine("b")))
    await rig.sync.apply(Change("changed", engine("b")))
    await rig.sync.apply(Change("gone", engine("a")))
    assert rig.managers[0].calls == ["start", ("add", "a"), ("add", "b"), ("change", "b"), ("remove", "a")]
    await rig.sync.stop()
    assert rig.managers[0].calls[-1] == "stop"
    assert rig.sync.status().state == "off"


async def test_what_streams_do_is_seen_and_told_only_while_it_runs() -> None:
    rig = Rig(settings(enabled=False))
    await rig.sync.start()
    rig.sync.served("a")
    rig.sync.resync("a")
    assert rig.sync.workers() == []
    await rig.sync.update(settings())
    rig.sync.served("a")
    rig.sync.resync("a")
    rig.managers[0].asleep = {"a"}
    assert rig.sync.workers() == [STATUS]
    assert set(rig.sync.asleep()) == {"a"}
    assert rig.managers[0].calls == ["start", ("served", "a"), ("resync", "a")]
    await rig.sync.update(settings(enabled=False))
    assert not rig.sync.asleep(), "nobody looks any more, so nobody is passed over for what was seen last"
    await rig.sync.stop()


async def test_not_asked_for_is_off_and_no_refusal() -> None:
    rig = Rig(settings(enabled=False, strict=True))
    await rig.sync.start()
    assert rig.sync.status().state == "off"
    assert rig.managers == []
    await rig.sync.stop()


async def test_unmet_conditions_are_told_and_it_starts_by_itself_once_they_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(settings())
    rig.problem = "connection refused"
    await rig.sync.start()
    status = rig.sync.status()
    assert status.state == "waiting"
    (sentence,) = status.unmet
    assert "connection refused" in sentence
    assert ENDPOINT in sentence
    assert "AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT" in sentence
    assert "requests are routed without it" in caplog.text
    assert sentence in caplog.text
    rig.problem = None
    await rig.until(lambda: rig.sync.status().state == "running")
    assert caplog.text.count("requests are routed without it") == 1
    await rig.sync.stop()


async def test_strict_refuses_to_start(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(settings(remote=False, endpoint=None, strict=True))
    with pytest.raises(KVSyncRefused) as refused:
        await rig.sync.start()
    assert len(refused.value.unmet) == 2
    for sentence in refused.value.unmet:
        assert sentence in str(refused.value)
    assert rig.managers == []
    assert caplog.text == "", "the refusal says it all, and nothing is routed"


async def test_strict_goes_on_when_a_condition_fails_later_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(settings(strict=True))
    await rig.sync.start()
    await rig.sync.update(settings(remote=False, strict=True))
    assert rig.sync.status().state == "waiting"
    assert caplog.text.count("requests are routed without it") == 1
    await rig.sync.stop()


async def test_a_probe_that_hangs_is_a_tokenizer_that_does_not_answer() -> None:
    async def hang(now: Settings) -> str | None:
        await asyncio.Event().wait()
        return None

    rig = Rig(settings(), probe=hang)
    await rig.sync.start()
    assert "no answer in 0.2 s" in rig.sync.status().unmet[0]
    await rig.sync.stop()


async def test_the_tokenizer_is_not_tried_while_the_settings_forbid_sync() -> None:
    async def never(now: Settings) -> str | None:
        raise AssertionError

    rig = Rig(settings(remote=False), probe=never)
    await rig.sync.start()
    assert rig.sync.status().state == "waiting"
    await rig.sync.stop()


async def test_a_tokenizer_that_fails_later_stops_nothing() -> None:
    rig = Rig(settings())
    await rig.sync.start()
    rig.problem = "gone"
    await rig.sync.update(settings())
    assert rig.sync.status().state == "running"
    assert rig.managers[0].calls == ["start"]
    await rig.sync.stop()


async def test_turned_on_and_off_by_changed_settings() -> None:
    rig = Rig(settings(enabled=False))
    await rig.sync.apply(Change("added", engine("a")))
    await rig.sync.start()
    await rig.sync.update(settings())
    assert rig.sync.status().state == "running"
    await rig.sync.update(settings(enabled=False))
    assert rig.sync.status().state == "off"
    assert rig.managers[0].calls == ["start", ("add", "a"), "stop"]
    await rig.sync.update(settings(type="character"))
    assert rig.sync.status().state == "waiting"
    await rig.sync.update(settings())
    assert rig.managers[1].calls == ["start", ("add", "a")]
    await rig.sync.stop()


async def test_changed_timeouts_hold_once_it_was_turned_off_and_on(caplog: pytest.LogCaptureFixture) -> None:
    def with_(enabled: bool, **changed: float) -> Settings:
        base = settings(enabled=enabled)
        return base.model_copy(update={"events": base.events.model_copy(update=changed)})

    rig = Rig(settings())
    await rig.sync.apply(Change("added", engine("a")))
    await rig.sync.start()
    patient = with_(True, replay_timeout=7.0, heartbeat_timeout=70.0, condition_interval=0.03)
    await rig.sync.update(patient)
    assert rig.managers[0].calls == ["start", ("add", "a")], "the stream stays as it is"
    told = "these settings hold from the next start of KV sync on (events.enabled off and on): "
    assert caplog.messages == [told + "events.heartbeat_timeout, events.replay_timeout"]
    await rig.sync.update(patient)
    assert len(caplog.messages) == 1, "once"
    await rig.sync.update(with_(False, replay_timeout=7.0))
    await rig.sync.update(with_(True, replay_timeout=8.0))
    assert [made.replay_timeout for made in rig.made_with] == [1.0, 8.0]
    assert rig.managers[1].calls == ["start", ("add", "a")]
    assert len(caplog.messages) == 1
    await rig.sync.stop()


async def test_a_check_that_was_overtaken_by_newer_settings_starts_nothing() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(now: Settings) -> str | None:
        asked.set()
        await answer.wait()
        return None

    rig = Rig(settings(enabled=False), probe=slow)
    await rig.sync.start()
    overtaken = asyncio.create_task(rig.sync.update(settings()))
    await asyncio.wait_for(asked.wait(), 10)
    await rig.sync.update(settings(enabled=False))
    answer.set()
    await overtaken
    assert rig.managers == []
    assert rig.sync.status().state == "off"
    await rig.sync.stop()


async def test_engines_that_come_and_go_while_it_is_off_are_known_when_it_is_on() -> None:
    rig = Rig(settings())
    await rig.sync.start()
    await rig.sync.apply(Change("added", engine("a")))
    await rig.sync.update(settings(enabled=False))
    await rig.sync.apply(Change("gone", engine("a")))
    await rig.sync.apply(Change("added", engine("b")))
    await rig.sync.update(settings())
    assert rig.managers[1].calls == ["start", ("add", "b")]
    await rig.sync.stop()


@pytest.mark.faults
async def test_a_storm_of_changes_and_switches_ends_as_the_last_word_says() -> None:
    """(K5) Whatever overlaps: each change is one step, and none is lost."""
    rig = Rig(settings())
    await rig.sync.start()
    steps = []
    for n in range(50):
        steps.append(rig.sync.apply(Change("gone" if n % 2 else "added", engine("a"))))
        steps.append(rig.sync.update(settings(enabled=n % 3 != 0)))
    steps += [rig.sync.apply(Change("added", engine("a"))), rig.sync.update(settings())]
    await asyncio.gather(*steps)
    assert rig.sync.status().state == "running"
    assert [call for call in rig.managers[-1].calls if call[0] in ("add", "remove")][-1] == ("add", "a")
    for ended in rig.managers[:-1]:
        assert ended.calls[-1] == "stop"
    await rig.sync.stop()


async def test_a_manager_that_failed_is_replaced() -> None:
    rig = Rig(settings())
    await rig.sync.apply(Change("added", engine("a")))
    await rig.sync.start()
    rig.managers[0].failed = True
    await rig.until(lambda: len(rig.managers) == 2 and rig.sync.status().state == "running")
    await rig.until(lambda: rig.managers[1].calls == ["start", ("add", "a")])
    assert rig.managers[0].calls[-1] == "stop"
    await rig.sync.stop()


async def test_a_manager_that_can_not_start_is_tried_again() -> None:
    rig = Rig(settings())
    rig.start_error = OSError("Too many open files")
    await rig.sync.start()
    assert "Too many open files" in rig.sync.status().unmet[0]
    rig.start_error = None
    await rig.until(lambda: rig.sync.status().state == "running")
    await rig.sync.stop()
