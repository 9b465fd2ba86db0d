"""The gRPC service that an Inference Gateway's data plane speaks to: `envoy.service.ext_proc.v3.ExternalProcessor`."""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from tandem_services.common.errors import ApiError
from tandem_services.gateway.error_responses import UNEXPECTED
from tandem_services.router_server import ext_proc_messages as messages
from tandem_services.router_server.exchange import Exchange, Picker, ProtocolError
from tandem_services.router_server.metrics import RouterMetrics
from tandem_services.router_server.picking import RequestHead
from tandem_services.router_server.places import Places

logger = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

NOTHING = RequestHead(headers=())
"""What is known of a request that is not looked at."""
MAX_BODIES_BYTES = 256 << 20
"""Of all requests whose bodies are still arriving."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalProcessor:
    """Follows one exchange per stream."""

    picker: Picker
    places: Places
    memory: Places
    metrics: RouterMetrics

    def handler(self) -> Any:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Process": grpc.stream_stream_rpc_method_handler(
                    self._process,
                    request_deserializer=ext_proc.ProcessingRequest.FromString,
                    response_serializer=ext_proc.ProcessingResponse.SerializeToString,
                )
            },
        )

    async def _process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            with self.places.one():
                self.metrics.exchanges.set(self.places.taken)
                async for answer in self._answers(requests, context):
                    yield answer
        except ApiError as error:
            yield messages.immediate(error, NOTHING)
        finally:
            self.metrics.exchanges.set(self.places.taken)

    async def _answers(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        exchange = Exchange(self.picker, self.memory)
        try:
            async for message in requests:
                for answer in await exchange.answer(message):
                    yield answer
                if exchange.over:
                    return
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            # The boundary of one request: its client gets an answer that says nothing, others go on.
            logger.exception("stream failed unexpectedly")
            yield messages.immediate(UNEXPECTED, NOTHING)
        finally:
            exchange.close()
