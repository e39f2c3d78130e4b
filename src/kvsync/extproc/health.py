"""gRPC's health protocol: whether to ask here.

As the Gateway API's endpoint-picker protocol has it: ``liveness`` says that the process answers; everything else
(``readiness``, the external processor's own name, the empty name) that it has engines to choose from and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from kvsync.extproc.protocol import messages as pb

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_NAME: Final = "grpc.health.v1.Health"
_KNOWN: Final = frozenset({"", "readiness", SERVICE})
_LOOK: Final = 0.25
"""Seconds between two looks for those who watch."""
_Status = pb.HealthCheckResponse


class Health:
    """
    Args:
        ready: whether requests should come here.
    """

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._closing = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:
        coding: dict[str, Any] = {
            "request_deserializer": pb.HealthCheckRequest.FromString,
            "response_serializer": pb.HealthCheckResponse.SerializeToString,
        }
        return grpc.method_handlers_generic_handler(
            _NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, **coding),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **coding),
            },
        )

    def close(self) -> None:
        """Who watches is told the last word and is let go: a shutdown does not wait for it."""
        self._closing.set()

    def status(self, service: str) -> int:
        if service == "liveness":
            return _Status.SERVING
        if service not in _KNOWN:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._ready() else _Status.NOT_SERVING

    async def _check(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.HealthCheckResponse:
        status = self.status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return _Status(status=status)  # type: ignore[arg-type]

    async def _watch(self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        told: int | None = None
        while True:
            status = self.status(request.service)
            if status != told:
                told = status
                await context.write(_Status(status=status))  # type: ignore[arg-type]
            if self._closing.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._closing.wait()


__all__ = ["SERVICE", "Health"]
