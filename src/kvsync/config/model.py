"""What can be set: every setting with its meaning, its unit, its bounds and its default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from kvsync.config.access import EngineTlsSettings, SaltPolicy, Seconds, Secret, TenantSettings, TlsSettings
from kvsync.config.access import Section as _Section
from kvsync.config.addresses import api_path, http_address, tcp_address
from kvsync.config.curve import public_key
from kvsync.config.discovery import DiscoverySettings, KubernetesSettings
from kvsync.config.extproc import ExtProcSettings
from kvsync.config.limits import LimitsSettings
from kvsync.config.redis import RedisSettings
from kvsync.config.warm import ReadySettings

Port = Annotated[int, Field(ge=0, le=65_535)]
PolicyName = Literal["kv-aware", "prefix-cache", "least-request", "power-of-two", "random", "round-robin"]


def _http(text: str) -> str:
    return str(http_address(text))


def _tcp(text: str) -> str:
    return str(tcp_address(text))


def _tokenizer(text: str) -> str:
    return text if text == "engines" else str(http_address(text, path_allowed=True))


HttpUrl = Annotated[str, AfterValidator(_http)]
TcpEndpoint = Annotated[str, AfterValidator(_tcp)]
CurveKey = Annotated[str, AfterValidator(public_key)]
ApiPath = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._~/-]*$"), AfterValidator(api_path)]
Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[^\x00-\x20\x7f]+$")]
"""Of a model or adapter: what clients send as ``model``."""


class CurveSettings(_Section):
    """ZMQ CURVE on all event and replay connections: all of these, or none."""

    server_key: CurveKey | None = None
    """The publishers' public key, Z85: one pair of keys serves all engines."""
    public_key: CurveKey | None = None
    """This gateway's public key, Z85."""
    secret_key_file: Path | None = None
    """A file with this gateway's secret key, Z85, and nothing else. Read whenever KV sync starts."""


class EventsSettings(_Section):
    """Following the engines' KV events."""

    enabled: bool = False
    """Turn KV event sync on (``AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED``)."""
    strict: bool = False
    """Fail to start, instead of routing without KV sync, when one of its conditions is not met (``KVSYNC_STRICT``)."""
    condition_interval: Seconds = 5.0
    """How often unmet conditions are checked again."""
    connect_timeout: Seconds = 5.0
    """How long a stream may take for its handshake before the wait for it is counted as a failure."""
    heartbeat_interval: Seconds = 5.0
    heartbeat_timeout: Seconds = 15.0
    """Without an answer to a ZMQ heartbeat for this long, a connection counts as dead and is made again."""
    replay_timeout: Seconds = 1.0
    """A replay round ends after this long without a frame."""
    replay_round_timeout: Seconds = 30.0
    """All rounds of one repair together."""
    replays_at_once: Annotated[int, Field(ge=1, le=1024)] = 8
    """Over all engines; the rest waits. One stream never has two."""
    replay_spread: Annotated[float, Field(ge=0, le=60)] = 0.0
    """Before a stream catches up it waits for a random while, up to this, where replicas can't agree by Redis whose
    turn it is. For several replicas without Redis: a second for each two of them."""
    receive_high_water: Annotated[int, Field(ge=1)] = 100_000
    """Batches that one stream may be behind. Above, its connection is closed and made anew, and a replay brings what
    was dropped. (Not ZMQ's RCVHWM: together with heartbeats that makes libzmq 4.3.5 abort the process.)"""
    receive_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Bytes of received batches that may wait for the index, over all streams."""
    batch_size: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Messages that one drain takes at most."""
    poll_timeout: Seconds = 0.1
    """How long the reader sleeps when nothing arrives."""
    metrics_interval: Seconds = 10.0
    """Between two looks at a followed engine's ``/metrics``: does it sleep, was it restarted, what does it hit?"""
    curve: CurveSettings = CurveSettings()


