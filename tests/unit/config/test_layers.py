"""Which layer wins, what every variable means, and where a fault says that it stands."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvsync.config import ConfigError, Settings, load, read
from kvsync.config.environment import OWN_NAMES, duration
from tests.unit.config.conftest import Faults


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvsync.yaml"


def test_nothing_given_is_the_defaults() -> None:
    assert load(None, {}, {}) == Settings()


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "gateway:\n", "models:\n", "null\n"])
def test_a_file_that_says_nothing_is_the_defaults(file: Path, text: str) -> None:
    file.write_text(text)
    assert load(file, {}, {}) == Settings()


def test_flags_beat_environment_beats_file_beats_defaults(file: Path) -> None:
    file.write_text("gateway: {port: 1001, retries: 5, idle_timeout: 7}\n")
    settings = load(file, {"KVSYNC_GATEWAY_PORT": "1002", "KVSYNC_GATEWAY_RETRIES": "6"}, {"gateway.port": 1003})
    assert (settings.gateway.port, settings.gateway.retries, settings.gateway.idle_timeout) == (1003, 6, 7.0)
    assert settings.gateway.client_timeout == Settings().gateway.client_timeout


def test_a_flag_that_was_not_given_says_nothing() -> None:
    assert load(None, {"KVSYNC_ADMIN_PORT": "7"}, {"admin.port": None, "admin.host": "::1"}).admin.model_dump(
        exclude={"tls"}
    ) == {
        "host": "::1",
        "port": 7,
    }


def test_every_variable_of_the_contract() -> None:
    loaded = read(
        None,
        {
            "AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED": "true",
            "AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER": "T",
            "AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT": "http://tokenizer.ns.svc:8000/",
            "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE": "remote",
            "AIBRIX_TOKENIZER_REQUEST_TIMEOUT": "500ms",
            "AIBRIX_PREFIX_CACHE_LOCAL_ROUTER_METRICS_ENABLED": "1",
            "AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT": "16",
            "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR": "2",
            "ROUTING_ALGORITHM": "prefix-cache",
            "KVSYNC_STRICT": "true",
        },
        {},
    )
    settings = loaded.settings
    assert loaded.warnings == ()
    assert settings.events.enabled
    assert settings.events.strict
    assert settings.tokenizer.type == "remote"
    assert settings.tokenizer.remote.enabled
    assert settings.tokenizer.remote.endpoint == "http://tokenizer.ns.svc:8000"
    assert settings.tokenizer.remote.timeout == 0.5
    assert settings.telemetry.prefix_cache_metrics
    assert settings.routing.imbalance_abs_count == 16
    assert settings.routing.standard_deviation_factor == 2.0
    assert settings.routing.policy == "prefix-cache"


def test_routing_algorithm_replaces_the_default_only(file: Path) -> None:
    environ = {"ROUTING_ALGORITHM": "random"}
    file.write_text("routing: {policy: least-request}\n")
    assert load(None, environ, {}).routing.policy == "random"
    assert load(file, environ, {}).routing.policy == "least-request"
    assert load(file, {**environ, "KVSYNC_ROUTING_POLICY": "round-robin"}, {}).routing.policy == "round-robin"


def test_a_settings_own_name_beats_aibrix_s() -> None:
    environ = {"AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED": "true", "KVSYNC_EVENTS_ENABLED": "false"}
    assert not load(None, environ, {}).events.enabled
    assert not load(None, {"KVSYNC_STRICT": "true", "KVSYNC_EVENTS_STRICT": "false"}, {}).events.strict


def test_the_endpoint_template_means_the_engines(file: Path) -> None:
    environ = {"AIBRIX_VLLM_TOKENIZER_ENDPOINT_TEMPLATE": "http://%s:8000"}
    loaded = read(None, environ, {})
    assert loaded.settings.tokenizer.remote.endpoint == "engines"
    assert "each at its own url" in loaded.warnings[0]
    file.write_text("tokenizer: {remote: {endpoint: 'https://t:9'}}\n")
    loaded = read(file, environ, {})
    assert loaded.settings.tokenizer.remote.endpoint == "https://t:9"
    assert f"an endpoint is set ({file}:1)" in loaded.warnings[0]


def test_every_setting_outside_models_has_a_name() -> None:
    assert OWN_NAMES["KVSYNC_TOKENIZER_REMOTE_BREAKER_REST"] == ("tokenizer", "remote", "breaker_rest")
    environ = {}
    defaults = Settings().model_dump()
    for name, place in OWN_NAMES.items():
        value = defaults
        for part in place:
            value = value[part]
        environ[name] = "" if value is None else ",".join(value) if isinstance(value, tuple) else str(value)
    assert load(None, environ, {}) == Settings()


def test_an_empty_variable_is_unset() -> None:
    environ = {"KVSYNC_GATEWAY_PORT": " ", "AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED": "", "ROUTING_ALGORITHM": ""}
    assert load(None, environ, {}) == Settings()


def test_a_list_from_the_environment() -> None:
    assert load(None, {"KVSYNC_GATEWAY_EXTRA_PATHS": "/v1/rerank, /score"}, {}).gateway.extra_paths == (
        "/v1/rerank",
        "/score",
    )


def test_names_without_a_counterpart_warn_and_never_show_a_value() -> None:
    loaded = read(None, {"REDIS_PASSWORD": "s3cret", "AIBRIX_AUTH_BEARER_TOKEN": "s3cret", "POD_NAME": "x"}, {})
    assert loaded.settings == Settings()
    assert len(loaded.warnings) == 2
    assert "NOT authenticated" in loaded.warnings[0]
    assert "s3cret" not in "".join(loaded.warnings)


def test_an_unknown_aibrix_name_warns_with_the_nearest() -> None:
    (warning,) = read(None, {"AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLE": "true"}, {}).warnings
    assert "was AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED meant?" in warning


def test_load_logs_the_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvsync.config"):
        load(None, {"AIBRIX_PREFIX_CACHE_BLOCK_SIZE": "128"}, {})
    assert "AIBRIX_PREFIX_CACHE_BLOCK_SIZE is not used: the block size is learned" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVSYNC_SERVICE_HOST", "10.0.0.1"),
        ("KVSYNC_SERVICE_PORT_HTTP", "80"),
        ("KVSYNC_PORT", "tcp://10.0.0.1:80"),
        ("KVSYNC_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("KVSYNC_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("KVSYNC_GATEWAY_PORT", "tcp://10.0.0.1:80"),
        ("KVSYNC_GATEWAY_SERVICE_PORT", "80"),
    ],
)
def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting(name: str, value: str) -> None:
    loaded = read(None, {name: value}, {})
    assert loaded.settings == Settings()
    assert "enableServiceLinks" in loaded.warnings[0]


def test_a_typing_slip_is_a_fault_with_the_nearest_name(faults: Faults) -> None:
    (fault,) = faults(None, {"KVSYNC_GATEWAY_PROT": "1"})
    assert (fault.origin, fault.mend) == ("KVSYNC_GATEWAY_PROT", "was KVSYNC_GATEWAY_PORT meant?")
    (fault,) = faults(None, None, {"gateway.prot": 1})
    assert (fault.origin, fault.mend) == ("flag gateway.prot", "was gateway.port meant?")
    (fault,) = faults(None, {"KVSYNC_ZZZ": "1"})
    assert "config check" in fault.mend


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED", "enabled", "write true or false"),
        ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "many", "whole number"),
        ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "0", "greater than or equal to 1"),
        ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "-1", "greater than 0"),
        ("AIBRIX_TOKENIZER_REQUEST_TIMEOUT", "5 s", "write 5s, 500ms"),
        ("AIBRIX_TOKENIZER_REQUEST_TIMEOUT", "-5s", "is not a duration"),
        ("AIBRIX_TOKENIZER_REQUEST_TIMEOUT", "0", "greater than 0"),
        ("AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT", "tokenizer:8000", "does not begin with http"),
        ("ROUTING_ALGORITHM", "least-latency", "'kv-aware'"),
        ("KVSYNC_GATEWAY_PORT", "70000", "less than or equal to 65535"),
        ("KVSYNC_EVENTS_POLL_TIMEOUT", "nan", "finite"),
        ("KVSYNC_ROUTING_DECODE_COST", "inf", "finite"),
        ("KVSYNC_GATEWAY_EXTRA_PATHS", "rerank", "pattern"),
        ("KVSYNC_GATEWAY_HOST", "h\udcff", "is not UTF-8 text"),
    ],
)
def test_garbage_is_a_fault_that_names_the_variable(faults: Faults, name: str, value: str, says: str) -> None:
    (fault,) = faults(None, {name: value})
    assert fault.origin == name
    assert says in str(fault)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5), ("500ms", 0.5), ("1m30s", 90), ("1.5h", 5400), (".5s", 0.5), ("100us", 1e-4), ("7", 7), ("0.25", 0.25)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "5x", "5s ", "1m 30s", "1e3", "-1", "5s5"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        duration(text)


def test_all_faults_of_all_layers_come_at_once(file: Path) -> None:
    file.write_text("gateway:\n  hots: x\nmodels:\n  - name: m\n    engines:\n      - {name: e, url: ftp://h}\n")
    with pytest.raises(ConfigError) as caught:
        load(file, {"KVSYNC_ADMIN_PORT": "x"}, {"gateway.retries": 99})
    assert {(fault.origin, fault.path) for fault in caught.value.faults} == {
        (f"{file}:2", "gateway.hots"),
        (f"{file}:6", "models[0].engines[0].url"),
        ("KVSYNC_ADMIN_PORT", "admin.port"),
        ("flag gateway.retries", "gateway.retries"),
    }
    assert str(caught.value).startswith("4 faults in the configuration:\n  ")


def test_origins_of_what_was_given(file: Path) -> None:
    file.write_text("admin:\n  port: 9\n")
    origins = read(file, {"KVSYNC_GATEWAY_PORT": "8"}, {"admin.host": "::1"}).origins
    assert origins["admin.port"] == f"{file}:2"
    assert origins["gateway.port"] == "KVSYNC_GATEWAY_PORT"
    assert origins["admin.host"] == "flag admin.host"
    assert "gateway.host" not in origins
