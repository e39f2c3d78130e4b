"""What engine a pod is, or why it is none. Pure: JSON in, a verdict out.

What must always hold: an engine is followed from the moment that its pod runs and has an address; it is ready only
while the pod's Ready condition is true and nobody has asked for its end. No address, no engine. Another pod of the same
name, and another start of its container, is another engine (``uid``). Whatever else a pod says wrong of itself (a bad
port, an unknown switch) is told, never guessed.

Names are AIBrix's. Each is looked for among the labels first, then among the annotations, since a label's value can't
hold a ``/`` and models' names often do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from kvsync.config.addresses import Address
from kvsync.config.model import PolicyName
from kvsync.discovery.kubernetes.reflector import Key, Unreadable
from kvsync.discovery.model import Engine

PREFIX: Final = "model.aibrix.ai/"
HTTP_PORT: Final = 8000
EVENTS_PORT: Final = 5557
REPLAY_PORT: Final = 5558
EVENTS_PORT_NAME: Final = "kv-events"
REPLAY_PORT_NAME: Final = "kv-replay"
MAX_RANKS: Final = 128
"""Of one pod: no node has so many accelerators, and each is a stream, on ports of its own."""
MAX_ADAPTERS: Final = 1000
RAY_NODE_TYPE: Final = "ray.io/node-type"
NETWORK_STATUS: Final = "k8s.v1.cni.cncf.io/network-status"
"""Where Multus writes the addresses that a pod has in further networks."""
GROUP_INDEX: Final = "stormservice.orchestration.aibrix.ai/pod-group-index"
_NAME: Final = re.compile(r"[^\x00-\x20\x7f]{1,253}")

Reason: TypeAlias = Literal[
    "no_model",
    "bad_setting",
    "ray_worker",
    "group_member",
    "not_running",
    "finished",
    "no_address",
    "address_taken",
]
REASONS: Final[tuple[Reason, ...]] = (
    "no_model",
    "bad_setting",
    "ray_worker",
    "group_member",
    "not_running",
    "finished",
    "no_address",
    "address_taken",
)
"""Why a pod that has one of the labels is no engine."""


Stream: TypeAlias = Literal["events", "replay"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is kept of a pod."""

    key: Key
    uid: str
    """The pod's."""
    engine: Engine | None
    reason: Reason | None = None
    """Why there is no engine."""
    detail: str = ""
    """The same as a sentence."""
    notes: tuple[str, ...] = ()
    """What should be changed at it, each as a sentence with its mend."""
    claim: tuple[bool, str, str] = (False, "", "")
    """Of several pods that say they have one address, the one with the greatest claim has it: the one whose container
    was started last. In its node's network, where one that is about to end still has its ports, that one comes last."""
    assumed: frozenset[Stream] = frozenset()
    """Of the engine's ports, those that another pod may as well have: in its node's network, and named by none of its
    containers (who names one has it for itself: the scheduler sees to that); or at an address that is an annotation's
    word, which anybody can write."""

    @property
    def name(self) -> str:
        return "/".join(self.key)


class _Port(msgspec.Struct, rename="camel"):
    container_port: int = 0
    name: str | None = None


class _Container(msgspec.Struct):
    name: str = ""
    ports: list[_Port] | None = None


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] | None = None
    host_network: bool | None = None


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    uid: str
    namespace: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _Ip(msgspec.Struct):
    ip: str = ""


class _Running(msgspec.Struct, rename="camel"):
    started_at: str | None = None


class _ContainerState(msgspec.Struct):
    running: _Running | None = None


class _ContainerStatus(msgspec.Struct, rename="camel"):
    name: str = ""
    restart_count: int = 0
    state: _ContainerState | None = None


class _State(msgspec.Struct):
    phase: str | None = None
    conditions: list[_Condition] | None = None
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    pod_ips: list[_Ip] | None = msgspec.field(name="podIPs", default=None)
    start_time: str | None = msgspec.field(name="startTime", default=None)
    containers: list[_ContainerStatus] | None = msgspec.field(name="containerStatuses", default=None)


