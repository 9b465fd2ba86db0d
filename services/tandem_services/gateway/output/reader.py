"""Splits the text of one output into parts: reasoning, content and tool calls.

text ──▶ reasoning parser ──▶ tool parser ──▶ later reasoning ──▶ parts
text ──▶ parser of channels ──────────────────────────────────▶ parts    of families that write messages on channels

OutputDialect   how a served model writes reasoning and tool calls. Chosen once when the gateway starts: by flag, or
                from the chat template, since a model is trained on what its template writes
OutputReading   the choice for one request
OutputReader    the state of one choice
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem_engine.messages.sampling import FIELD, ReasoningBudget
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_engine.tokenizer.vocabulary import Vocabulary
from tandem_services.common.errors import bad_request
from tandem_services.gateway.output.later_reasoning import LaterReasoning
from tandem_services.gateway.output.parts import CallArguments, CallBegin, Content, Part, Reasoning
from tandem_services.gateway.output.reasoning import (
    STYLES,
    MarkerIds,
    ReasoningParser,
    ReasoningStyle,
    detect_reasoning,
)
from tandem_services.gateway.output.tool_parsers.harmony import MARKERS, HarmonyParser
from tandem_services.gateway.output.tool_parsers.parser import Schemas, ToolParser
from tandem_services.gateway.output.tool_parsers.registry import FAMILIES, HARMONY, Channels, ToolFamily, detect_family
from tandem_services.gateway.output.tools import ToolUse


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputReading:
    """How the outputs of one request are read."""

    reasoning: ReasoningStyle | None = None
    opened: bool = False
    """The prompt ends inside the reasoning."""
    shows_reasoning: bool = True
    tool_parser: Callable[[Schemas], ToolParser] | None = None
    channels: bool = False
    """The output is messages on channels: `reasoning` is not used, and `tool_parser` is set if there may be calls."""
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
        return self.reasoning is None and self.tool_parser is None and not self.channels

    def new_reader(self) -> "OutputReader":
        if self.channels:
            return OutputReader(
                None,
                None,
                channels=HarmonyParser(self.schemas, calls=self.tool_parser is not None),
                shows_reasoning=self.shows_reasoning,
                parallel=self.parallel,
            )
        return OutputReader(
            None if self.reasoning is None else ReasoningParser(self.reasoning, opened=self.opened),
            None if self.tool_parser is None else self.tool_parser(self.schemas),
            later=self._later_reasoning(),
            shows_reasoning=self.shows_reasoning,
            parallel=self.parallel,
        )

    def _later_reasoning(self) -> LaterReasoning | None:
        style = self.reasoning
        return LaterReasoning(style.begin, style.end) if style is not None and style.repeats else None


PLAIN = OutputReading()
_PLAIN_WITHOUT_REASONING = OutputReading(shows_reasoning=False)


class OutputReader:
    """Reads one output."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        shows_reasoning: bool,
        parallel: bool,
        channels: HarmonyParser | None = None,
        later: LaterReasoning | None = None,
    ) -> None:
        self._channels = channels
        self._later = later
        self._reasoning = reasoning
        self._tools = tools
        self._shows_reasoning = shows_reasoning
        self._parallel = parallel

    @property
    def reasons(self) -> bool:
        """The newest text belongs to the reasoning."""
        readers = (self._channels, self._reasoning, self._later)
        return any(reader is not None and reader.reasons for reader in readers)

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        if self._channels is not None:
            return self._shown(self._channels.feed(text))
        if self._reasoning is None:
            return self._shown(self._answer(text))
        reasoning, rest = self._reasoning.feed(text)
        parts: list[Part] = [*reasoning, *self._answer(rest)]
        return self._shown(parts if self._later is None else self._later.feed(parts))

    def finish(self) -> list[Part]:
        """The rest, when the output has ended."""
        if self._channels is not None:
            return self._shown(self._channels.finish())
        parts: list[Part] = []
        if self._reasoning is not None:
            reasoning, rest = self._reasoning.finish()
            parts += [*reasoning, *self._answer(rest)]
        if self._tools is not None:
            parts += self._tools.finish()
        if self._later is not None:
            parts = [*self._later.feed(parts), *self._later.finish()]
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


AUTO = "auto"

