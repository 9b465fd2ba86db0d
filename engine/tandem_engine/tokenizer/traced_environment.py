"""The Jinja environment for `TracedText`: it renders the same text as the plain one, with the origin of each character.

Code that jinja2 generates joins strings with C functions, which lose origins, so this environment's code generator and
filters call functions that keep them. Other operations work too; their strings are of UNKNOWN origin.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from string import Formatter
from typing import Any

from jinja2 import nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from tandem_engine.tokenizer.traced_text import (
    CONTENT,
    TEMPLATE,
    UNKNOWN,
    TracedMarkup,
    TracedText,
    concatenated,
    escaped,
    only_origin,
    origin_of,
    traced,
)


class RefusedMessagesError(Exception):
    """A template called `raise_exception`: it cannot express these messages."""


def raise_exception(message: str) -> None:
    raise RefusedMessagesError(message)


def plain_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Jinja's own escapes HTML, which prompts do not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def clock(now: datetime) -> Callable[[str], str]:
    """`strftime_now`, standing still: two renderings of one conversation show the same time."""

    def strftime_now(pattern: str) -> str:
        text = now.strftime(pattern)
        if not isinstance(pattern, TracedText):
            return text
        origin = TEMPLATE if only_origin(pattern) == TEMPLATE else UNKNOWN
        return TracedText(text, origin * len(text))

    return strftime_now


_MARKUP = re.compile(r"[^\w\s.,:;!?'()-]")
"""Characters that control literals are made of."""


class _TracedCodeGenerator(CodeGenerator):
    """Wraps every constant of a template, and joins with origins."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802  # jinja2 names it
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, (str, list, tuple, dict)):
            self.write(_constant(repr(value)))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: ARG002, N802
        self.write(_constant(repr(node.data)))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat(map(environment.text_of, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:  # noqa: ARG002
        self.write("environment.text_of(")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _constant(super()._output_const_repr(group))


class TracedEnvironment(ImmutableSandboxedEnvironment):
    """As `ImmutableSandboxedEnvironment`, for templates that get `TracedText`."""

    code_generator_class = _TracedCodeGenerator
    concat = staticmethod(concatenated)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters |= {
            "indent": _indent,
            "join": _join,
            "e": _escaped,
            "escape": _escaped,
            "safe": _safe,
            "string": _text_of,
            "tojson": _to_json,
            "trim": _trim,
        }

    @staticmethod
    def text_of(value: Any) -> str:
        """What generated code calls in place of `str`."""
        return _text_of(value)

    @staticmethod
    def template_constant(value: Any) -> Any:
        """What generated code calls for the constants of a template."""
        return traced(value, TEMPLATE)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` with plain `{}` fields followed. Any other field makes text of UNKNOWN origin."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None or not isinstance(value.__self__, TracedText) or value.__name__ != "format":
            return wrapped

        def traced_format(*args: Any, **kwargs: Any) -> str:
            text = wrapped(*args, **kwargs)
            made = concatenated(_formatted_pieces(SandboxedFormatter(self), value.__self__, args, kwargs))
            return made if made == text else text

        return traced_format


def _constant(source: str) -> str:
    return f"environment.template_constant({source})"


def _formatted_pieces(
    formatter: Formatter, pattern: TracedText, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterable[str]:
    """What fields without a format or conversion become, and the text between them."""
    numbers = itertools.count()
    for literal, name, _, _ in formatter.parse(pattern):
        yield TracedText(literal, only_origin(pattern) * len(literal))
        if name is not None:
            yield str(formatter.get_field(name or str(next(numbers)), args, kwargs)[0])


@pass_environment
def _join(environment: TracedEnvironment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return TracedText(d).join(map(_text_of, value))


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    newline = TracedText("\n", TEMPLATE)
    indention = TracedText(width) if isinstance(width, str) else TracedText(" " * width, TEMPLATE * width)
    first_line, *others = TracedText(s + newline).splitlines()
    lines = [first_line, *(indention + line if line or blank else line for line in others)]
    text = newline.join(lines)
    return indention + text if first else text


def _escaped(value: Any) -> TracedMarkup:
    text = _text_of(value)
    return text if isinstance(text, TracedMarkup) else _safe(escaped(text))


def _safe(value: Any) -> TracedMarkup:
    text = _text_of(value)
    return TracedMarkup(text, origin_of(text))


def _trim(value: Any, chars: str | None = None) -> str:
    return _text_of(value).strip(chars)


def _to_json(value: Any, **options: Any) -> str:
    return _made_of(value, plain_json(value, **options))


def _text_of(value: Any) -> str:
    """`str(value)`. Of lists and objects it is mostly their strings."""
    text = str(value)
    return _made_of(value, text) if isinstance(value, (Mapping, list, tuple)) else text


def _made_of(value: Any, text: str) -> TracedText:
    """The text that a value of the client's became is the client's, brackets included; except where the template put
    words of its own into it that could be part of a control literal. Then its origin is unknown."""
    written = (string for string in _strings(value) if CONTENT * len(string) != origin_of(string))
    origin = UNKNOWN if any(map(_MARKUP.search, written)) else CONTENT
    return TracedText(text, origin * len(text))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
