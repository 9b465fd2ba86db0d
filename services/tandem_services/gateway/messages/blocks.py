"""The content of an answer: blocks in the order in which the model wrote them, and the events of their making.

Life of a block
    1. started   at its first part: `content_block_start`, with nothing in it
    2. grows     a `content_block_delta` for each further part
    3. stopped   another block begins, or the output has ended: `content_block_stop`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem_services.gateway.chat_format import call_id
from tandem_services.gateway.output_parts import CallArguments, CallBegin, Content, Part, Reasoning

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
        self.done: list[dict[str, Any]] = []

    def add(self, parts: Sequence[Part]) -> list[Event]:
        return [event for part in parts for event in self._add(part)]

    def finish(self, *, cut: bool) -> list[Event]:
        """The end of the output; `cut`: by its length."""
        return self._stop(cut=cut)

    def _add(self, part: Part) -> list[Event]:
        match part:
            case Content(text):
                return [*self._continue({"type": "text", "text": ""}), self._delta(text)]
            case Reasoning(text):
                # Signatures prove where thinking comes from. Here it may be sent back without one.
                return [*self._continue({"type": "thinking", "thinking": "", "signature": ""}), self._delta(text)]
            case CallBegin(index, name):
                call = call_id(self._answer_id, 0, index, self._call_id_characters)
                head = {"type": "tool_use", "id": call.replace("call_", "toolu_"), "name": name, "input": {}}
                events = self._stop(cut=False)
                self._call = head
                return events
            case CallArguments(_, text):
                begun, self._call = self._call, None
                return [*([] if begun is None else [self._start(begun)]), self._delta(text)]

    def _continue(self, head: dict[str, Any]) -> list[Event]:
        if self._open is not None and self._open.kind == head["type"]:
            return []
        return [*self._stop(cut=False), self._start(head)]

    def _start(self, head: dict[str, Any]) -> Event:
        self._open = _OpenBlock(index=self._begun, head=head)
        self._begun += 1
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