class _Profile(msgspec.Struct, rename="camel"):
    routing_strategy: str = ""


class _Profiles(msgspec.Struct, rename="camel"):
    """AIBrix's ``config`` annotation, as far as it is used here."""

    locked_routing_strategy: str = ""
    default_profile: str = ""
    profiles: dict[str, _Profile] = {}


class _Pod(msgspec.Struct):
    metadata: _Meta
    spec: _Spec | None = None
    status: _State | None = None


class _Network(msgspec.Struct):
    name: str = ""
    ips: list[str] | None = None


_pod = msgspec.json.Decoder(_Pod).decode
_networks = msgspec.json.Decoder(list[_Network]).decode
_profiles = msgspec.json.Decoder(_Profiles).decode


class _Bad(ValueError):
    """A setting of the pod that can't be used."""


def judge(raw: bytes) -> Verdict | None:
    """What engine a pod is, or why it is none; ``None`` for one that has nothing to do with models.

    Raises:
        Unreadable: this is no pod.
    """
    try:
        pod = _pod(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unreadable(f"is no pod as the API server has them: {error}") from None
    meta, state = pod.metadata, pod.status or _State()
    said = _Said(meta)
    if not said.any:
        return None
    key = (meta.namespace, meta.name)
    reason, detail = _why_not(said, state)
    if reason is not None:
        return Verdict(key, meta.uid, None, reason, detail)
    try:
        return _served(pod, state, said, key)
    except _Bad as bad:
        return Verdict(key, meta.uid, None, "bad_setting", str(bad))


class _Said:
    """A pod's labels and annotations."""

    def __init__(self, meta: _Meta) -> None:
        self.labels: Mapping[str, str] = meta.labels or {}
        self._annotations: Mapping[str, str] = meta.annotations or {}
        self.any = any(name.startswith(PREFIX) for name in (*self.labels, *self._annotations))

    def get(self, name: str) -> str:
        """The value that is not blank, of the label or else the annotation; empty without any."""
        full = PREFIX + name
        return self.labels.get(full, "").strip() or self._annotations.get(full, "").strip()

    def followed(self) -> tuple[bool, list[str]]:
        """Whether its events are to be followed, which a label says and nothing else."""
        full = f"{PREFIX}kv-events-enabled"
        switch = self.labels.get(full, "")
        if switch not in ("", "true", "false"):
            return False, [f'the label {full} is {switch[:40]!r}: events are not followed; only "true" says so']
        if not switch and full in self._annotations:
            return False, [f"{full} is an annotation: events are not followed; make it a label"]
        return switch == "true", []

    def address_in(self, network: str) -> str | None:
        """The pod's address in one of the networks that it has beside the cluster's."""
        try:
            networks = _networks(self._annotations.get(NETWORK_STATUS, "").encode())
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        return next((_host(each.ips[0]) for each in networks if each.name == network and each.ips), None)

    def number(self, name: str, default: int | None, most: int) -> int | None:
        text = self.get(name)
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 12 and 1 <= int(text) <= most):
            raise _Bad(f"{PREFIX}{name} is {text[:40]!r}: write a whole number from 1 to {most}")
        return int(text)


def _why_not(said: _Said, state: _State) -> tuple[Reason | None, str]:
    if said.labels.get(RAY_NODE_TYPE) == "worker":
        return "ray_worker", f"{RAY_NODE_TYPE} is worker: the head answers for it"
    index = said.labels.get(GROUP_INDEX, "")
    if index.isascii() and index.isdecimal() and int(index[:9]) > 0:
        return "group_member", f"{GROUP_INDEX} is {index[:9]}: the group's first pod answers for it"
    if not said.get("name"):
        return "no_model", f"neither a label nor an annotation {PREFIX}name says which model it serves"
    if state.phase in ("Succeeded", "Failed"):
        return "finished", f"its phase is {state.phase}"
    if state.phase != "Running":
        return "not_running", f"its phase is {state.phase or 'not told'}"
    if not _addresses(state):
        return "no_address", "its status has no podIP"
    return None, ""


