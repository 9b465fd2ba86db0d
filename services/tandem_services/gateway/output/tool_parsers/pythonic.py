"""Llama 3.2 and 4, and others: the output is a list of Python calls, [name(key=value, …), …].

No marker starts a call, so a list counts as one only if it begins with a tool of the request. Values are read as
literals and never evaluated (CVE-2025-9141); the scan is linear (CVE-2025-48887).
"""

import re

from tandem_services.gateway.output.parts import CallArguments, CallBegin, Part
from tandem_services.gateway.output.tool_parsers.parser import (
    Schemas,
    StepParser,
    half_marker,
    json_string,
    python_literal,
)

TAG = "<|python_start|>"
_HEAD = re.compile(r"([A-Za-z_][\w.-]{0,63})\(")
_HALF_HEAD = re.compile(r"(?:[A-Za-z_][\w.-]{0,63})?")
_KEY = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)")
_PLAIN = re.compile(r"""[^"'\\()\[\]{},]+""")


class PythonicParser(StepParser):
    """Each argument is a piece, once it is complete."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._at = "start"
        self._before = ""
        """The text before a head: content, if no call follows."""
        self._name = ""
        self._argument: list[str] = []
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._given = 0

    def finish(self) -> list[Part]:
        if self._at in ("start", "content") or (self._at == "head" and not self._calls):
            return self._gate.add(self._before + self._buffer) + self._gate.finish()
        return []

    def _step(self, parts: list[Part]) -> bool:
        match self._at:
            case "start":
                return self._start()
            case "head":
                return self._read_head(parts)
            case "arguments":
                return self._read_arguments(parts)
            case "next":
                return self._separate()
            case _:
                parts += self._gate.add(self._buffer)
                self._buffer = ""
                return False

    def _start(self) -> bool:
        solid = self._buffer.lstrip()
        if solid.startswith(TAG):
            self._buffer = solid.removeprefix(TAG)
            return True
        if half_marker(solid, (TAG,)) == len(solid):
            return False
        if solid[0] == "[":
            self._before, self._buffer, self._at = "[", solid[1:], "head"
        else:
            self._at = "content"
        return True

    def _read_head(self, parts: list[Part]) -> bool:
        solid = self._buffer.lstrip()
        self._before += self._buffer[: len(self._buffer) - len(solid)]
        self._buffer = solid
        head = _HEAD.match(solid)
        if head is not None and (self._calls or head[1] in self._schemas):
            self._gate.call()
            self._name = head[1]
            parts.append(CallBegin(self._calls, self._name))
            self._calls += 1
            self._given = 0
            self._before, self._buffer, self._at = "", solid[head.end() :], "arguments"
            return True
        if head is None and _HALF_HEAD.fullmatch(solid):
            return False
        if self._calls and solid[:1] == "]":
            # Python allows a comma after the last call.
            self._before, solid = "", solid[1:]
        self._before, self._buffer, self._at = "", self._before + solid, "content"
        return True

    def _read_arguments(self, parts: list[Part]) -> bool:
        text, at = self._buffer, 0
        while at < len(text):
            plain = _PLAIN.match(text, at) if not self._escaped else None
            if plain is not None:
                self._argument.append(plain[0])
                at = plain.end()
                continue
            character = text[at]
            at += 1
            if not self._quote and not self._depth and character in ",)":
                self._end_argument(parts)
                if character == ")":
                    parts.append(self._piece("}" if self._given else "{}"))
                    self._buffer, self._at = text[at:], "next"
                    return True
            else:
                self._argument.append(character)
                self._note(character)
        self._buffer = ""
        return False

    def _note(self, character: str) -> None:
        if self._quote:
            closes = character == self._quote and not self._escaped
            self._escaped = character == "\\" and not self._escaped
            self._quote = "" if closes else self._quote
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1

    def _end_argument(self, parts: list[Part]) -> None:
        text = "".join(self._argument)
        self._argument.clear()
        if not text.strip():
            return
        key = _KEY.match(text)
        name = self._positional() if key is None else key[1]
        value = python_literal(text[0 if key is None else key.end() :].strip())
        parts.append(self._piece(("{" if not self._given else ", ") + f"{json_string(name)}: {value}"))
        self._given += 1

    def _positional(self) -> str:
        """The name of an argument that was given without one: by its place in the schema."""
        properties = self._schemas.get(self._name, {}).get("properties")
        names = [*properties] if isinstance(properties, dict) else []
        return names[self._given] if self._given < len(names) else f"argument_{self._given}"

    def _separate(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        more = self._buffer[0] == ","
        self._buffer = self._buffer[1:] if more else self._buffer.removeprefix("]")
        self._at = "head" if more else "content"
        return True

    def _piece(self, text: str) -> CallArguments:
        return CallArguments(self._calls - 1, text)
