"""The router's own API over gRPC: `tandem.router.v1.Router`."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from tandem_services.common.errors import ApiError
from tandem_services.router_server.grpc_messages import ask_of, chosen, explained, status_of, worker
from tandem_services.router_server.http_api import RouterApi
from tandem_services.router_server.protos import router_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE = "tandem.router.v1.Router"

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Method = Callable[[Ask], Awaitable[Answer]]


class RouterService:
    """One method for each of the service's. Each raises `ApiError`, which `handler` turns into a status."""

    def __init__(self, api: RouterApi) -> None:
        self._api = api

    def handler(self) -> Any:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        methods: dict[str, tuple[Method[Any, Any], Any]] = {
            "Choose": (self._choose, pb.ChooseRequest),
            "Release": (self._release, pb.ReleaseRequest),
            "ListWorkers": (self._list_workers, pb.ListWorkersRequest),
            "Explain": (self._explain, pb.ExplainRequest),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: grpc.unary_unary_rpc_method_handler(
                    self._guarded(method),
                    request_deserializer=ask.FromString,
                    response_serializer=lambda answer: answer.SerializeToString(),
                )
                for name, (method, ask) in methods.items()
            },
        )

    def _guarded(self, method: Method[Ask, Answer]) -> Callable[[Ask, Any], Awaitable[Answer]]:
        async def call(ask: Ask, context: Any) -> Answer:
            try:
                self._api.check_token(_authorization(context))
                return await method(ask)
            except ApiError as error:
                code, sentence, metadata = status_of(error)
                await context.abort(code, sentence, metadata)
                raise

        return call

    async def _choose(self, request: pb.ChooseRequest) -> pb.ChooseResponse:
        return chosen(await self._api.choose(ask_of(request), interface="grpc"))

    async def _release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        return pb.ReleaseResponse(released=await self._api.desk.release(request.reservation))

    async def _list_workers(self, request: pb.ListWorkersRequest) -> pb.ListWorkersResponse:
        return pb.ListWorkersResponse(workers=map(worker, self._api.workers(request.model).workers))

    async def _explain(self, request: pb.ExplainRequest) -> pb.ExplainResponse:
        return explained(self._api.explain(request.id))


def _authorization(context: Any) -> str | None:
    given = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
    return str(given[0]) if len(given) == 1 else None