def _addresses(state: _State) -> list[str]:
    return [text for text in (state.pod_ip, *(each.ip for each in state.pod_ips or ())) if text and text.strip()]


def _served(pod: _Pod, state: _State, said: _Said, key: Key) -> Verdict:
    meta = pod.metadata
    terminating = meta.deletion_timestamp is not None
    on_node = pod.spec is not None and pod.spec.host_network is True
    model = said.get("name")
    if not _NAME.fullmatch(model):
        raise _Bad(f"{PREFIX}name is no model's name: at most 253 characters, no spaces")
    scheme = said.get("scheme") or "http"
    if scheme not in ("http", "https"):
        raise _Bad(f"{PREFIX}scheme is {scheme[:40]!r}: write http or https")
    host = _host(_addresses(state)[0])
    port = said.number("port", HTTP_PORT, 65_535)
    ranks = said.number("data-parallel-size", 1, MAX_RANKS)
    assert port is not None
    assert ranks is not None
    containers = (pod.spec.containers if pod.spec is not None else None) or ()
    followed, notes = said.followed()
    named: dict[Stream, set[int]] = {
        "events": _named_ports(containers, EVENTS_PORT_NAME),
        "replay": _named_ports(containers, REPLAY_PORT_NAME),
    }
    if followed and (unclear := _unclear(named)):
        notes.append(f"{unclear}: its events are not followed; give each name to one port")
        followed = False
    events = min(named["events"], default=EVENTS_PORT)
    replay: int | None = min(named["replay"], default=REPLAY_PORT)
    source: str | None = host
    if followed and (network := said.get("kv-events-network")):
        source = said.address_in(network)
        if source is None:
            notes.append(
                f"it has no address in the network {network[:100]!r} that {PREFIX}kv-events-network names "
                f"(annotation {NETWORK_STATUS}): its events are not followed"
            )
    followed = followed and source is not None
    if followed:
        if events + ranks - 1 > 65_535:
            raise _Bad(f"{ranks} ranks from event port {events} on go beyond port 65535: choose a lower one")
        assert replay is not None
        if replay + ranks - 1 > 65_535 or abs(replay - events) < ranks:
            # Engines whose ports are really so don't start: each rank adds its number to both.
            notes.append(_apart(events, replay, ranks))
            replay = None
    spec_decode = said.get("spec-decode") or None
    if spec_decode not in (None, "eagle"):
        raise _Bad(f"{PREFIX}spec-decode is {spec_decode[:40]!r}: write eagle (also for MTP)")
    policy, locked = _policy(said, notes)
    status = _own_status(containers, state, port)
    restarts = max(0, status.restart_count)
    began = status.state.running.started_at if status.state is not None and status.state.running is not None else None
    name = f"{meta.namespace}/{meta.name}"
    engine = Engine(
        uid=f"{name}@{meta.uid}" + (f".{restarts}" if restarts else ""),
        name=name,
        url=str(Address(scheme, host, port)),
        model=model,
        adapters=tuple(_adapters(said)),
        data_parallel_size=ranks,
        kv_events=followed,
        events=str(Address("tcp", source, events)) if followed and source is not None else None,
        replay=str(Address("tcp", source, replay)) if followed and source is not None and replay is not None else None,
        spec_decode=spec_decode,
        attention_chunk_size=said.number("attention-chunk-size", None, 1 << 24),
        labels=dict(said.labels),
        ready=not terminating and _ready(state),
        tokenizes=said.get("engine") in ("", "vllm"),
        policy=policy,
        policy_locked=locked,
    )
    return Verdict(
        key,
        meta.uid,
        engine,
        notes=tuple(notes),
        claim=(
            not (terminating and on_node),
            max(began or "", state.start_time or ""),
            meta.creation_timestamp or "",
        ),
        assumed=frozenset(stream for stream, ports in named.items() if source != host or (on_node and not ports)),
    )


def _ready(state: _State) -> bool:
    said = {each.status for each in state.conditions or () if each.type == "Ready"}
    return said == {"True"}


