"""Responses of `POST /v1/responses`: response objects, and the events of a stream in OpenAI's order.

    created ─▶ in_progress ─▶ events of items ─▶ completed or incomplete; failed if the request fails

`ResponsesFormat` writes both. `OutputItems` keeps the output items in the order in which the model wrote them:

    1. added    first part of an item: `response.output_item.added`; text items then get their one content part
    2. grows    each further part: a delta
    3. done     another item begins or the output ends: the whole text, the content part, the item
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem_services.common.errors import ApiError
from tandem_services.gateway.api.chat_answer import call_id
from tandem_services.gateway.api.interface import WholeChoice
from tandem_services.gateway.api.openai_schemas import Usage
from tandem_services.gateway.api.responses.schemas import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from tandem_services.gateway.dispatch.plan import Choice, GenerationPlan
from tandem_services.gateway.http.sse import encode_json, named_event
from tandem_services.gateway.output.choice_text import ChoiceFinish, ChoicePiece
from tandem_services.gateway.output.later_reasoning import SEPARATOR
from tandem_services.gateway.output.parts import CallArguments, CallBegin, Content, Part, Reasoning

Event = dict[str, Any]
"""`type` and what belongs to it; sequence numbers come later."""


@dataclass(kw_only=True, slots=True)
class _OpenItem:
    """`kind`: message, reasoning or function_call."""

    kind: str
    id: str
    index: int
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    def item(self, status: ItemStatus) -> OutputItem:
        text = "".join(self.pieces)
        begun = status == "in_progress"
        match self.kind:
            case "function_call":
                arguments = "" if begun else text
                return FunctionCallItem(
                    id=self.id, status=status, call_id=self.call_id, name=self.name, arguments=arguments
                )
            case "reasoning":
                return ReasoningItem(id=self.id, status=status, content=[] if begun else [ReasoningText(text=text)])
            case _:
                return MessageItem(id=self.id, status=status, content=[] if begun else [OutputText(text=text)])

    def content(self, text: str) -> OutputText | ReasoningText:
        return ReasoningText(text=text) if self.kind == "reasoning" else OutputText(text=text)

    @property
    def text_event(self) -> str:
        """Name of the events of its text, without `delta` or `done`."""
        return "response.reasoning_text" if self.kind == "reasoning" else "response.output_text"

    @property
    def place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self.id, "output_index": self.index}
        return place if self.kind == "function_call" else {**place, "content_index": 0}

    @property
    def extra(self) -> dict[str, Any]:
        """What events of an answer's text carry besides."""
        return {"logprobs": []} if self.kind == "message" else {}


