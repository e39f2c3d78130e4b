"""What engines say of their streams, and what is made of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvsync.config.addresses import Address
from kvsync.discovery.model import Engine
from kvsync.events.contracts import NotLocated
from kvsync.events.sources import (
    BadAnswer,
    CacheFacts,
    RankSource,
    endpoints,
    parse_cache_facts,
    parse_sources,
)

DATA = Path(__file__).parents[2] / "data" / "vllm"


def engine(**facts: Any) -> Engine:
    return Engine(**({"uid": "e", "name": "e", "url": "http://10.0.0.7:8000", "model": "m"} | facts))


def tcp(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return Address("tcp", host, int(port))


def test_the_answer_of_a_real_engine() -> None:
    samples = json.loads((DATA / "http_samples_v0.32.json").read_text())
    body = next(s["response"] for s in samples if s["path"] == "/kv_event_sources")
    found = parse_sources(json.dumps(body).encode())
    assert found[0] == RankSource(5557, 6557)


def test_the_metrics_page_of_a_real_engine() -> None:
    assert parse_cache_facts((DATA / "metrics_v0.32.txt").read_bytes()) == {0: CacheFacts(63, None)}


def entry(**other: Any) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:6557",
        "buffer_steps": 10_000,
        "topic": "",
    } | other


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({}, {}),
        ({"0": entry(), "1": entry(endpoint="tcp://*:5558", replay_endpoint=None)}, {0: (5557, 6557), 1: (5558, None)}),
        ({"0": entry(endpoint="tcp://[::]:5557")}, {0: (5557, 6557)}),
        ({"0": entry(enable_kv_cache_events=False)}, {0: (None, None)}),
        ({"0": entry(publisher="null")}, {0: (None, None)}),
    ],
)
def test_sources(answer: Any, found: Any) -> None:
    assert parse_sources(json.dumps(answer).encode()) == {r: RankSource(*ports) for r, ports in found.items()}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"[" * 100_000,
        json.dumps({"x": entry()}).encode(),
        json.dumps({"-1": entry()}).encode(),
        json.dumps({"99999": entry()}).encode(),
        json.dumps({"0": []}).encode(),
        json.dumps({"0": entry(endpoint="ipc:///run/x")}).encode(),
        json.dumps({"0": entry(endpoint="tcp://*")}).encode(),
        json.dumps({"0": entry(endpoint="tcp://*:0")}).encode(),
        json.dumps({"0": entry(endpoint="tcp://*:65536")}).encode(),
        json.dumps({"0": entry(endpoint="tcp://*:٣")}).encode(),
        json.dumps({"0": entry(endpoint=5557)}).encode(),
        json.dumps({"0": entry(replay_endpoint={"a": 1})}).encode(),
    ],
)
def test_answers_that_are_none(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        parse_sources(body)


def info(**labels: str) -> bytes:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return b"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{" + inside.encode() + b"} 1.0\n"


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (b"", {}),
        (b"\xff\xfe{}", {}),
        (b"vllm:cache_config_info{", {}),
        (b'vllm:cache_config_info{num_gpu_blocks="6\xff"} 1', {0: CacheFacts(None, None)}),
        (info(num_gpu_blocks="64"), {0: CacheFacts(63, None)}),
        (info(num_gpu_blocks="64", engine="1", cache_hit_alignment_tokens="32"), {1: CacheFacts(63, 32)}),
        (info(num_gpu_blocks="None", engine="0"), {0: CacheFacts(None, None)}),
        (info(num_gpu_blocks="1"), {0: CacheFacts(None, None)}),
        (info(num_gpu_blocks="-5"), {0: CacheFacts(None, None)}),
        (info(num_gpu_blocks="9" * 50), {0: CacheFacts(None, None)}),
        (info(num_gpu_blocks="64", engine="x"), {}),
        (
            info(num_gpu_blocks="64", engine="0") + info(num_gpu_blocks="32", engine="1"),
            {0: CacheFacts(63, None), 1: CacheFacts(31, None)},
        ),
    ],
)
def test_cache_facts(page: bytes, found: Any) -> None:
    assert parse_cache_facts(page) == found


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (b'vllm:cache_config_info{a="x\\",num_gpu_blocks=\\"9",num_gpu_blocks="64"} 1', {0: CacheFacts(63, None)}),
        (b'vllm:cache_config_info{a="\\\\",num_gpu_blocks="64"} 1', {0: CacheFacts(63, None)}),
        (b'vllm:cache_config_info{a="}",num_gpu_blocks="64",} 1', {0: CacheFacts(63, None)}),
        (b'vllm:cache_config_info{a="\xff",num_gpu_blocks="64"} 1', {0: CacheFacts(63, None)}),
        (b"vllm:cache_config_info{} 1", {0: CacheFacts(None, None)}),
        (b'vllm:cache_config_info{num_gpu_blocks="64"', {}),
        (b'vllm:cache_config_info{num_gpu_blocks="64"x="1"} 1', {}),
        (b"vllm:cache_config_info{num_gpu_blocks=64} 1", {}),
        (b'x_vllm:cache_config_info{num_gpu_blocks="64"} 1', {}),
        (b'vllm:cache_config_info_x{num_gpu_blocks="64"} 1', {}),
        (
            b'vllm:cache_config_info{num_gpu_blocks="6\nvllm:cache_config_info{num_gpu_blocks="5"} 1',
            {0: CacheFacts(4, None)},
        ),
    ],
)
def test_lines_that_try_to_be_misread(page: bytes, found: Any) -> None:
    assert parse_cache_facts(page) == found


@pytest.mark.parametrize(
    "page",
    [
        info(num_gpu_blocks="64") * 100_000,
        info(num_gpu_blocks="x" * (15 << 20)),
        b"vllm:cache_config_info{" + b'a="\\\\",' * (3 << 20) + b"} 1\n",
        b"vllm:cache_config_info{" + b'"' * (15 << 20),
        b"vllm:cache_config_info{" + b'a="' * (5 << 20),
        b"\nvllm:cache_config_info{" * 600_000,
        b"\n" * (15 << 20),
    ],
    ids=["lines", "long-value", "escapes", "quotes", "open", "heads", "empty-lines"],
)
def test_a_page_of_any_form_costs_little_time(page: bytes) -> None:
    """It is read on the event loop, where everything else stands still meanwhile."""
    started = time.process_time()
    parse_cache_facts(page)
    assert time.process_time() - started < 0.5


def test_configured_endpoints_are_shifted_by_the_rank() -> None:
    it = engine(events="tcp://10.1.0.7:5557", replay="tcp://10.1.0.7:6557")
    assert endpoints(it, 0, None) == (tcp("10.1.0.7:5557"), tcp("10.1.0.7:6557"))
    assert endpoints(it, 3, None) == (tcp("10.1.0.7:5560"), tcp("10.1.0.7:6560"))


def test_configured_endpoints_win() -> None:
    it = engine(events="tcp://10.1.0.7:5557", replay="tcp://10.1.0.7:6557")
    assert endpoints(it, 0, RankSource(1, 2)) == (tcp("10.1.0.7:5557"), tcp("10.1.0.7:6557"))


def test_what_is_missing_is_taken_from_the_engine_with_the_host_of_the_url() -> None:
    assert endpoints(engine(), 1, RankSource(5558, 6558)) == (tcp("10.0.0.7:5558"), tcp("10.0.0.7:6558"))


def test_a_missing_replay_endpoint_is_on_the_host_of_the_events() -> None:
    it = engine(events="tcp://10.1.0.7:5557")
    assert endpoints(it, 0, RankSource(1, 6557)) == (tcp("10.1.0.7:5557"), tcp("10.1.0.7:6557"))
    assert endpoints(it, 0, None) == (tcp("10.1.0.7:5557"), None)


def test_ipv6() -> None:
    it = engine(url="http://[fd00::7]:8000")
    events, _ = endpoints(it, 0, RankSource(5557, None))
    assert str(events) == "tcp://[fd00::7]:5557"


def test_nothing_known() -> None:
    assert endpoints(engine(), 0, None) == (None, None)
    assert endpoints(engine(), 0, RankSource(None, None)) == (None, None)


@pytest.mark.parametrize("events", ["tcp://h:65535", "tcp://h", "http://h:1", "tcp://*:5557", "nonsense"])
def test_endpoints_that_are_none(events: str) -> None:
    with pytest.raises(NotLocated):
        endpoints(engine(events=events), 1, None)