def _host(text: str) -> str:
    try:
        address = ip_address(text.strip())
    except ValueError:
        raise _Bad(f"its podIP is {text[:60]!r}, which is no address") from None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped  # the same machine, and so that it is seen to be the same
    six = isinstance(address, IPv6Address)
    if address.is_unspecified or address.is_multicast or (six and (address.is_link_local or "%" in str(address))):
        raise _Bad(f"its podIP is {text[:60]!r}, which can't be dialled")
    return str(address)


def _named_ports(containers: list[_Container] | tuple[()], name: str) -> set[int]:
    return {port.container_port for each in containers for port in each.ports or () if port.name == name}


def _unclear(named: Mapping[Stream, set[int]]) -> str:
    """What can't be the engine's ports; empty when nothing is wrong with them."""
    for name, ports in zip((EVENTS_PORT_NAME, REPLAY_PORT_NAME), named.values(), strict=True):
        if len(ports) > 1:
            return f"several container ports are named {name} ({', '.join(map(str, sorted(ports)[:4]))})"
        if any(not 0 < port <= 65_535 for port in ports):
            return f"the container port {name} is {str(min(ports))[:20]}, which is no port"
    return ""


def _apart(events: int, replay: int, ranks: int) -> str:
    return (
        f"the replay port {replay} is among the {ranks} ranks' ports ({events} to {events + ranks - 1} for events, "
        f"{replay} to {replay + ranks - 1} for replays): replay is asked of the engine instead (vLLM 0.31 and later). "
        f"Set replay_endpoint to tcp://*:{_free(events, ranks)}, and a container port {REPLAY_PORT_NAME} of that number"
    )


def _free(events: int, ranks: int) -> int:
    """A replay port that no rank's events need."""
    above = events + 1000
    return above if above + ranks - 1 <= 65_535 else events - 2 * ranks


def _own_status(containers: list[_Container] | tuple[()], state: _State, port: int) -> _ContainerStatus:
    """That of the engine's container. When it was started anew, what was known of the process before is of no use."""
    wanted = {EVENTS_PORT_NAME, REPLAY_PORT_NAME}
    named = [
        container.name
        for container in containers
        if any(each.name in wanted or each.container_port == port for each in container.ports or ())
    ]
    engine = named[0] if named else containers[0].name if containers else ""
    return next((each for each in state.containers or () if each.name == engine), _ContainerStatus())


def _policy(said: _Said, notes: list[str]) -> tuple[str | None, bool]:
    """The policy that the ``config`` annotation asks for, and whether it is locked."""
    text = said.get("config")
    if not text:
        return None, False
    full = f"{PREFIX}config"
    try:
        found = _profiles(text.encode())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        notes.append(f"{full} is not used: {error}")
        return None, False
    locked = bool(found.locked_routing_strategy)
    profile = found.profiles.get(found.default_profile or "default", _Profile())
    asked = found.locked_routing_strategy or profile.routing_strategy
    if asked and asked not in get_args(PolicyName):
        notes.append(
            f"{full} asks for the strategy {asked[:40]!r}, which is none here: routing.policy and the header choose"
        )
        return None, False
    return asked or None, locked


def _adapters(said: _Said) -> Iterator[str]:
    seen: set[str] = set()
    for text in said.get("adapters").split(","):
        name = text.strip()
        if not name:
            continue
        if not _NAME.fullmatch(name):
            raise _Bad(
                f"{PREFIX}adapters holds {name[:40]!r}, which is no adapter's name: write names, with commas between"
            )
        if name not in seen and len(seen) < MAX_ADAPTERS:
            seen.add(name)
            yield name


__all__ = [
    "EVENTS_PORT",
    "EVENTS_PORT_NAME",
    "GROUP_INDEX",
    "HTTP_PORT",
    "NETWORK_STATUS",
    "PREFIX",
    "RAY_NODE_TYPE",
    "REASONS",
    "REPLAY_PORT",
    "REPLAY_PORT_NAME",
    "Reason",
    "Stream",
    "Verdict",
    "judge",
]
