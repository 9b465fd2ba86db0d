"""Tool-call parsers by their name in `--tool-call-parser`, and detection of the one that a model needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tandem_services.gateway.output.tool_parsers import (
    gemma4,
    harmony,
    hermes,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from tandem_services.gateway.output.tool_parsers.parser import Schemas, ToolParser


@dataclass(frozen=True, kw_only=True, slots=True)
class Channels:
    """How a family writes messages on channels. Its parser reads all of an output, reasoning and content too."""

    markers: tuple[str, ...]
    call: str
    """What a call of the tool `{name}` begins with; its arguments and nothing else follow."""
    answer: str
    """What an answer begins with."""
    thoughts: tuple[str, str]
    """What is around reasoning before either of them; two empty texts: no reasoning comes before."""

    def after_reasoning(self) -> "Channels":
        """For grammars that hold from the end of the reasoning on."""
        return replace(self, thoughts=("", ""))


HARMONY = Channels(
    markers=harmony.MARKERS, call=harmony.CALL_BEGIN, answer=harmony.ANSWER_BEGIN, thoughts=harmony.THOUGHTS
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFamily:
    """How a family of models writes tool calls."""

    name: str
    parser: Callable[[Schemas], ToolParser]
    markers: tuple[str, ...]
    """Texts that the parser looks for. Some tokenizers have them as special tokens."""
    hint: str
    """What the chat templates of the family have in them."""
    id_characters: int | None = None
    """Templates that take ids of just this length; None: of any."""
    tag: tuple[str, str, str] | None = None
    """(trigger, text before the arguments, text after them), where a call is one text with JSON in it."""
    reasoning: tuple[str, str] | None = None
    """What is around reasoning, where these are control tokens: a grammar has to allow them before calls."""
    separator: str = "\n"
    """Between the calls of one output, in that form."""
    channels: Channels | None = None
    """Where all of an output is messages."""

    def after_reasoning(self) -> "ToolFamily":
        """For grammars that hold from the end of the reasoning on."""
        return replace(self, reasoning=None)


FAMILIES: Mapping[str, ToolFamily] = {
    family.name: family
    for family in (
        ToolFamily(
            name="openai",
            parser=harmony.HarmonyParser,
            markers=harmony.MARKERS,
            hint=harmony.HINT,
            channels=HARMONY,
        ),
        ToolFamily(
            name="gemma4",
            parser=gemma4.Gemma4Parser,
            markers=gemma4.MARKERS,
            hint=gemma4.BEGIN,
            tag=gemma4.TAG,
            reasoning=gemma4.REASONING,
            separator="",
        ),
        ToolFamily(
            name="qwen3_coder",
            parser=qwen3_coder.Qwen3CoderParser,
            markers=(qwen3_coder.WRAP, qwen3_coder.UNWRAP),
            hint="<function=",
        ),
        ToolFamily(
            name="hermes",
            parser=hermes.HermesParser,
            markers=(hermes.BEGIN, hermes.END),
            hint="<tool_call>",
            tag=(hermes.BEGIN, '<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"),
        ),
        ToolFamily(
            name="mistral",
            parser=mistral.MistralParser,
            markers=(mistral.BEGIN, "[ARGS]", "[CALL_ID]"),
            hint=mistral.BEGIN,
            id_characters=9,
        ),
        ToolFamily(
            name="pythonic",
            parser=pythonic.PythonicParser,
            markers=(pythonic.TAG,),
            hint="func_name1(",
        ),
        ToolFamily(
            name="llama3_json",
            parser=llama3_json.Llama3JsonParser,
            markers=(llama3_json.TAG,),
            hint='"parameters"',
            tag=('{"name": ', '{{"name": "{name}", "parameters": ', "}"),
            separator="; ",
        ),
    )
}
"""In the order in which templates are looked at."""

TOOL_CALL_PARSERS = ("auto", "none", *sorted(FAMILIES))


def detect_family(template: str) -> ToolFamily | None:
    """The family of a model by its chat template; None when no family is recognized."""
    return next((family for family in FAMILIES.values() if family.hint in template), None)
