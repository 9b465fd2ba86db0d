"""From the text of one output to its parts: first the reasoning, then content and tool calls.

    text ──▶ reasoning parser ──▶ tool parser ──▶ parts

`OutputReading` is decided with the request and makes one `OutputReader` for each choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem_services.gateway.output_parts import CallArguments, CallBegin, Content, Part, Reasoning
from tandem_services.gateway.reasoning import ReasoningParser, ReasoningStyle
from tandem_services.gateway.tool_parsers.parser import Schemas, ToolParser


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputReading:
    """How the outputs of one request are read."""

    reasoning: ReasoningStyle | None = None
    opened: bool = False
    """The prompt ends inside the reasoning."""
    shows_reasoning: bool = True
    tool_parser: Callable[[Schemas], ToolParser] | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True
    """False: calls after the first are left out."""
    call_id_characters: int | None = None
    """Length of the ids of calls, where the chat template insists on one."""
    visible: frozenset[int] = frozenset()
    """Special tokens that are markers: their text is needed although special tokens are not shown."""

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return self.reasoning is None and self.tool_parser is None

    def new_reader(self) -> "OutputReader":
        return OutputReader(
            None if self.reasoning is None else ReasoningParser(self.reasoning, opened=self.opened),
            None if self.tool_parser is None else self.tool_parser(self.schemas),
            shows_reasoning=self.shows_reasoning,
            parallel=self.parallel,
        )


PLAIN = OutputReading()


class OutputReader:
    """Reads one output."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        shows_reasoning: bool,
        parallel: bool,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._shows_reasoning = shows_reasoning
        self._parallel = parallel

    @property
    def reasons(self) -> bool:
        """The newest text belongs to the reasoning."""
        return self._reasoning is not None and self._reasoning.reasons

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` decides."""
        if self._reasoning is None:
            return self._shown(self._answer(text))
        reasoning, rest = self._reasoning.feed(text)
        return self._shown([*reasoning, *self._answer(rest)])

    def finish(self) -> list[Part]:
        """The rest, when the output has ended."""
        parts: list[Part] = []
        if self._reasoning is not None:
            reasoning, rest = self._reasoning.finish()
            parts += [*reasoning, *self._answer(rest)]
        if self._tools is not None:
            parts += self._tools.finish()
        return self._shown(parts)

    def _answer(self, text: str) -> list[Part]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._tools.feed(text)

    def _shown(self, parts: list[Part]) -> list[Part]:
        return [part for part in parts if self._is_shown(part)]

    def _is_shown(self, part: Part) -> bool:
        match part:
            case Reasoning():
                return self._shows_reasoning
            case CallBegin(index) | CallArguments(index):
                return self._parallel or index == 0
            case Content():
                return True
