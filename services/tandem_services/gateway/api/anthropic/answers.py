"""Responses of `POST /v1/messages`: message objects, and the events of a stream in Anthropic's order.

    message_start ─▶ ping ─▶ events of blocks ─▶ message_delta ─▶ message_stop; `error` if the request fails

`MessagesFormat` writes both. `OutputBlocks` keeps the content blocks in the order in which the model wrote them:

    1. started   first part of a block: `content_block_start`, without content
    2. grows     each further part: `content_block_delta`
    3. stopped   another block begins or the output ends: `content_block_stop`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from tandem_services.common.errors import ApiError
from tandem_services.gateway.api.anthropic.schemas import MessagesModel, MessagesModelList
from tandem_services.gateway.api.chat_answer import call_id
from tandem_services.gateway.api.interface import WholeChoice
from tandem_services.gateway.api.openai_schemas import Usage
from tandem_services.gateway.dispatch.plan import Choice, GenerationPlan
from tandem_services.gateway.http.errors import anthropic_error
from tandem_services.gateway.http.sse import encode_json, named_event
from tandem_services.gateway.models.model import ModelCard, ModelList
from tandem_services.gateway.output.choice_text import ChoiceFinish, ChoicePiece
from tandem_services.gateway.output.later_reasoning import SEPARATOR
from tandem_services.gateway.output.parts import CallArguments, CallBegin, Content, Part, Reasoning

Event = dict[str, Any]
"""`type` and what belongs to it."""

_DELTAS: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block → type of its deltas and the field that their text is in."""


@dataclass(kw_only=True, slots=True)
class _OpenBlock:
    """`head`: the block with nothing in it."""

    index: int
    head: dict[str, Any]
    pieces: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        kind: str = self.head["type"]
        return kind

    def whole(self, *, cut: bool) -> dict[str, Any] | None:
        """None for a call that was cut in the middle of its input: no client should execute it.

        `input` must be an object. Other text becomes {"INVALID_JSON": text}, the form that Anthropic's documentation
        of fine-grained tool streaming gives to input that is not valid.
        """
        text = "".join(self.pieces)
        if self.kind != "tool_use":
            return {**self.head, self.kind: text}
        arguments = _json_object(text)
        if arguments is None:
            return None if cut else {**self.head, "input": {"INVALID_JSON": text}}
        return {**self.head, "input": arguments}


