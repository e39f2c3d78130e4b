"""One settings model for the whole gateway: defaults < YAML file < environment < flags.

:mod:`~kvsync.config.model` says what can be set, its unit, its bounds and its default. :func:`load` reads the layers
and raises one :class:`ConfigError` that lists every fault at once, each with the place it came from and the mend.
Everything is frozen: a changed file makes a new :class:`Settings`, never a changed one.
"""

from kvsync.config.access import EngineTlsSettings, SaltPolicy, Seconds, TenantSettings, TlsSettings
from kvsync.config.discovery import DiscoverySettings, KubernetesSettings
from kvsync.config.extproc import ExtProcSettings
from kvsync.config.faults import ConfigError, Fault
from kvsync.config.loading import Loaded, load, read
from kvsync.config.model import (
    AdminSettings,
    EngineSettings,
    EventsSettings,
    GatewaySettings,
    LocalTokenizerSettings,
    ModelSettings,
    PolicyName,
    Port,
    RemoteTokenizerSettings,
    RoutingSettings,
    Settings,
    TelemetrySettings,
    TokenizerSettings,
)

__all__ = [
    "AdminSettings",
    "ConfigError",
    "DiscoverySettings",
    "EngineSettings",
    "EngineTlsSettings",
    "EventsSettings",
    "ExtProcSettings",
    "Fault",
    "GatewaySettings",
    "KubernetesSettings",
    "Loaded",
    "LocalTokenizerSettings",
    "ModelSettings",
    "PolicyName",
    "Port",
    "RemoteTokenizerSettings",
    "RoutingSettings",
    "SaltPolicy",
    "Seconds",
    "Settings",
    "TelemetrySettings",
    "TenantSettings",
    "TlsSettings",
    "TokenizerSettings",
    "load",
    "read",
]