class OutputItems:
    """Items of one response, from its parts."""

    def __init__(self, answer_id: str) -> None:
        self._answer_id = answer_id
        self._open: _OpenItem | None = None
        self._kinds: set[str] = set()
        """Of the items that have begun."""
        self.done: list[OutputItem] = []

    def add(self, parts: Sequence[Part]) -> list[Event]:
        return [event for part in parts for event in self._add(part)]

    def finish(self, *, complete: bool) -> list[Event]:
        """The end of the output; `complete` is false when it was cut."""
        return self._close("completed" if complete else "incomplete")

    def _add(self, part: Part) -> list[Event]:
        match part:
            case Content(text):
                return self._text("message", "msg", text)
            case Reasoning(text):
                return self._text("reasoning", "rs", text)
            case CallBegin(index, name):
                call = call_id(self._answer_id, 0, index, None)
                return [*self._close("completed"), *self._begin("function_call", "fc", name=name, call=call)]
            case CallArguments(_, text):
                return [self._delta(text)]

    def _text(self, kind: str, prefix: str, text: str) -> list[Event]:
        """`text` at the end of the open item, or in a new one of `kind`."""
        if self._open is not None and self._open.kind == kind:
            return [self._delta(text)]
        own = text.removeprefix(SEPARATOR) if kind in self._kinds else text
        return [*self._close("completed"), *self._begin(kind, prefix), self._delta(own)]

    def _begin(self, kind: str, prefix: str, *, name: str = "", call: str = "") -> list[Event]:
        index = len(self.done)
        self._kinds.add(kind)
        item_id = f"{prefix}_{self._answer_id.removeprefix('resp_')}_{index}"
        self._open = item = _OpenItem(kind=kind, id=item_id, index=index, name=name, call_id=call)
        added = {"type": "response.output_item.added", "output_index": index, "item": item.item("in_progress")}
        if kind == "function_call":
            return [added]
        return [added, {"type": "response.content_part.added", **item.place, "part": item.content("")}]

    def _delta(self, text: str) -> Event:
        item = self._open
        assert item is not None, "text without an item"
        item.pieces.append(text)
        if item.kind == "function_call":
            return {"type": "response.function_call_arguments.delta", **item.place, "delta": text}
        return {"type": f"{item.text_event}.delta", **item.place, "delta": text, **item.extra}

    def _close(self, status: ItemStatus) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        whole = item.item(status)
        self.done.append(whole)
        done = {"type": "response.output_item.done", "output_index": item.index, "item": whole}
        text = "".join(item.pieces)
        if item.kind == "function_call":
            arguments = {"name": item.name, "arguments": text}
            return [{"type": "response.function_call_arguments.done", **item.place, **arguments}, done]
        return [
            {"type": f"{item.text_event}.done", **item.place, "text": text, **item.extra},
            {"type": "response.content_part.done", **item.place, "part": item.content(text)},
            done,
        ]


class ResponsesFormat:
    """Implements `AnswerFormat`."""

    text_events = None

    def __init__(self, answer_id: str, created: int, plan: GenerationPlan) -> None:
        self._id = answer_id
        self._created = created
        self._plan = plan
        self._items = OutputItems(answer_id)
        self._finish: ChoiceFinish | None = None
        self._sequence = 0

    def opening(self, choice: Choice, first: ChoicePiece, usage: Usage | None) -> bytes:
        del choice, first, usage
        begun = self._response("in_progress")
        return self._events(
            [{"type": "response.created", "response": begun}, {"type": "response.in_progress", "response": begun}]
        )

    def chunk(self, piece: ChoicePiece, usage: Usage | None) -> bytes:
        del usage
        events = self._items.add(piece.parts)
        if piece.finish is not None:
            events += self._end(piece.finish)
        return self._events(events)

    def closing(self, usage: Usage) -> bytes:
        response = self._finished(usage)
        return self._events([{"type": f"response.{response.status}", "response": response}])

    def failure(self, refusal: ApiError) -> bytes:
        error = ResponseError(code="server_error", message=str(refusal))
        return self._events([{"type": "response.failed", "response": self._response("failed", error=error)}])

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        (choice,) = choices
        assert choice.finish is not None, "the output has not ended"
        self._items.add(choice.parts)
        self._end(choice.finish)
        return encode_json(self._finished(usage))

    def _end(self, finish: ChoiceFinish) -> list[Event]:
        self._finish = finish
        return self._items.finish(complete=finish.reason != "length")

    def _finished(self, usage: Usage) -> ResponseObject:
        assert self._finish is not None, "the output has not ended"
        if self._finish.reason == "length":
            return self._response("incomplete", usage=_usage(usage), incomplete_details=IncompleteDetails())
        return self._response("completed", usage=_usage(usage))

    def _response(self, status: ResponseStatus, **ending: Any) -> ResponseObject:
        """`ending`: what its status brings with it."""
        return ResponseObject(
            id=self._id,
            created_at=self._created,
            status=status,
            model=self._plan.model,
            output=[*self._items.done],
            **self._plan.repeated,
            **ending,
        )

    def _events(self, events: list[Event]) -> bytes:
        return b"".join([self._event(event) for event in events])

    def _event(self, event: Event) -> bytes:
        self._sequence += 1
        return named_event(event["type"], encode_json({**event, "sequence_number": self._sequence - 1}))


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
