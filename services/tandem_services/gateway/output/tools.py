"""The tools of a chat request: checked, shown to the model, enforced by a grammar, and read from its output.

    tool_choice  grammar                                                     how the output is read
    none         -                                                           as text; the model gets no tools
    allowed      by its mode, among the tools it names                       by its mode; the model gets only these
    auto         of each call of a `strict` tool, from its first token       in the format of the model family
    required     a JSON array of calls, from the first token                 as that array
    a name       as required, of one call of this tool                       as that array

The array does not depend on the model, so required calls are valid for every model family. A family of channels
(`registry.Channels`) has messages instead: one of a tool, or of JSON for a formatted answer, and reasoning before it.

`check_parameters` rejects mistakes in the JSON schema of a tool that would only confuse the model. The engine checks
meaning and cost of a schema when a grammar needs it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.base.logs import quoted
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec, check_depth
from tandem_services.common.errors import bad_request
from tandem_services.gateway.http.known_fields import check_no_fields
from tandem_services.gateway.output.structured_output import RequestedGrammar
from tandem_services.gateway.output.tool_parsers.json_calls import CallArray
from tandem_services.gateway.output.tool_parsers.parser import Schemas, ToolParser
from tandem_services.gateway.output.tool_parsers.registry import Channels, ToolFamily

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_OF_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")


def check_parameters(schema: Mapping[str, Any], param: str) -> None:
    """Raise `ApiError` 400 naming the place of the first mistake in the schema of a tool's arguments."""
    try:
        check_depth(schema)
    except InvalidRequestError as error:
        raise bad_request(f"{param} is nested too deeply: {error}", param) from error
    if schema and schema.get("type", "object") != "object":
        raise bad_request(f"{param}.type must be object, got {quoted(schema['type'])}", f"{param}.type")
    _check(schema, param)


