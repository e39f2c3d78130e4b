"""The scenarios of ``make test-vllm``: real engines, a real gateway, real requests; one scenario after another.

Each runs one workload by ``kv-aware`` and then one of the same shape by ``round-robin``. The first shows that requests
follow the cache. Under both, what the gateway credits must be what the engine reports, token for token: round-robin
asks it of workers that hold little of the prompt as well.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import zmq

from .engines import BLOCK_SIZE, ROOT, VENV, Engine, Spec
from .gateway import Gateway
from .oracle import Cache
from .run import Figures, run
from .streams import Stream
from .workload import Workload

LOGS = ROOT / ".make" / "vllm-logs"
REQUESTS = 150
SEED = 20
SCENARIOS = {
    "two plain engines": [Spec("plain-1", "tiny-llama", 96), Spec("plain-2", "tiny-llama", 96)],
    "one engine, two ranks": [Spec("dp", "tiny-llama", 96, ranks=2)],
    "two sliding-window hybrids": [Spec("hybrid-1", "tiny-gemma3", 160), Spec("hybrid-2", "tiny-gemma3", 160)],
}
"""The caches hold about two thirds of what the open conversations need."""

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if not (VENV / "installed").exists():
        pytest.fail(f"no vLLM in {VENV}: run `make test-vllm`, which installs it")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_requests_follow_the_cache_and_credit_is_what_the_engine_reports(scenario: str, report: list[Figures]) -> None:
    aware, blind = play(scenario, SCENARIOS[scenario])
    report += (aware, blind)
    for figures in (aware, blind):
        assert figures.events_equal == figures.requests, figures.differences
        assert figures.credit_equal == figures.requests, figures.differences
        assert set(figures.trusts) == {"exact"}, figures.trusts
        assert figures.evicted > REQUESTS, "the caches were never full: this run proves little"
        assert len(figures.by_worker) == 2, figures.by_worker
    assert aware.hits > REQUESTS // 2
    assert aware.followed == aware.followable
    assert aware.hit_rate > 1.2 * blind.hit_rate


def play(scenario: str, specs: list[Spec]) -> tuple[Figures, Figures]:
    """Start the engines and the gateway, run both policies, stop everything."""
    logs = LOGS / scenario.replace(" ", "-").replace(",", "")
    with ExitStack() as stack:
        engines = [Engine(spec, logs) for spec in specs]
        for engine in engines:
            stack.enter_context(engine.server)
        for engine in engines:
            engine.wait_ready()
        gateway = stack.enter_context(Gateway(engines, logs))
        gateway.wait_ready()
        context = stack.enter_context(zmq.Context())
        replays = {worker: endpoint for engine in engines for worker, endpoint in engine.replays.items()}
        streams = {name: stack.enter_context(Stream(context, endpoint)) for name, endpoint in replays.items()}
        caches = {name: Cache(BLOCK_SIZE) for name in replays}
        aware, blind = (
            run(scenario, policy, Workload(SEED, policy), REQUESTS, gateway, streams, caches)
            for policy in ("kv-aware", "round-robin")
        )
        return aware, blind