_PROMPT_END_TOKENS = 16
"""Enough for a reasoning marker and the blanks after it, with any tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputDialect:
    """One model's."""

    vocabulary: Vocabulary
    family: ToolFamily | None
    reasoning: ReasoningStyle | None
    markers: MarkerIds | None
    """Those of the reasoning."""
    knows_tools: bool
    """Its chat template has a place for tools."""
    visible: frozenset[int]
    """Special tokens that are markers."""

    @property
    def channels(self) -> Channels | None:
        """Of a model whose outputs are messages on channels."""
        if self.family is not None and self.family.channels is not None:
            return self.family.channels
        return HARMONY if self.reasoning is not None and self.reasoning.channels else None

    @staticmethod
    def of(tokenizer: TextTokenizer, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> "OutputDialect":
        """By the names in `TOOL_CALL_PARSERS` and `REASONING_PARSERS`."""
        template = "" if tokenizer.chat_template is None else tokenizer.chat_template.text
        family = detect_family(template) if tool_call_parser == AUTO else FAMILIES.get(tool_call_parser)
        reasoning = detect_reasoning(template) if reasoning_parser == AUTO else STYLES.get(reasoning_parser)
        return OutputDialect(
            vocabulary=tokenizer.vocabulary,
            family=family,
            reasoning=reasoning,
            markers=None if reasoning is None else MarkerIds.of(reasoning, tokenizer),
            knows_tools=tokenizer.chat_template is not None and tokenizer.chat_template.knows_tools,
            visible=_visible(tokenizer.vocabulary, family, reasoning),
        )

    def budget(self, tokens: int | None) -> ReasoningBudget | None:
        """At most so many tokens of reasoning, in an output that the prompt has not opened. None for no bound.

        Raises `ApiError` 400 when this model has no reasoning, or none that is known.
        """
        if tokens is None:
            return None
        if self.markers is None:
            raise bad_request(
                f"{FIELD} needs a model whose reasoning has markers, and none are known of this one: leave it out, or "
                "name them to the gateway with --reasoning-parser",
                FIELD,
            )
        return self.markers.budget(tokens)

    def reading(
        self, prompt: Sequence[int], tools: ToolUse | None, *, constrained: bool, shows_reasoning: bool
    ) -> OutputReading:
        """How to read the outputs of `prompt`. `constrained`: a grammar holds from the first token on, so there is
        no reasoning, and no message on a channel."""
        if self.channels is not None and not constrained:
            return self._of_channels(tools, shows_reasoning=shows_reasoning)
        reasoning = None if constrained else self.reasoning
        if reasoning is None and tools is None:
            return PLAIN if shows_reasoning else _PLAIN_WITHOUT_REASONING
        return OutputReading(
            reasoning=reasoning,
            opened=reasoning is not None and reasoning.opened(self._end_of(prompt)),
            shows_reasoning=shows_reasoning,
            tool_parser=None if tools is None else tools.parser,
            schemas={} if tools is None else tools.schemas,
            parallel=tools is None or tools.parallel,
            visible=self.visible,
            call_id_characters=None if tools is None else tools.family.id_characters,
        )

    def _end_of(self, prompt: Sequence[int]) -> str:
        return self.vocabulary.decode(prompt[-_PROMPT_END_TOKENS:], skip_special_tokens=False)

    def _of_channels(self, tools: ToolUse | None, *, shows_reasoning: bool) -> OutputReading:
        return OutputReading(
            channels=True,
            shows_reasoning=shows_reasoning,
            tool_parser=None if tools is None else tools.parser,
            schemas={} if tools is None else tools.schemas,
            parallel=tools is None or tools.parallel,
            visible=self.visible,
        )


def _visible(vocabulary: Vocabulary, family: ToolFamily | None, reasoning: ReasoningStyle | None) -> frozenset[int]:
    markers = set() if family is None else set(family.markers)
    if reasoning is not None:
        markers |= set(MARKERS) if reasoning.channels else {reasoning.begin, reasoning.end, *reasoning.ended_by}
    spelled = tuple(marker.encode() for marker in markers)
    # A marker may begin with a token: `<|channel>` of `<|channel>thought`.
    return frozenset(
        token
        for token in vocabulary.special_ids
        if (text := vocabulary.bytes_of(token)) and any(marker.startswith(text) for marker in spelled)
    )
