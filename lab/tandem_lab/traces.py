"""Request traces in public formats: Mooncake (.jsonl) and Azure LLM inference (.csv).

Both are without text. Mooncake names the blocks of a prompt, `TRACE_BLOCK` tokens each, so that equal leading numbers
are a shared prefix; Azure has lengths alone, so its prompts share nothing.

    Mooncake  {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, …]}, and optionally
              "tenant": name, "priority": number and "n": choices
    Azure     TIMESTAMP,ContextTokens,GeneratedTokens
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from tandem_engine.base.errors import ConfigError

TRACE_BLOCK = 512
"""Tokens of one Mooncake hash block."""

MAX_TOKENS = 1 << 24
"""Longest prompt or output of a line that is believed."""

MAX_CHOICES = 128
"""Of one request: as many as a gateway takes."""

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """One request of a trace."""

    at: float
    """Seconds; what they count from is the trace's own affair."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """What the prompt consists of, block by block; the last one may be partial."""
    tenant: str = ""
    """Its sender; empty: the trace does not say."""
    priority: int = 0
    choices: int = 1
    """Answers to the one prompt, each of `output_tokens`."""


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...]
    tenant: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")] = ""
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1


def read_trace(path: Path) -> Iterator[TraceRow]:
    """The requests of a trace, in its order. Raises `ConfigError` that names file, line and what is wrong with it."""
    read = {".jsonl": _mooncake, ".csv": _azure}.get(path.suffix)
    if read is None:
        raise ConfigError(f"--trace {path}: the name must end in .jsonl (Mooncake) or .csv (Azure)")
    try:
        yield from read(path)
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--trace {path}: not UTF-8 text ({error})") from error


def _mooncake(path: Path) -> Iterator[TraceRow]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise _bad_line(path, number, str(error)) from error
            expected = -(-row.input_length // TRACE_BLOCK)
            if len(row.hash_ids) != expected:
                raise _bad_line(
                    path,
                    number,
                    f"hash_ids has {len(row.hash_ids)} blocks, but {row.input_length} tokens of input_length are "
                    f"{expected} of {TRACE_BLOCK}",
                )
            yield TraceRow(
                at=row.timestamp / 1000.0,
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                blocks=row.hash_ids,
                tenant=row.tenant,
                priority=row.priority,
                choices=row.n,
            )


def _azure(path: Path) -> Iterator[TraceRow]:
    first_block = 0
    with path.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines)
        if not set(AZURE_COLUMNS) <= set(rows.fieldnames or ()):
            raise _bad_line(path, 1, f"the columns must be {', '.join(AZURE_COLUMNS)}")
        for row in rows:
            try:
                prompt, output = _length(row, "ContextTokens"), _length(row, "GeneratedTokens")
                # Azure writes seven digits of a second, one more than Python reads.
                at = datetime.fromisoformat((row["TIMESTAMP"] or "")[:26]).timestamp()
            except ValueError as error:
                raise _bad_line(path, rows.line_num, str(error)) from error
            count = -(-prompt // TRACE_BLOCK)
            blocks = tuple(range(first_block, first_block + count))
            first_block += count
            yield TraceRow(at=at, prompt_tokens=prompt, output_tokens=output, blocks=blocks)


def _length(row: Mapping[str, str | None], column: str) -> int:
    text = row[column] or ""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_TOKENS:
        raise ValueError(f"{column} must be a number from 1 to {MAX_TOKENS}, got {text[:80]!r}")
    return int(text)


def _bad_line(path: Path, number: int, reason: str) -> ConfigError:
    return ConfigError(f"--trace {path} line {number}: {reason}")
