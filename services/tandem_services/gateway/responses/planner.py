"""`POST /v1/responses`: planned as the chat that means the same, answered in its own form. Nothing is kept."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.answer_format import AnswerFormat
from tandem_services.gateway.chat import ChatPlanner
from tandem_services.gateway.plan import GenerationPlan
from tandem_services.gateway.read_model import ReadModel
from tandem_services.gateway.renamed_fields import renamed_fields
from tandem_services.gateway.request_body import BodyDecoder
from tandem_services.gateway.responses.answer_schemas import AnsweredReasoning, AnsweredTextFormat
from tandem_services.gateway.responses.conversation import chat_request
from tandem_services.gateway.responses.format import ResponsesFormat
from tandem_services.gateway.responses.schemas import ResponsesRequest

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
}
"""Fields of chats under their names here."""


class ResponsesPlanner:
    """Implements `Planner`."""

    endpoint = "/v1/responses"

    def __init__(self, chats: ChatPlanner, *, strict: bool) -> None:
        self._chats = chats
        self._decoder = BodyDecoder(ResponsesRequest, strict=strict, closed=True)

    def decode(self, body: bytes) -> ResponsesRequest:
        return self._decoder.decode(body)

    async def plan(self, request: ResponsesRequest, served: ReadModel, caller: Caller) -> GenerationPlan:
        """Raises `ApiError` or `InvalidRequestError` naming the field at fault."""
        chat = chat_request(request)
        with renamed_fields(_name):
            plan = await self._chats.plan(chat, served, caller)
        return replace(plan, grammar_field=_name(plan.grammar_field), repeated=_repeated(request))

    def format(self, plan: GenerationPlan, served: ReadModel, request_id: str, created: int) -> AnswerFormat:
        del served  # a response says nothing about single tokens
        return ResponsesFormat(f"resp_{request_id}", created, plan)


def _name(param: str | None) -> str | None:
    """What clients of this endpoint call a field of a chat request."""
    if param is None:
        return None
    if param.startswith("messages"):
        return "input"
    return _NAMES.get(param, param.replace(".function.", "."))


def _repeated(request: ResponsesRequest) -> Mapping[str, Any]:
    """What a response says about its request."""
    text_format = None if request.text is None else request.text.format
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "text": AnsweredTextFormat(format={"type": "text"} if text_format is None else _present(text_format)),
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": AnsweredReasoning(effort=None if request.reasoning is None else request.reasoning.effort),
    }


def _present(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}
