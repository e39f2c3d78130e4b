"""``GET /metrics`` under vLLM's names and labels: what a gateway reads of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvsync.engine_sim.config import SimConfig
from kvsync.engine_sim.rank import Rank
from kvsync.engine_sim.request import Request

_Value = Callable[[Rank], float]

_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("num_requests_running", "Sequences in the running batch.", lambda rank: len(rank.scheduler.running)),
    ("num_requests_waiting", "Sequences waiting to be admitted.", lambda rank: len(rank.scheduler.waiting)),
    (
        "kv_cache_usage_perc",
        "Share of the blocks that sequences hold, 0 to 1; cached blocks without users don't count.",
        lambda rank: rank.scheduler.cache.pool.usage,
    ),
)
_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda rank: rank.scheduler.counters.queries),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda rank: rank.scheduler.counters.hits),
    ("num_preemptions", "Preemptions.", lambda rank: rank.scheduler.counters.preemptions),
    ("prompt_tokens", "Prompt tokens.", lambda rank: rank.scheduler.counters.prompt_tokens),
    (
        "prompt_tokens_cached",
        "Prompt tokens that came from a cache.",
        lambda rank: rank.scheduler.counters.cached_prompt_tokens,
    ),
    ("generation_tokens", "Output tokens.", lambda rank: rank.scheduler.counters.generation_tokens),
)


class _Engine(Collector):
    def __init__(self, config: SimConfig, ranks: Callable[[], Sequence[Rank]]) -> None:
        self._config = config
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        for name, text, value in _GAUGES:
            yield self._family(GaugeMetricFamily, name, text, value)
        for name, text, value in _COUNTERS:
            yield self._family(CounterMetricFamily, name, text, value)
        yield self._labelled(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "Waiting sequences by reason.",
            "reason",
            {"capacity": lambda rank: len(rank.scheduler.waiting), "deferred": lambda _: 0},
        )
        yield self._labelled(
            CounterMetricFamily,
            "prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            "source",
            {
                "local_compute": lambda rank: (
                    rank.scheduler.counters.prompt_tokens - rank.scheduler.counters.cached_prompt_tokens
                ),
                "local_cache_hit": lambda rank: rank.scheduler.counters.cached_prompt_tokens,
                "external_kv_transfer": lambda _: 0,
            },
        )
        yield self._labelled(
            CounterMetricFamily,
            "request_success",
            "Finished sequences by reason.",
            "finished_reason",
            {
                "stop": lambda rank: rank.scheduler.counters.finished["stop"],
                "length": lambda rank: rank.scheduler.counters.finished["length"],
                "abort": lambda rank: rank.scheduler.counters.finished["abort"],
            },
        )
        yield self._labelled(
            GaugeMetricFamily,
            "engine_sleep_state",
            "1 for the state that the engine is in.",
            "sleep_state",
            {"awake": lambda _: 1, "weights_offloaded": lambda _: 0, "discard_all": lambda _: 0},
        )
        if self._config.adapters:
            yield self._adapters()
        yield self._cache_config()

    def _family(self, kind: type[Metric], name: str, text: str, value: _Value) -> Metric:
        family = kind(f"vllm:{name}", text, labels=["engine", "model_name"])  # type: ignore[call-arg]
        for rank in self._ranks():
            family.add_metric([str(rank.number), self._config.model], value(rank))  # type: ignore[attr-defined]
        return family

    def _labelled(self, kind: type[Metric], name: str, text: str, label: str, values: dict[str, _Value]) -> Metric:
        family = kind(f"vllm:{name}", text, labels=["engine", "model_name", label])  # type: ignore[call-arg]
        for rank in self._ranks():
            for word, value in values.items():
                family.add_metric(  # type: ignore[attr-defined]
                    [str(rank.number), self._config.model, word], value(rank)
                )
        return family

    def _adapters(self) -> Metric:
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in use.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running: set[str] = set()
        waiting: set[str] = set()
        for rank in self._ranks():
            running |= _adapters_of(rank.scheduler.running)
            waiting |= _adapters_of(rank.scheduler.waiting)
        family.add_metric([str(len(self._config.adapters)), ",".join(sorted(running)), ",".join(sorted(waiting))], 1)
        return family

    def _cache_config(self) -> Metric:
        config = self._config
        facts = {
            "block_size": str(config.block_size),
            "cache_dtype": "auto",
            "cache_hit_alignment_tokens": "None",
            "enable_prefix_caching": "True",
            "num_gpu_blocks": str(config.blocks),
            "prefix_cache_retention_interval": "0",
            "prefix_caching_hash_algo": "xxhash",
            "sliding_window": str(config.sliding_window),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Facts of the cache.", labels=[*facts, "engine"])
        for rank in self._ranks():
            family.add_metric([*facts.values(), str(rank.number)], 1)
        return family


def exposition(config: SimConfig, ranks: Callable[[], Sequence[Rank]]) -> Callable[[], bytes]:
    """A function that gives the current metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Engine(config, ranks))
    return lambda: generate_latest(registry)


def _adapters_of(requests: Sequence[Request]) -> set[str]:
    return {request.adapter.name for request in requests if request.adapter}
