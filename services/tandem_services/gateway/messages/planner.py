"""`POST /v1/messages`: planned as the chat that means the same, answered in Anthropic's form. Nothing is kept."""

import re
from dataclasses import replace

from tandem_services.common.errors import bad_request
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.answer_format import AnswerFormat
from tandem_services.gateway.chat import ChatPlanner
from tandem_services.gateway.messages.conversation import chat_request
from tandem_services.gateway.messages.errors import PATH
from tandem_services.gateway.messages.format import MessagesFormat
from tandem_services.gateway.messages.schemas import MessagesRequest
from tandem_services.gateway.plan import GenerationPlan
from tandem_services.gateway.read_model import ReadModel
from tandem_services.gateway.renamed_fields import renamed_fields
from tandem_services.gateway.request_body import BodyDecoder

_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "user": "metadata.user_id",
}
"""Fields of chats under their names here."""


class MessagesPlanner:
    """Implements `Planner`."""

    endpoint = PATH

    def __init__(self, chats: ChatPlanner, *, strict: bool) -> None:
        self._chats = chats
        self._decoder = BodyDecoder(MessagesRequest, strict=strict, closed=True)

    def decode(self, body: bytes) -> MessagesRequest:
        return self._decoder.decode(body)

    async def plan(self, request: MessagesRequest, served: ReadModel, caller: Caller) -> GenerationPlan:
        """Raises `ApiError` or `InvalidRequestError` naming the field at fault."""
        if request.max_tokens is None:
            raise bad_request("max_tokens is required", "max_tokens")
        chat = chat_request(request)
        if served.model.dialect.reasoning is None:
            # Clients ask whatever model they speak to for thinking.
            chat.thinking_token_budget = None
        with renamed_fields(field_name):
            plan = await self._chats.plan(chat, served, caller)
        return replace(plan, continuous_usage=True, grammar_field=field_name(plan.grammar_field))

    async def count(self, request: MessagesRequest, served: ReadModel) -> int:
        """Tokens of its prompt. Raises as `plan`."""
        chat = chat_request(request)
        with renamed_fields(field_name):
            return len(await self._chats.encode(chat, served))

    def format(self, plan: GenerationPlan, served: ReadModel, request_id: str, created: int) -> AnswerFormat:
        del served, created  # a message says nothing about single tokens, nor when it was written
        return MessagesFormat(request_id, plan)


def field_name(param: str | None) -> str | None:
    """What clients of this endpoint call a field of a chat request."""
    if param is None:
        return None
    if param.startswith("messages"):
        return "messages"
    if param.startswith("json_schema") or param.startswith("response_format"):
        return "output_config.format"
    tool = re.fullmatch(r"(tools\[\d+\])\.function\.(\w+)(.*)", param)
    if tool is not None:
        return f"{tool[1]}.{'input_schema' if tool[2] == 'parameters' else tool[2]}{tool[3]}"
    return _NAMES.get(param, param)
