"""Reads requests into token ids with the gateway's own code, so that their prefixes equal those of the gateway.

For a model with a tokenizer here, text, messages and whole OpenAI requests can be read. Token ids are accepted for any
model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.base.logs import quoted
from tandem_services.common.errors import bad_request, not_found, unavailable
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.api.anthropic.requests import MessagesPlanner
from tandem_services.gateway.api.chat import ChatPlanner, template_messages
from tandem_services.gateway.api.completions import CompletionPlanner
from tandem_services.gateway.api.response_writer import Planner
from tandem_services.gateway.api.responses.requests import ResponsesPlanner
from tandem_services.gateway.dispatch.plan import GenerationPlan
from tandem_services.gateway.dispatch.sessions import SessionManager
from tandem_services.gateway.http.body import decode_body
from tandem_services.gateway.limits import check_context, check_token_ids
from tandem_services.gateway.models.model import ServedModel
from tandem_services.gateway.models.prompts import PromptEncoder
from tandem_services.router_server.schemas import ChooseAsk

RETRY_S = 2.0
"""For front ends: a tokenizer is looked for about as often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelReader:
    """One model's `ReadModel`."""

    model: ServedModel
    prompts: PromptEncoder
    session_manager: SessionManager


class ReadRequest(NamedTuple):
    """An OpenAI or Anthropic request, read."""

    model: str
    """The model's own name, whichever of its names the request has."""
    plan: GenerationPlan


def planners() -> dict[str, Planner[Any]]:
    """By path, as a gateway has them. Unknown fields are the gateway's business."""
    chats, answers = ChatPlanner(strict=False), ChatPlanner(strict=False, fewest_tokens=1)
    every: tuple[Planner[Any], ...] = (
        chats,
        CompletionPlanner(strict=False),
        ResponsesPlanner(answers, strict=False),
        MessagesPlanner(answers, strict=False),
    )
    return {planner.endpoint: planner for planner in every}


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestReading:
    """Reads for all models that a router has tokenizers of, by each of their names."""

    models: dict[str, ModelReader]
    awaited: dict[str, str] = field(default_factory=dict)
    """Names of models whose workers have not sent their tokenizer yet, with the models' own names."""
    planners: Mapping[str, Planner[Any]] = field(default_factory=planners)

    def add(self, reader: ModelReader) -> None:
        """From now on requests of this model are read with it, also where there was another one."""
        self.models.update(dict.fromkeys(reader.model.names, reader))
        for name in reader.model.names:
            self.awaited.pop(name, None)

    def own_name(self, name: str) -> str:
        """What workers call the model that clients call `name`; the same where it is not known here."""
        reader = self.models.get(name)
        return self.awaited.get(name, name) if reader is None else reader.model.name

    async def prompt(self, ask: ChooseAsk) -> tuple[int, ...]:
        """Prompt tokens of a checked `ask`. Raises `ApiError` 400 if it is invalid, 404 without a tokenizer, 503 before
        workers have sent it.
        """
        reader = self.models.get(ask.model)
        if ask.token_ids is not None:
            if reader is not None:
                check_token_ids(ask.token_ids, reader.prompts.tokenizer.vocab_size, "token_ids")
            return tuple(ask.token_ids)
        if ask.model in self.awaited:
            raise unavailable(
                f"The model '{quoted(ask.model)}' is not read yet: no worker has sent its tokenizer.",
                retry_after=RETRY_S,
            )
        if reader is None:
            raise not_found(
                f"This router has no tokenizer of the model '{quoted(ask.model)}'. Send token_ids, or give it --model.",
                "model",
                reason="model_not_found",
            )
        if ask.prompt is not None:
            ids, param = (
                await reader.prompts.encode(
                    ask.prompt, add_special_tokens=True, parse_special_tokens=reader.prompts.parse_special_tokens
                ),
                "prompt",
            )
        else:
            on_channels = reader.model.dialect.channels is not None
            messages, param = template_messages(ask.messages, on_channels=on_channels), "messages"
            ids = await reader.prompts.encode_chat(
                messages, add_generation_prompt=True, add_special_tokens=False, variables={}
            )
        check_context(len(ids), 0, reader.prompts.context_length(), param)
        return ids

    async def request(self, path: str, body: bytes, caller: Caller) -> ReadRequest | None:
        """The content of a request for text; None for what is not read here: other paths, other models, and
        models whose tokenizer is awaited.

        Raises `ApiError` as the gateway would refuse it.
        """
        planner = self.planners.get(path)
        if planner is None:
            return None
        request = await decode_body(planner.decode, body)
        name = request.model or ""
        reader = self.models.get(name)
        if reader is None or name not in reader.model.names_for(caller):
            # The gateway rejects it, or serves it.
            return None
        try:
            plan = await planner.plan(request, reader, caller)
        except InvalidRequestError as error:
            raise bad_request(str(error), error.param) from error
        return ReadRequest(reader.model.name, plan.owned_by(caller))
