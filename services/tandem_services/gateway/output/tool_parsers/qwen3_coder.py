"""Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>.

Values are plain text between line ends. The schema of the tool determines which of them are strings. Strings are
streamed; other values are converted to JSON at their end.
"""

from collections.abc import Callable, Mapping

from tandem_services.gateway.output.parts import CallArguments, CallBegin, Part
from tandem_services.gateway.output.tool_parsers.parser import (
    Schemas,
    StepParser,
    find_marker,
    json_or_literal,
    json_string,
)

WRAP = "<tool_call>"
UNWRAP = "</tool_call>"
FUNCTION = "<function="
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
END_FUNCTION = "</function>"
MAX_NAME_CHARACTERS = 128


class Qwen3CoderParser(StepParser):
    """Argument pieces always add up to JSON once the call is closed."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._at = "content"
        self._wrapped = ""
        self._name = ""
        self._streams = False
        self._value = ""
        self._fresh = False
        """Nothing of the parameter's value has been read."""
        self._given = 0
        """Parameters of this call so far."""

    def finish(self) -> list[Part]:
        if self._at == "content":
            return self._gate.add(self._buffer) + self._gate.finish()
        return []

    def _step(self, parts: list[Part]) -> bool:
        return _STEPS[self._at](self, parts)

    def _read_content(self, parts: list[Part]) -> bool:
        before, marker, self._buffer = find_marker(self._buffer, (WRAP, FUNCTION))
        parts += self._gate.add(before)
        if marker is not None:
            self._wrapped = WRAP if marker == WRAP else ""
            self._at = "wrapped" if marker == WRAP else "name"
        return marker is not None

    def _unwrap(self, parts: list[Part]) -> bool:
        solid = self._buffer.lstrip()
        if FUNCTION.startswith(solid[: len(FUNCTION)]):
            if len(solid) < len(FUNCTION):
                return False
            self._wrapped += self._buffer[: len(self._buffer) - len(solid)]
            self._buffer, self._at = solid.removeprefix(FUNCTION), "name"
            return True
        parts += self._gate.add(self._wrapped)
        self._at = "content"
        return True

    def _read_name(self, parts: list[Part]) -> bool:
        end = self._buffer.find(">", 0, MAX_NAME_CHARACTERS)
        if end > 0:
            self._gate.call()
            self._name = self._buffer[:end].strip()
            parts.append(CallBegin(self._calls, self._name))
            self._calls += 1
            self._given = 0
            self._buffer, self._at = self._buffer[end + 1 :], "body"
            return True
        hopeless = end == 0 or len(self._buffer) >= MAX_NAME_CHARACTERS
        if hopeless:
            parts += self._gate.add(self._wrapped + FUNCTION)
            self._at = "content"
        return hopeless

    def _read_body(self, parts: list[Part]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(PARAMETER):
            self._buffer, self._at = self._buffer.removeprefix(PARAMETER), "key"
            return True
        if any(marker.startswith(self._buffer) and marker != self._buffer for marker in (PARAMETER, END_FUNCTION)):
            return False
        parts.append(self._piece("}" if self._given else "{}"))
        self._buffer, self._at = self._buffer.removeprefix(END_FUNCTION), "closing"
        return True

    def _read_key(self, parts: list[Part]) -> bool:
        key, found, rest = self._buffer.partition(">")
        if not found:
            return False
        key = key.strip()
        self._streams = self._is_string(key)
        opening = ("{" if not self._given else ", ") + json_string(key) + ": "
        parts.append(self._piece(opening + ('"' if self._streams else "")))
        self._given += 1
        self._buffer, self._value, self._fresh, self._at = rest, "", True, "value"
        return True

    def _read_value(self, parts: list[Part]) -> bool:
        if not self._buffer:
            return False
        if self._fresh:
            self._buffer = self._buffer.removeprefix("\n")
            self._fresh = False
        before, marker, self._buffer = find_marker(self._buffer, ("\n" + END_PARAMETER, END_PARAMETER))
        if self._streams:
            if before:
                parts.append(self._piece(json_string(before)[1:-1]))
        else:
            self._value += before
        if marker is None:
            return False
        parts.append(self._piece('"' if self._streams else json_or_literal(self._value)))
        self._at = "body"
        return True

    def _close(self, _: list[Part]) -> bool:
        self._buffer = self._buffer.lstrip()
        if UNWRAP.startswith(self._buffer) and self._buffer != UNWRAP:
            return False
        self._buffer, self._at = self._buffer.removeprefix(UNWRAP), "content"
        return True

    def _is_string(self, key: str) -> bool:
        """Whether the schema allows it, or does not restrict it."""
        properties = self._schemas.get(self._name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        if not isinstance(schema, dict):
            return True
        kinds = schema.get("type", None if {"anyOf", "oneOf", "$ref", "enum", "const"} & schema.keys() else "string")
        return kinds == "string"

    def _piece(self, text: str) -> CallArguments:
        return CallArguments(self._calls - 1, text)


_STEPS: Mapping[str, Callable[[Qwen3CoderParser, list[Part]], bool]] = {
    "content": Qwen3CoderParser._read_content,
    "wrapped": Qwen3CoderParser._unwrap,
    "name": Qwen3CoderParser._read_name,
    "body": Qwen3CoderParser._read_body,
    "key": Qwen3CoderParser._read_key,
    "value": Qwen3CoderParser._read_value,
    "closing": Qwen3CoderParser._close,
}
