"""The Gateway API's endpoint-picker protocol, with the real Envoy configured as its gateways do: bodies in pieces, a
cluster that knows its endpoints and takes the one that is picked, and a list of those that may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.extproc.envoy import cluster, endpoints, filter_of, in_pieces, manager
from tests.integration.extproc.harness import good, street
from tests.integration.gateway.harness import BODY, eventually, post

PICKED = "x-gateway-destination-endpoint"
HINT = "envoy.lb.subset_hint"
SOURCES: dict[str, dict[str, Any]] = {
    "header": {"header": PICKED},
    "metadata": {"metadata": {"key": "envoy.lb", "path": [{"key": PICKED}]}},
}


def policy(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    typed = {"@type": f"type.googleapis.com/envoy.extensions.load_balancing_policies.{name}.v3.{kind}", **fields}
    return {"typed_extension_config": {"name": f"envoy.load_balancing_policies.{name}", "typed_config": typed}}


def as_a_gateway(config: dict[str, Any], source: str, ports: list[int], allowed: list[str] | None) -> None:
    """What Envoy's gateways of the Gateway API make of an InferencePool."""
    in_pieces(config, answers=True)
    manager(config)["route_config"]["virtual_hosts"][0]["routes"] = [
        {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
    ]
    engines = cluster(config, "engines")
    del engines["original_dst_lb_config"], engines["lb_policy"]
    fallback = {"policies": [policy("round_robin", "RoundRobin")]}
    picked = policy("override_host", "OverrideHost", override_host_sources=[SOURCES[source]], fallback_policy=fallback)
    engines |= {"type": "STATIC", "load_balancing_policy": {"policies": [picked]}}
    engines["load_assignment"] = {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints(*ports)}]}
    if allowed is not None:
        filter_of(config)["metadata_options"]["forwarding_namespaces"] = {"untyped": [HINT]}
        value = {f"{PICKED}-subset": allowed}
        typed = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        hint = {"@type": typed, "metadata": [{"metadata_namespace": HINT, "value": value}]}
        manager(config)["http_filters"].insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": hint})


@pytest.mark.parametrize("source", sorted(SOURCES))
@pytest.mark.parametrize("allowed", ["all", "the second", "nobody", "another"])
async def test_a_picked_endpoint_gets_the_request(tmp_path: Path, source: str, allowed: str) -> None:
    ports: list[int] = []

    def changes(config: dict[str, Any]) -> None:
        second = f"127.0.0.1:{ports[1]}"
        lists = {"all": None, "the second": [second], "nobody": [], "another": ["127.0.0.1:9"]}
        as_a_gateway(config, source, ports, lists[allowed])

    async with street(tmp_path, good, good, changes=changes, ports=ports, routing={"policy": "round-robin"}) as made:
        seen = []
        for number in range(6):
            raw = post(BODY, b"/v1/completions", b"%b: 127.0.0.1:%d" % (PICKED.encode(), ports[number % 2]))
            answer = await made.say(raw)
            if allowed in ("nobody", "another"):
                assert (answer.status, answer.message) == (503, "error on selecting target pod")
                continue
            assert answer.status == 200
            (named,) = answer.get(b"target-pod")
            (engine,) = [engine for engine in made.engines if engine.name.encode() == named]
            assert engine.requests.pop().body == BODY
            seen.append(named)
        wanted = {"all": {b"engine-0", b"engine-1"}, "the second": {b"engine-1"}}
        assert set(seen) == wanted.get(allowed, set())
        assert all(not engine.requests for engine in made.engines)
        await eventually(lambda: made.running() == 0)