def _check(schema: Any, param: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise bad_request(f"{param} must be a JSON schema, an object, got {quoted(schema)}", param)
    _check_type(schema.get("type"), f"{param}.type")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_request(f"{param}.required must be a list of strings", f"{param}.required")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise bad_request(f"{param}.enum must be a list that is not empty", f"{param}.enum")
    for keyword in _OF_SCHEMAS:
        named = schema.get(keyword, {})
        if not isinstance(named, dict):
            raise bad_request(f"{param}.{keyword} must be an object of schemas", f"{param}.{keyword}")
        for name, inner in named.items():
            _check(inner, f"{param}.{keyword}.{quoted(name)}")
    for keyword in _LISTS:
        several = schema.get(keyword, [])
        if not isinstance(several, list):
            raise bad_request(f"{param}.{keyword} must be a list of schemas", f"{param}.{keyword}")
        for position, inner in enumerate(several):
            _check(inner, f"{param}.{keyword}[{position}]")
    for keyword in _SINGLE:
        if keyword in schema:
            _check(schema[keyword], f"{param}.{keyword}")


def _check_type(kind: Any, param: str) -> None:
    kinds = kind if isinstance(kind, list) else [] if kind is None else [kind]
    for name in kinds:
        if not isinstance(name, str) or name not in _TYPES:
            raise bad_request(f"{param} must be one of {', '.join(sorted(_TYPES))}, got {quoted(name)}", param)


def call_array_schema(schemas: Mapping[str, Mapping[str, Any]], *, most: int | None) -> dict[str, Any]:
    """Schema of one or more calls of these tools, at most `most`."""
    calls = [_call_schema(name) for name in schemas]
    array = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
    definitions = {name: _moved(as_object(schema), f"#/$defs/{name}") for name, schema in schemas.items()}
    return {**array, **({} if most is None else {"maxItems": most}), "$defs": definitions}


def _call_schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """`schema` with its references to itself made right for where it stands now."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference.removeprefix("#")
    return moved


def as_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, whether or not their schema declares it."""
    return schema if "type" in schema else {"type": "object", **schema}


def tag_document(
    schemas: Mapping[str, Mapping[str, Any]], tag: tuple[str, str, str], *, strict: Collection[str]
) -> dict[str, Any]:
    """Structural tags: free text, and calls in the form of `tag`. Tools that are not strict take any object."""
    trigger, begin, end = tag
    structures = [
        {
            "begin": begin.format(name=name),
            "schema": as_object(schema) if name in strict else {"type": "object"},
            "end": end,
        }
        for name, schema in schemas.items()
    ]
    return {"triggers": [trigger], "structures": structures}


def channel_document(
    channels: Channels, *, calls: Mapping[str, Mapping[str, Any]], answer: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One message: a call of these tools, or an answer of JSON by the schema `answer`. Reasoning may come before it."""
    structures = [
        {"begin": channels.call.format(name=name), "schema": as_object(schema)} for name, schema in calls.items()
    ]
    if answer is not None:
        structures.append({"begin": channels.answer, "schema": dict(answer)})
    return {"triggers": [channels.markers[0]], "structures": structures, "thoughts": list(channels.thoughts)}


MAX_TOOLS = 128

MAX_TOOL_BYTES = 256 << 10
"""All tools of a request as JSON."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Function(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a model may call."""

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    returns: dict[str, Any] | None = msgspec.field(name="return", default=None)
    """transformers': the schema of what it returns, for chat templates."""
    strict: bool | None = None
    cache_control: Any = None


class Tool(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    type: str | None = None
    function: Function | None = None
    cache_control: Any = None
    custom: Any = None


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionName


class ToolSelection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """OpenAI's: a choice of `mode` among some of the tools. The others are not shown to the model."""

    allowed_tools: ToolSelection


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """Tools that a model may call in one request."""

    functions: tuple[Function, ...]
    family: ToolFamily
    callable: tuple[str, ...] | None
    """What must be called; None when that is up to the model."""
    parallel: bool
    channels: Channels | None = None
    """Where the family's outputs are messages: how grammars write them."""

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        return {str(function.name): function.parameters or {} for function in self.functions}

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates expect tools."""
        return [{"type": "function", "function": _shown(function)} for function in self.functions]

    def parser(self, schemas: Schemas) -> ToolParser:
        return self.family.parser(schemas) if self.callable is None else CallArray()

    def grammar(self) -> RequestedGrammar | None:
        """What holds the output to the tools' schemas. Raises `ApiError` 400 when they are too much for a grammar."""
        kind, document = self._constraint()
        if document is None:
            return None
        spec = GrammarSpec(kind=kind, source=msgspec.json.encode(document).decode())
        try:
            spec.check()
        except InvalidRequestError as error:
            raise bad_request(f"tools: {error}", "tools") from error
        return RequestedGrammar("tools", spec)

    def grammar_or(self, answer: GrammarSpec) -> RequestedGrammar:
        """The grammar that restricts the output to calls of the tools, or to the JSON of `answer`.

        Raises `ApiError` 400 when the family's calls are not JSON after a fixed beginning.
        """
        field = "response_format"
        if self.channels is not None:
            return answer_on_channel(self.channels, RequestedGrammar(field, answer), calls=self._loose_schemas)
        if self.family.tag is None:
            raise bad_request(
                f"{field} cannot be combined with tools and tool_choice auto in the {self.family.name} form of tool "
                "calls: set tool_choice to required, a name or none",
                field,
            )
        schema = msgspec.json.decode(answer.source) if answer.source else {"type": "object"}
        document = {
            **tag_document(self.schemas, self.family.tag, strict=self._strict),
            "answer": schema,
            "separator": self.family.separator,
            "most": None if self.parallel else 1,
        }
        spec = msgspec.structs.replace(
            answer, kind=GrammarKind.STRUCTURAL_TAG, source=msgspec.json.encode(document).decode()
        )
        try:
            spec.check()
        except InvalidRequestError as error:
            raise bad_request(f"{field}: {error}", field) from error
        return RequestedGrammar(field, spec)

    @property
    def _loose_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Tools that are not strict take any object."""
        strict = self._strict
        return {name: schema if name in strict else {"type": "object"} for name, schema in self.schemas.items()}

    @property
    def _strict(self) -> frozenset[str]:
        return frozenset(str(function.name) for function in self.functions if function.strict)

    def _constraint(self) -> tuple[GrammarKind, dict[str, Any] | None]:
        if self.callable is not None:
            schemas = {name: self.schemas[name] for name in self.callable}
            if self.channels is not None:
                return GrammarKind.STRUCTURAL_TAG, channel_document(self.channels, calls=schemas)
            return GrammarKind.JSON_SCHEMA, call_array_schema(schemas, most=None if self.parallel else 1)
        strict = self._strict
        if not strict or self.family.tag is None:
            return GrammarKind.STRUCTURAL_TAG, None
        document = tag_document(self.schemas, self.family.tag, strict=strict)
        if self.family.reasoning is not None:
            document["reasoning"] = list(self.family.reasoning)
        return GrammarKind.STRUCTURAL_TAG, document


_JSON_KINDS = frozenset({GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT})


def answer_on_channel(
    channels: Channels, asked: RequestedGrammar, *, calls: Mapping[str, Mapping[str, Any]] | None = None
) -> RequestedGrammar:
    """The grammar of an answer of JSON, or of `calls`, as messages. What is no JSON has no channel and stays as it is.

    Raises `ApiError` 400 when that is too much for a grammar.
    """
    spec = asked.spec
    if spec.kind not in _JSON_KINDS:
        return asked
    try:
        schema = msgspec.json.decode(spec.source) if spec.source else {"type": "object"}
    except (msgspec.DecodeError, UnicodeEncodeError):
        # The engine says what is wrong with it.
        return asked
    if not isinstance(schema, dict):
        return asked
    document = channel_document(channels, calls=calls or {}, answer=schema)
    framed = msgspec.structs.replace(
        spec, kind=GrammarKind.STRUCTURAL_TAG, source=msgspec.json.encode(document).decode()
    )
    try:
        framed.check()
    except InvalidRequestError as error:
        raise bad_request(f"{asked.field}: {error}", asked.field) from error
    return RequestedGrammar(asked.field, framed)


def tool_use(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    *,
    parallel: bool | None,
    family: ToolFamily | None,
    template_knows_tools: bool,
    channels: Channels | None = None,
) -> ToolUse | None:
    """None when nothing may be called. `channels`: see `ToolUse`. Raises `ApiError` 400 naming the field at fault."""
    functions = _functions(tools or ())
    if isinstance(choice, AllowedTools):
        functions = _allowed(functions, choice.allowed_tools)
        choice = choice.allowed_tools.mode
    if not functions and choice not in (None, "none", "auto"):
        raise bad_request("tool_choice requires a call, but tools has no tools", "tool_choice")
    if not functions or choice == "none":
        return None
    if not template_knows_tools:
        raise bad_request("this model's chat template does not support tools", "tools")
    if family is None:
        raise bad_request(
            "no tool-call format is known for this model: start the gateway with --tool-call-parser", "tools"
        )
    strict = [function.name for function in functions if function.strict]
    if choice in (None, "auto") and strict and family.tag is None:
        raise bad_request(
            f"strict tools need tool_choice required or a name with the {family.name} form of tool calls", "tools"
        )
    names = tuple(str(function.name) for function in functions)
    named = isinstance(choice, NamedTool)
    return ToolUse(
        functions=functions,
        family=family,
        callable=_callable(names, choice),
        parallel=parallel is not False and not named,
        channels=channels,
    )


def _allowed(functions: tuple[Function, ...], selection: ToolSelection) -> tuple[Function, ...]:
    wanted = [tool.function.name for tool in selection.tools]
    if not wanted:
        raise bad_request("tool_choice.allowed_tools.tools must name at least one tool", "tool_choice")
    unknown = next((name for name in wanted if name not in {function.name for function in functions}), None)
    if unknown is not None:
        raise bad_request(f"tool_choice allows {quoted(unknown)}, which is not in tools", "tool_choice")
    return tuple(function for function in functions if function.name in wanted)


def _callable(names: tuple[str, ...], choice: ToolChoice | None) -> tuple[str, ...] | None:
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        if wanted not in names:
            raise bad_request(f"tool_choice names {quoted(wanted)}, which is not in tools", "tool_choice")
        return (wanted,)
    return names if choice == "required" else None


def _functions(tools: Sequence[Tool]) -> tuple[Function, ...]:
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools takes at most {MAX_TOOLS} tools, got {len(tools)}", "tools")
    functions: dict[str, Function] = {}
    for position, tool in enumerate(tools):
        function = _checked(tool, f"tools[{position}]")
        name = str(function.name)
        if name in functions:
            where = f"tools[{position}].function.name"
            raise bad_request(f"{where}: there are two tools called {quoted(name)}", where)
        functions[name] = function
    size = len(msgspec.json.encode([*functions.values()]))
    if size > MAX_TOOL_BYTES:
        raise bad_request(f"tools may have at most {MAX_TOOL_BYTES} bytes together, these have {size}", "tools")
    return tuple(functions.values())


def _checked(tool: Tool, param: str) -> Function:
    if tool.type != "function":
        raise bad_request(f"{param}.type must be function, got {quoted(tool.type)}", f"{param}.type")
    check_no_fields(tool, ("custom",), param)
    function = tool.function
    if function is None:
        raise bad_request(f"{param}.function is required", f"{param}.function")
    if function.name is None or not _NAME.fullmatch(function.name):
        where = f"{param}.function.name"
        raise bad_request(f"{where} must have 1 to 64 letters, digits, _ or -, got {quoted(function.name)}", where)
    if function.parameters is not None:
        check_parameters(function.parameters, f"{param}.function.parameters")
    return function


def _shown(function: Function) -> dict[str, Any]:
    plain = msgspec.structs.replace(function, strict=None, cache_control=None)
    shown: dict[str, Any] = msgspec.to_builtins(plain)
    return {**shown, "parameters": shown.get("parameters", {"type": "object", "properties": {}})}