class RemoteTokenizerSettings(_Section):
    """Tokenizing by a vLLM server's ``/tokenize``."""

    enabled: bool = False
    """``AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER``; KV sync requires it."""
    endpoint: Annotated[str, AfterValidator(_tokenizer)] | None = None
    """Base URL of the service that tokenizes (``AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT``), or ``engines``: the
    engines of the model themselves."""
    connect_timeout: Seconds = 1.0
    timeout: Seconds = 5.0
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further tries, elsewhere where there is an elsewhere, on connect errors, 408, 429, 500, 502, 503 and 504."""
    budget: Seconds = 2.0
    """What one request may wait for its tokens, tries included; after that it is routed by load."""
    breaker_failures: Annotated[int, Field(ge=1)] = 5
    """Failures in a row after which an endpoint rests."""
    breaker_rest: Seconds = 5.0
    connections: Annotated[int, Field(ge=1, le=4096)] = 64
    cache_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    """Whole requests remembered, least recently used out first."""
    render: bool = False
    """Send chats with images and other media to the endpoint's ``/v1/chat/completions/render``, so that their prompts
    are known as a whole. The engines run with ``--enable-scale-out``. Otherwise credit ends before the first image."""


class LocalTokenizerSettings(_Section):
    """Tokenizing in this process, for models that name a ``tokenizer`` folder."""

    enabled: bool = True
    prove: Annotated[int, Field(ge=1)] = 20
    """Equal answers of the remote tokenizer, per request shape, before local ones of that shape are used."""
    compare: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of local answers that stays compared; one difference disables the shape."""
    threads: Annotated[int, Field(ge=1, le=64)] = 2
    queue: Annotated[int, Field(ge=1)] = 64
    """Requests that may wait for a thread; beyond it, requests are routed by load."""
    cache_bytes: Annotated[int, Field(ge=0)] = 64 << 20


class TokenizerSettings(_Section):
    type: str | None = None
    """AIBrix's ``AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE``: unset or ``remote``; anything else keeps KV sync off."""
    remote: RemoteTokenizerSettings = RemoteTokenizerSettings()
    local: LocalTokenizerSettings = LocalTokenizerSettings()


class RoutingSettings(_Section):
    policy: PolicyName = "kv-aware"
    """Where the ``routing-strategy`` header does not choose. ``ROUTING_ALGORITHM`` replaces the default only: what the
    YAML file, ``KVSYNC_ROUTING_POLICY`` or a flag says, beats it."""
    imbalance_abs_count: Annotated[int, Field(ge=1)] = 8
    """``prefix-cache``: ``AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT``."""
    standard_deviation_factor: Annotated[float, Field(gt=0)] = 1.0
    """``prefix-cache``: ``AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR``."""
    cpu_discount: Annotated[float, Field(ge=0, le=1)] = 0.8
    """``kv-aware``: what a token credited in the cpu tier counts beside one in the gpu tier."""
    storage_discount: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The same for the storage tier."""
    expected_discount: Annotated[float, Field(ge=0, le=1)] = 0.9
    """``kv-aware``: what an expected token (doubtful blocks, a choice just made) counts beside a credited one."""
    decode_cost: Annotated[float, Field(ge=0)] = 64.0
    """``kv-aware``: prefill tokens that one running request on a worker is worth."""
    expected_lifetime: Seconds = 2.0
    """How long a choice just made counts as an expected prefix."""
    observed_lifetime: Seconds = 120.0
    """How long an answer counts as knowledge of its worker's cache, where events don't tell."""
    breaker_failures: Annotated[int, Field(ge=1)] = 3
    """Failing answers in a row (5xx, no first byte, broken off) after which a worker rests."""
    decisions: Annotated[int, Field(ge=0)] = 10_000
    """Decision records kept for ``GET /v1/decisions/{request-id}``."""


class IndexSettings(_Section):
    """What the prefix index may hold."""

    max_bytes: Annotated[int, Field(ge=1)] = 4 << 30
    """Memory for the blocks of all workers. Above, tails go first, and the workers concerned are ``partial``."""
    max_blocks: Annotated[int, Field(ge=1)] | None = None
    """The same by the number of blocks, each holder of one counted."""


class GatewaySettings(_Section):
    """The data port, and what a request means whichever port it comes in by."""

    enabled: bool = True
    """Open the data port. ``kvsync extproc`` does not."""
    host: str = "0.0.0.0"
    port: Port = 8080
    extra_paths: tuple[ApiPath, ...] = ()
    """Further POST paths passed to the engines, routed by load."""
    expose_tokenize: bool = False
    """Answer /tokenize and /detokenize (by an engine of the model)."""
    max_connections: Annotated[int, Field(ge=1)] = 10_000
    """Open client connections; further ones are answered with 503 and closed."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 32 << 20
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 << 10
    connect_timeout: Seconds = 2.0
    send_timeout: Seconds = 60.0
    """Without an engine taking more of a request for this long, another engine gets it."""
    first_byte_timeout: Seconds = 600.0
    """From the request sent to the engine's status line (queueing and prefill are in it)."""
    idle_timeout: Seconds = 300.0
    """Between two pieces of an answer; there is no limit on the total."""
    client_timeout: Seconds = 60.0
    """For a request to come (a body may take longer while it gets on), and between two requests on one connection."""
    upstream_idle: Seconds = 4.0
    """Idle engine connections are dropped after this (engines close theirs at 5 s)."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Other engines tried when one can't be reached, or does not read the request."""
    retry_fresh_reset: bool = True
    """Try once elsewhere (one of ``retries``) when a *fresh* connection is reset without one response byte."""
    drain_delay: Annotated[float, Field(ge=0, le=86_400)] = 3.0
    """After SIGTERM, how long the data port still takes requests while ``/readyz`` already says no and each answer ends
    its connection: time for a balancer to notice, and for clients that keep connections to move on."""
    drain_timeout: Seconds = 30.0
    """How long open answers may still run after that."""
    reveal_match: bool = False
    """Say in every answer what the chosen worker was credited with (``x-kvsync-match``). For debugging: it tells a
    client what others asked."""
    cache_salt: SaltPolicy = "pass"
    """What becomes of a client's ``cache_salt``, where its tenant does not say otherwise."""
    salt_secret: Secret | None = None
    """What enforced salts are made with. The same in every replica and for ever: with another, all caches are cold."""
    salt_secret_file: Path | None = None
    salted_paths: tuple[ApiPath, ...] = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    """Paths at which every engine takes a ``cache_salt``. Where a salt is enforced, requests to other paths are refused
    (but for /tokenize and /detokenize, which use no cache): an engine that ignores a salt shares its cache."""
    engine_api_key: Secret | None = None
    """Sent to engines as ``Authorization: Bearer``, with every request that this gateway makes."""
    engine_api_key_file: Path | None = None
    tls: TlsSettings = TlsSettings()
    engine_tls: EngineTlsSettings = EngineTlsSettings()