class OutputBlocks:
    """Blocks of one answer, from its parts. `call_id_characters`: see `OutputReading`."""

    def __init__(self, answer_id: str, *, call_id_characters: int | None) -> None:
        self._answer_id = answer_id
        self._call_id_characters = call_id_characters
        self._open: _OpenBlock | None = None
        self._call: dict[str, Any] | None = None
        """A call of which no input has arrived. Clients take a block without input for one with `{}`."""
        self._begun = 0
        self._kinds: set[str] = set()
        """Of the blocks that have begun."""
        self.done: list[dict[str, Any]] = []

    def add(self, parts: Sequence[Part]) -> list[Event]:
        return [event for part in parts for event in self._add(part)]

    def finish(self, *, cut: bool) -> list[Event]:
        """The end of the output; `cut`: by its length."""
        return self._stop(cut=cut)

    def _add(self, part: Part) -> list[Event]:
        match part:
            case Content(text):
                return self._text({"type": "text", "text": ""}, text)
            case Reasoning(text):
                # Signatures prove where thinking comes from. Here it may be sent back without one.
                return self._text({"type": "thinking", "thinking": "", "signature": ""}, text)
            case CallBegin(index, name):
                call = call_id(self._answer_id, 0, index, self._call_id_characters)
                head = {"type": "tool_use", "id": call.replace("call_", "toolu_"), "name": name, "input": {}}
                events = self._stop(cut=False)
                self._call = head
                return events
            case CallArguments(_, text):
                begun, self._call = self._call, None
                return [*([] if begun is None else [self._start(begun)]), self._delta(text)]

    def _text(self, head: dict[str, Any], text: str) -> list[Event]:
        """`text` at the end of the open block, or in a new one that begins with `head`."""
        if self._open is not None and self._open.kind == head["type"]:
            return [self._delta(text)]
        own = text.removeprefix(SEPARATOR) if head["type"] in self._kinds else text
        return [*self._stop(cut=False), self._start(head), self._delta(own)]

    def _start(self, head: dict[str, Any]) -> Event:
        self._open = _OpenBlock(index=self._begun, head=head)
        self._begun += 1
        self._kinds.add(head["type"])
        return {"type": "content_block_start", "index": self._open.index, "content_block": head}

    def _delta(self, text: str) -> Event:
        block = self._open
        assert block is not None, "text without a block"
        block.pieces.append(text)
        kind, name = _DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def _stop(self, *, cut: bool) -> list[Event]:
        block, self._open, self._call = self._open, None, None
        if block is None:
            return []
        whole = block.whole(cut=cut)
        if whole is not None:
            self.done.append(whole)
        return [{"type": "content_block_stop", "index": block.index}]


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    return value if isinstance(value, dict) else None


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """Implements `AnswerFormat`. Its plan requires usage with every piece, so that a stream can begin with it."""

    text_events = None

    def __init__(self, request_id: str, plan: GenerationPlan) -> None:
        self._request_id = request_id
        self._id = f"msg_{request_id}"
        self._model = plan.model
        self._blocks = OutputBlocks(self._id, call_id_characters=plan.reading.call_id_characters)
        self._finish: ChoiceFinish | None = None

    def opening(self, choice: Choice, first: ChoicePiece, usage: Usage | None) -> bytes:
        del choice, first
        assert usage is not None, "planned without usage"
        return _events([{"type": "message_start", "message": self._message(usage)}, {"type": "ping"}])

    def chunk(self, piece: ChoicePiece, usage: Usage | None) -> bytes:
        del usage
        events = self._blocks.add(piece.parts)
        if piece.finish is not None:
            events += self._end(piece.finish)
        return _events(events)

    def closing(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self._stopped(), "usage": _usage(usage)}
        return _events([delta, {"type": "message_stop"}])

    def failure(self, refusal: ApiError) -> bytes:
        return named_event("error", anthropic_error(refusal, self._request_id))

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        (choice,) = choices
        assert choice.finish is not None, "the output has not ended"
        self._blocks.add(choice.parts)
        self._end(choice.finish)
        return encode_json({**self._message(usage), "content": self._blocks.done, **self._stopped()})

    def _end(self, finish: ChoiceFinish) -> list[Event]:
        self._finish = finish
        return self._blocks.finish(cut=finish.reason == "length")

    def _message(self, usage: Usage) -> dict[str, Any]:
        """Before anything is in it."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _stopped(self) -> dict[str, Any]:
        assert self._finish is not None, "the output has not ended"
        reason, stop = self._finish.reason, self._finish.stop
        if reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if reason == "tool_calls" and not any(block["type"] == "tool_use" for block in self._blocks.done):
            # No call had input that could be read, so the message has no block to execute.
            return {"stop_reason": "end_turn", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def _events(events: list[Event]) -> bytes:
    return b"".join([named_event(event["type"], encode_json(event)) for event in events])


def _usage(usage: Usage) -> dict[str, Any]:
    """Here `input_tokens` are those that were not in a cache."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens},
    }


HEADER = "anthropic-version"


def models_answer(
    answer: ModelList | ModelCard, headers: Mapping[str, str]
) -> ModelList | ModelCard | MessagesModelList | MessagesModel:
    """`answer` in the shape that the client with these headers reads."""
    if HEADER not in headers:
        return answer
    if isinstance(answer, ModelCard):
        return _model(answer)
    models = [_model(card) for card in answer.data]
    return MessagesModelList(
        data=models, first_id=models[0].id if models else None, last_id=models[-1].id if models else None
    )


def _model(card: ModelCard) -> MessagesModel:
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return MessagesModel(id=card.id, display_name=card.id, created_at=created)
