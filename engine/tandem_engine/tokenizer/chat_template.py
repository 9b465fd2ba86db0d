"""Chat templates: messages in, prompt text out; and whether a rendering must track the origin of its text.

A template comes from a checkpoint and is untrusted code: it runs in Jinja's immutable sandbox with the functions that
Hugging Face templates expect and nothing else (CVE-2026-5760). Clients never supply one.

`render` gives what transformers renders. `render_traced` renders the same text a second time and records which
characters the template wrote itself (`TracedText`); it costs several times as much.

A control token in a prompt must come from the chat template, never from a client's text. `ControlLiterals` has the
texts of one tokenizer's special tokens, and limits tracing to renderings where text of a client could be part of one:

    contents    a string of the client's has the first or last character of a literal, such as "<" or ">"
    template    the template writes literals in pieces (`"<|" + message.role + "|>"`), translates characters, or changes
                the case of text where a literal begins or ends with a letter

Without either, a literal in the rendered text begins and ends in the template's own text, in one piece.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem_engine.base.errors import CheckpointError, InvalidRequestError
from tandem_engine.tokenizer.traced_environment import (
    RefusedMessagesError,
    TracedEnvironment,
    clock,
    plain_json,
    raise_exception,
)
from tandem_engine.tokenizer.traced_text import CONTENT, TEMPLATE, TracedText, origin_of, traced

MAX_TEMPLATE_CHARACTERS = 1 << 20

_ROLES = frozenset(("assistant", "developer", "function", "ipython", "observation", "system", "tool", "user"))
"""Roles of messages that a template may write into its control literals, as in `"<|" + message.role + "|>"`."""

_RENDERING_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_CASE_CHANGES = frozenset(("capitalize", "casefold", "lower", "swapcase", "title", "upper"))


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; rendering ignores the mark."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Rendering is thread-safe.

    Raises `CheckpointError` when the template is too long or not valid Jinja; `source` names the file.
    """

    def __init__(self, template: str, *, special_tokens: Mapping[str, str], source: str) -> None:
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise CheckpointError(
                f"{source}: the chat template has {len(template)} characters, at most {MAX_TEMPLATE_CHARACTERS}"
            )
        try:
            self._template = _environment().from_string(template)
            # Each rendering copies them, from a chain of dictionaries one by one.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{source}: the chat template is broken: {error}") from error
        self.special_tokens: Mapping[str, str] = dict(special_tokens)
        """Variables such as `bos_token`."""
        self.text = template
        """As the checkpoint has it."""
        parsed = _environment().parse(template)
        self.variables = frozenset(meta.find_undeclared_variables(parsed))
        """Names of what it has a place for."""
        self.knows_tools = "tools" in self.variables
        self.constants = frozenset({*_constants(parsed), *special_tokens.values()})
        """All text that it can write of its own."""
        operations = frozenset(_operations(parsed))
        self.changes_case = not _CASE_CHANGES.isdisjoint(operations)
        self.translates = "translate" in operations

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text. Raises `InvalidRequestError` when the template refuses these messages."""
        return self._text_of(self._template, self._context(messages, tools, variables, add_generation_prompt))

    def render_traced(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> TracedText:
        """As `render`, with the origin of each character.

        Raises `InvalidRequestError` as well when the template does something with its text that cannot be followed.
        """
        context = self._context(messages, tools, variables, add_generation_prompt)
        text = self._text_of(self._template, context)
        followed = self._text_of(self._traced_template, self._traced_context(context, given=variables or {}))
        if followed != text:
            raise InvalidRequestError(
                "the model's chat template rewrites text in a way that hides where it comes from, and these messages "
                "hold characters of special tokens: leave out texts such as <|...|>",
                param="messages",
            )
        return TracedText(text, origin_of(followed))

    @cached_property
    def _traced_template(self) -> Template:
        return _environment(traced=True).from_string(self.text)

    def _context(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> dict[str, Any]:
        # To find the time of this place takes as long as a short rendering.
        own = {"strftime_now": clock(datetime.now().astimezone())} if "strftime_now" in self.variables else {}
        return {
            **own,
            "documents": None,
            **self.special_tokens,
            **(variables or {}),
            "tools": tools or None,
            "messages": [_prepared(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }

    def _traced_context(self, context: Mapping[str, Any], *, given: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: traced(text, TEMPLATE) for name, text in self.special_tokens.items() if name not in given}
        messages = [{**traced(message, CONTENT), **_own_role(message)} for message in context["messages"]]
        return {**traced(context, CONTENT), **own, "messages": messages}

    def _text_of(self, template: Template, context: Mapping[str, Any]) -> str:
        try:
            return template.render(context)
        except RefusedMessagesError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except _RENDERING_ERRORS as error:
            # Whatever a template trips over, it was the messages that led it there.
            raise InvalidRequestError(
                "the model's chat template cannot render these messages", param="messages"
            ) from error


def _prepared(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """As transformers gives messages to templates: without fields that are null, and reasoning under all the names that
    templates read it by."""
    if len(message) == 2 and message.get("role") is not None and message.get("content") is not None:
        return message
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in ("reasoning_content", "thinking", "reasoning") if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _own_role(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    return {"role": traced(role, TEMPLATE)} if isinstance(role, str) and role in _ROLES else {}


def _constants(parsed: nodes.Template) -> Iterator[str]:
    for data in parsed.find_all(nodes.TemplateData):
        yield data.data
    for constant in parsed.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


def _operations(parsed: nodes.Template) -> Iterator[str]:
    """Names of the filters and methods it uses, those that it gives to `map` included."""
    for used in parsed.find_all(nodes.Filter):
        yield used.name
        if used.name == "map":
            yield from (each.value for each in used.args if isinstance(each, nodes.Const))
    for call in parsed.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            yield call.node.attr
        elif isinstance(call.node, nodes.Getitem) and isinstance(call.node.arg, nodes.Const):
            yield call.node.arg.value


def _environment(*, traced: bool = False) -> ImmutableSandboxedEnvironment:
    kind = TracedEnvironment if traced else ImmutableSandboxedEnvironment
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    if not traced:
        environment.filters["tojson"] = plain_json
    environment.globals["raise_exception"] = raise_exception
    return environment


class ControlLiterals:
    """Immutable."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._literals = tuple(literals)
        edges = {edge for text in literals for edge in (text[0], text[-1])}
        self.begin_with_letters = any(edge.lower() != edge.upper() for edge in edges)
        """Or end with one."""
        self._edge = re.compile(f"[{re.escape(''.join(sorted(edges)))}]" if edges else r"(?!)")

    def may_begin_in(self, value: Any) -> bool:
        """Whether any string in a JSON-like value, keys included, has the first or last character of a literal."""
        parts = [value]
        for part in parts:  # grows by what is in them
            # Most are plain strings and dictionaries, which need no look at their base classes.
            kind = type(part)
            if kind is str or isinstance(part, str):
                if self._edge.search(part) is not None:
                    return True
            elif kind is dict or isinstance(part, Mapping):
                parts += part
                parts += part.values()
            elif kind is list or isinstance(part, (list, tuple)):
                parts += part
        return False

    def pieced_together(self, constants: Iterable[str]) -> bool:
        """Whether one of `constants` ends with the beginning of a literal, and one begins with its end, so that text
        between them completes it."""
        constants = list(constants)
        return any(_is_completed(literal, constants) for literal in self._literals)


def _is_completed(literal: str, constants: Sequence[str]) -> bool:
    lengths = range(1, len(literal))
    head = next((n for n in lengths if any(text.endswith(literal[:n]) for text in constants)), None)
    tail = next((n for n in lengths if any(text.startswith(literal[-n:]) for text in constants)), None)
    return head is not None and tail is not None and head + tail < len(literal)
