"""An external processor that is to Envoy, engines and clients what AIBrix's gateway plugin is: the same fields of
requests and answers. It follows no events and sends requests to engines in turn, which is what AIBrix's does where its
cache never matches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

import grpc
import grpc.aio

from kvsync.extproc.protocol import messages as pb

_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_SET: Final = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class Plugin:
    """Use it as an asynchronous context manager.

    Args:
        engines: ``address:port`` by name.
    """

    def __init__(self, engines: Mapping[str, str]) -> None:
        self._turns = itertools.cycle(engines.items())
        self._server: grpc.aio.Server | None = None
        self.port = 0
        self.asked = 0
        """Requests."""
        self.open = 0
        """Those whose answer has not ended."""

    async def __aenter__(self) -> Plugin:
        server = grpc.aio.server()
        handlers: dict[str, Any] = {
            "Process": grpc.stream_stream_rpc_method_handler(
                self._process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
            )
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._server = server
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def _process(self, messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        name, address = next(self._turns)
        self.asked += 1
        self.open += 1
        try:
            async for message in messages:
                response = pb.ProcessingResponse()
                kind = message.WhichOneof("request")
                if kind == "request_body":
                    common = response.request_body.response
                    common.header_mutation.CopyFrom(_fields({"routing-strategy": "random", "target-pod": address}))
                    common.clear_route_cache = True
                elif kind == "response_headers":
                    told = {"routing-strategy": "random", "target-pod": name, "target-pod-ip": address}
                    response.response_headers.response.header_mutation.CopyFrom(_fields(told))
                else:
                    getattr(response, kind).SetInParent()
                yield response
        finally:
            self.open -= 1


def _fields(fields: Mapping[str, str]) -> pb.HeaderMutation:
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(header=pb.HeaderValue(key=name, raw_value=value.encode()), append_action=_SET)
            for name, value in fields.items()
        ]
    )


__all__ = ["Plugin"]
