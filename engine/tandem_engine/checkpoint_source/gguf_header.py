"""What the header of a GGUF file contains, for an error that helps. Tandem does not read its weights.

    [ "GGUF" ][ u32 version ][ u64 tensors ][ u64 fields ][ fields: key, u32 type, value ][ … ]

At most `MAX_BYTES` are read. Facts after them, or after a field that breaks the format, stay empty.
"""

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.errors import ConfigError
from tandem_engine.checkpoint_source.source import is_repo

MAX_BYTES = 1 << 20
SUFFIX = ".gguf"
MAGIC = b"GGUF"
MAX_FIELDS = 4096

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_QUANTIZATIONS = (
    "F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS "
    "Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16"
).split()
"""By `general.file_type`, as llama.cpp numbers them."""

UNQUANTIZED = ("F32", "F16", "BF16")
_WORD = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SOURCES = ("general.base_model.0.repo_url", "general.source.repo_url", "general.source.url")


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFacts:
    """Empty where the file has none."""

    architecture: str = ""
    quantization: str = ""
    made_of: str = ""
    """The repository of the checkpoint that was converted."""


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as GGUF does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_facts(path: Path) -> GgufFacts:
    """Facts from the beginning of the file. Raises `OSError`."""
    with path.open("rb") as file:
        fields = _read_fields(file.read(MAX_BYTES))
    kind = fields.get("general.file_type")
    known = isinstance(kind, int) and 0 <= kind < len(_QUANTIZATIONS)
    quantization = _QUANTIZATIONS[kind] if known and isinstance(kind, int) else ""
    architecture = fields.get("general.architecture")
    return GgufFacts(
        architecture=architecture if isinstance(architecture, str) and _WORD.fullmatch(architecture) else "",
        quantization=quantization.strip("-"),
        made_of=next((repo for name in _SOURCES if (repo := _repo_of(fields.get(name)))), ""),
    )


def gguf_refusal(what: str, facts: GgufFacts) -> ConfigError:
    """The error about `what`, a file or a repository."""
    known = ", ".join(fact for fact in (facts.architecture, facts.quantization) if fact)
    sentence = f"{what} is GGUF{f' ({known})' if known else ''}, which Tandem does not read"
    if not facts.made_of:
        return ConfigError(f"{sentence}; name the safetensors checkpoint that it was made of")
    rounded = "" if facts.quantization in UNQUANTIZED else " --quantization int8"
    return ConfigError(f"{sentence}; made of {facts.made_of}: tandem serve {facts.made_of}{rounded}")


def _repo_of(url: object) -> str:
    if not isinstance(url, str):
        return ""
    repo = "/".join(url.removeprefix("https://").split("/")[1:3])
    return repo if is_repo(repo) else ""


def _read_fields(data: bytes) -> dict[str, object]:
    """Up to the first that is not whole."""
    fields: dict[str, object] = {}
    reader = _Reader(data)
    try:
        if reader.take(len(MAGIC)) != MAGIC or reader.number("I") not in (2, 3):
            return fields
        reader.number("Q")
        for _ in range(min(reader.number("Q"), MAX_FIELDS)):
            key = reader.string()
            fields[key] = reader.value(reader.number("I"))
    except _EndError:
        pass  # What stands before it counts.
    return fields


class _EndError(Exception):
    """The bytes end, or are no GGUF."""


@dataclass(slots=True)
class _Reader:
    data: bytes
    at: int = 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise _EndError
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0])

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> object:
        """None for what no fact is made of: numbers with a fraction and arrays."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            self._skip_array()
            return None
        if kind not in _NUMBERS:
            raise _EndError
        if _NUMBERS[kind] in "fd":
            self.take(struct.calcsize(_NUMBERS[kind]))
            return None
        return self.number(_NUMBERS[kind])

    def _skip_array(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            self.take(count * struct.calcsize(_NUMBERS[kind]))
        elif kind == _STRING:
            for _ in range(count):
                self.take(self.number("Q"))
        else:
            raise _EndError