class AuditSettings(_Section):
    """Credit held against what engines say they had cached."""

    inject_usage: bool = False
    """Ask engines for the usage of streamed answers whose clients did not, and take it out of the answer again."""


class AdminSettings(_Section):
    """Health, metrics and the admin API, on their own port."""

    host: str = "127.0.0.1"
    port: Port = 8081
    tls: TlsSettings = TlsSettings()


class TelemetrySettings(_Section):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    prefix_cache_metrics: bool = False
    """``AIBRIX_PREFIX_CACHE_LOCAL_ROUTER_METRICS_ENABLED``; gateway and ZMQ metrics are always on."""


class EngineSettings(_Section):
    """One engine of the static fleet; ``kvsync.discovery.model.Engine`` says what each field means."""

    name: str = Field(min_length=1, max_length=253, pattern=r"^[^\s#]+$")
    url: HttpUrl
    events: TcpEndpoint | None = None
    replay: TcpEndpoint | None = None
    kv_events: bool = True
    adapters: tuple[Name, ...] = ()
    data_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    spec_decode: Literal["eagle"] | None = None
    attention_chunk_size: Annotated[int, Field(ge=1)] | None = None
    usable_blocks: Annotated[int, Field(ge=1)] | None = None
    labels: Mapping[str, str] = {}


class ModelSettings(_Section):
    name: Name
    tokenizer: Path | None = None
    """Folder with ``tokenizer.json`` and the chat template, for local tokenizing."""
    requests_per_second: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    """Of the model and its adapters together, over all replicas."""
    engines: tuple[EngineSettings, ...] = ()


class Settings(_Section):
    gateway: GatewaySettings = GatewaySettings()
    extproc: ExtProcSettings = ExtProcSettings()
    admin: AdminSettings = AdminSettings()
    events: EventsSettings = EventsSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    index: IndexSettings = IndexSettings()
    routing: RoutingSettings = RoutingSettings()
    audit: AuditSettings = AuditSettings()
    redis: RedisSettings = RedisSettings()
    limits: LimitsSettings = LimitsSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    ready: ReadySettings = ReadySettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    models: tuple[ModelSettings, ...] = ()
    tenants: tuple[TenantSettings, ...] = ()
    """Who may use the data port; without any, everybody who reaches it."""
