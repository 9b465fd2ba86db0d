"""Extracts reasoning: the text between two markers that a model writes before its answer. `later_reasoning` reads what
some models write after they have begun to answer.

The chat template may already open the reasoning at the end of the prompt, or close it at once (`enable_thinking`
false). Otherwise the model writes the first marker itself, or omits it in families that always reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tandem_engine.messages.sampling import ReasoningBudget
from tandem_services.gateway.output.parts import Part, Reasoning
from tandem_services.gateway.output.tool_parsers import gemma4, harmony
from tandem_services.gateway.output.tool_parsers.parser import find_marker

if TYPE_CHECKING:  # the command line lists the parsers, and starts without tokenizers
    from tandem_engine.tokenizer.text_tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningStyle:
    """How a family of models marks its reasoning."""

    begin: str
    end: str
    always: bool
    """Outputs begin with reasoning even when the prompt has not opened it."""
    ended_by: tuple[str, ...] = ()
    """Markers that end reasoning without `end`, and belong to what is behind it."""
    channels: bool = False
    """All of an output is messages on channels, which `harmony.HarmonyParser` reads."""
    repeats: bool = False
    """Reasoning may begin again after content and calls."""

    def opened(self, prompt_end: str) -> bool:
        """Whether an output after this prompt begins with reasoning."""
        solid = prompt_end.rstrip()
        if solid.endswith(self.begin):
            return True
        return self.always and not solid.endswith(self.end)


STYLES: Mapping[str, ReasoningStyle] = {
    "openai_gptoss": ReasoningStyle(begin=harmony.THOUGHTS[0], end=harmony.THOUGHTS[1], always=False, channels=True),
    "deepseek_r1": ReasoningStyle(begin="<think>", end="</think>", always=True),
    "qwen3": ReasoningStyle(begin="<think>", end="</think>", always=False),
    "gemma4": ReasoningStyle(
        begin=gemma4.REASONING[0], end=gemma4.REASONING[1], always=False, ended_by=(gemma4.BEGIN,), repeats=True
    ),
    "mistral": ReasoningStyle(begin="[THINK]", end="[/THINK]", always=False),
}
"""By the name of `--reasoning-parser`."""

REASONING_PARSERS = ("auto", "none", *sorted(STYLES))


def detect_reasoning(template: str) -> ReasoningStyle | None:
    """The style of a model by its chat template; None when it does not mention reasoning."""
    if harmony.HINT in template:
        return STYLES["openai_gptoss"]
    if STYLES["gemma4"].end in template:
        return STYLES["gemma4"]
    if "[THINK]" in template:
        return STYLES["mistral"]
    if "</think>" not in template:
        return None
    return STYLES["deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"]


class MarkerIds(NamedTuple):
    """A style's markers in the tokens of one model."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    ended_by: tuple[int, ...] = ()
    """Of the markers of `ReasoningStyle.ended_by`, those that are one token."""

    @staticmethod
    def of(style: ReasoningStyle, tokenizer: "TextTokenizer") -> "MarkerIds":
        begin, end, *others = (
            tuple(tokenizer.encode(text, add_special_tokens=False))
            for text in (style.begin, style.end, *style.ended_by)
        )
        return MarkerIds(begin, end, tuple(marker[0] for marker in others if len(marker) == 1))

    def budget(self, tokens: int) -> ReasoningBudget:
        """Of an output that the prompt has not opened."""
        return ReasoningBudget(tokens=tokens, begin=self.begin, end=self.end, ended_by=self.ended_by)


class Cut(NamedTuple):
    """What a piece of text became."""

    reasoning: list[Part]
    rest: str
    """Text after the reasoning."""


class ReasoningParser:
    """Reads one output. Blanks around the reasoning belong to its markers."""

    __slots__ = ("_at", "_buffer", "_style")

    def __init__(self, style: ReasoningStyle, *, opened: bool) -> None:
        self._style = style
        self._buffer = ""
        self._at = "opened" if opened else "start"

    @property
    def reasons(self) -> bool:
        """The newest text belongs to the reasoning."""
        return self._at in ("opened", "before", "inside")

    def feed(self, text: str) -> Cut:
        self._buffer += text
        cut = Cut([], "")
        while True:
            at = self._at
            cut = self._step(cut)
            if self._at == at:
                return cut

    def finish(self) -> Cut:
        """The rest, when the output has ended."""
        rest, self._buffer = self._buffer, ""
        if self.reasons:
            solid = rest.rstrip() if self._at == "inside" else rest.strip()
            return Cut([Reasoning(solid)] if solid else [], "")
        return Cut([], rest if self._at == "start" else "")

    def _step(self, cut: Cut) -> Cut:
        match self._at:
            case "start" | "opened":
                self._open()
                return cut
            case "inside":
                return self._read(cut)
            case "before" | "behind":
                self._skip_blanks("inside" if self._at == "before" else "outside")
                return cut
            case _:
                rest, self._buffer = self._buffer, ""
                return Cut(cut.reasoning, cut.rest + rest)

    def _skip_blanks(self, following: str) -> None:
        self._buffer = self._buffer.lstrip()
        self._at = following if self._buffer else self._at

    def _open(self) -> None:
        solid = self._buffer.lstrip()
        if len(solid) < len(self._style.begin) and self._style.begin.startswith(solid):
            return
        if solid.startswith(self._style.begin):
            self._buffer, self._at = solid.removeprefix(self._style.begin), "before"
        elif self._at == "opened":
            self._buffer, self._at = solid, "inside"
        else:
            self._at = "outside"

    def _read(self, cut: Cut) -> Cut:
        before, marker, held = find_marker(self._buffer, (self._style.end, *self._style.ended_by))
        solid = before.rstrip()
        if marker is None:
            self._buffer = before[len(solid) :] + held
        else:
            self._buffer, self._at = (held if marker == self._style.end else marker + held), "behind"
        return Cut([*cut.reasoning, Reasoning(solid)] if solid else cut.reasoning, cut.rest)
