"""How the outputs of a served model are written: its reasoning and its tool calls.

Decided once, when the gateway starts: by flag, or by what the chat template does with tools and reasoning, since a
model is trained on what its template writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_engine.messages.reasoning import FIELD, ReasoningBudget
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_engine.tokenizer.vocabulary import Vocabulary
from tandem_services.common.errors import bad_request
from tandem_services.gateway.output_reader import OutputReading
from tandem_services.gateway.reasoning import STYLES, MarkerIds, ReasoningStyle, detect_reasoning
from tandem_services.gateway.tool_parsers.registry import FAMILIES, ToolFamily, detect_family
from tandem_services.gateway.tools import ToolUse

AUTO = "auto"
_PROMPT_END_TOKENS = 16
"""Enough to hold a reasoning marker and the blanks behind it, whatever the tokenizer."""


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
        """At most so many tokens of reasoning, in an output that nobody has opened. None for no bound.

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
        no reasoning."""
        reasoning = None if constrained else self.reasoning
        end = self.vocabulary.decode(prompt[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
        return OutputReading(
            reasoning=reasoning,
            opened=reasoning is not None and reasoning.opened(end),
            shows_reasoning=shows_reasoning,
            tool_parser=None if tools is None else tools.parser,
            schemas={} if tools is None else tools.schemas,
            parallel=tools is None or tools.parallel,
            visible=self.visible if reasoning is not None or tools is not None else frozenset(),
            call_id_characters=None if tools is None else tools.family.id_characters,
        )


def _visible(vocabulary: Vocabulary, family: ToolFamily | None, reasoning: ReasoningStyle | None) -> frozenset[int]:
    markers = set() if family is None else set(family.markers)
    if reasoning is not None:
        markers |= {reasoning.begin, reasoning.end}
    spelled = {marker.encode() for marker in markers}
    return frozenset(token for token in vocabulary.special_ids if vocabulary.bytes_of(token) in spelled)
