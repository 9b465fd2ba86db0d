"""Chat templates: messages in, prompt text out.

A template comes from a checkpoint, which is somebody else's code: it runs in Jinja's immutable sandbox
with the functions Hugging Face templates expect and nothing else (CVE-2026-5760). Clients never supply one.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem_engine.errors import CheckpointError, InvalidRequestError

MAX_TEMPLATE_CHARACTERS = 1 << 20


class _RefusedMessagesError(Exception):
    """A template called `raise_exception`: it cannot express these messages."""


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
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{source}: the chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.text = template
        """As the checkpoint has it."""
        self.variables = frozenset(meta.find_undeclared_variables(_environment().parse(template)))
        """Names of what it has a place for."""
        self.knows_tools = "tools" in self.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text. Raises `InvalidRequestError` when the template refuses these messages."""
        try:
            return self._template.render(
                {
                    "documents": None,
                    **self._special_tokens,
                    **(variables or {}),
                    "tools": tools or None,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RefusedMessagesError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # Whatever a template trips over, it was the messages that led it there.
            raise InvalidRequestError(
                "the model's chat template cannot render these messages", param="messages"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which prompts do not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _RefusedMessagesError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
