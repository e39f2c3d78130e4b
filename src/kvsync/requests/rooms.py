"""What all requests of one process share, whichever door they come in by."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvsync.config import GatewaySettings, Settings
from kvsync.discovery.access import EngineAccess
from kvsync.requests.auth import Tenants
from kvsync.requests.ports import Fleet, Gate, OnAnswer, Routing, Telemetry, Tokenizing
from kvsync.requests.salts import Salts
from kvsync.requests.turns import Turns


@dataclass(frozen=True, slots=True)
class Rooms:
    """Made by :meth:`furnish` on the event loop that serves, and closed by whoever made it."""

    settings: GatewaySettings
    fleet: Fleet
    tokenizing: Tokenizing
    routing: Routing
    telemetry: Telemetry
    on_answer: OnAnswer
    loop: asyncio.AbstractEventLoop
    turns: Turns
    inject_usage: bool
    engines: EngineAccess
    tenants: Tenants
    salts: Salts
    gate: Gate | None

    @classmethod
    def furnish(
        cls,
        settings: GatewaySettings,
        *,
        fleet: Fleet,
        tokenizing: Tokenizing,
        routing: Routing,
        telemetry: Telemetry,
        on_answer: OnAnswer,
        inject_usage: bool = False,
        engines: EngineAccess | None = None,
        tenants: Tenants | None = None,
        gate: Gate | None = None,
    ) -> Rooms:
        """
        Args:
            engines: their key, and TLS for those with https URLs; by default no key and the system's authorities.
            tenants: who may come in; by default everybody.
            gate: how much they may have; by default as much as they want.

        Raises:
            BadFile: the secret of the salts can't be read.
        """
        loop = asyncio.get_running_loop()
        return cls(
            settings=settings,
            fleet=fleet,
            tokenizing=tokenizing,
            routing=routing,
            telemetry=telemetry,
            on_answer=on_answer,
            loop=loop,
            turns=Turns(loop),
            inject_usage=inject_usage,
            engines=engines or EngineAccess(),
            tenants=tenants or Tenants(Settings(gateway=settings)),
            salts=Salts(settings),
            gate=gate,
        )

    def close(self) -> None:
        self.turns.close()


__all__ = ["Rooms"]
