"""`POST /v1/messages/count_tokens`: how long the prompt of a messages request is."""

from starlette.requests import Request
from starlette.responses import Response

from tandem_services.gateway.answer_format import encode_json
from tandem_services.gateway.answering import Answering
from tandem_services.gateway.messages.answer_schemas import CountedTokens
from tandem_services.gateway.messages.errors import PATH
from tandem_services.gateway.messages.planner import MessagesPlanner
from tandem_services.gateway.model_catalog import ModelCatalog
from tandem_services.gateway.request_body import decode_body, read_body


class TokenCount:
    """The route."""

    path = f"{PATH}/count_tokens"

    def __init__(self, planner: MessagesPlanner, models: ModelCatalog, answering: Answering) -> None:
        self._planner = planner
        self._models = models
        self._shared = answering

    async def answer(self, request: Request) -> Response:
        asked = await decode_body(self._planner.decode, await read_body(request))
        served = self._models.of_request(request.scope, asked.model)
        tokens = await self._shared.without_workers(request, lambda: self._planner.count(asked, served))
        return Response(encode_json(CountedTokens(input_tokens=tokens)), media_type="application/json")
