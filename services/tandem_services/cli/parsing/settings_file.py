"""A file of settings: one flat YAML mapping, whose values are text until a flag's own type reads them.

YAML has no say in types: `08:00`, `0x10`, `1e3` and `no` arrive as they are written. Only `true`, `false` and
`null` without quotes mean something. `010`, which is 8 to some readers of YAML and 10 to others, is refused. Only
`models` may be a nested mapping, of names to models. The file is read event by event, so that no depth of nesting
is a recursion.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.parsing.entries import Entry, require_plain_text

MAX_BYTES = 1 << 20
MODELS = "models"

_OCTAL = re.compile(r"[-+]?0[0-9_]+")


def read_entries(path: Path) -> list[Entry]:
    """All entries of the file, in its order. Raises `ConfigError` with file and line for what is no flat mapping."""
    text = _text(path)
    try:
        return list(_entries(_events(text), str(path)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = str(path) if mark is None else f"{path}:{mark.line + 1}"
        raise ConfigError(f"{place}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # Characters that YAML does not allow, and escapes of characters that do not exist.
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"--config {path}: more than {MAX_BYTES >> 20} MiB, which is no file of settings")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8") from error


def _events(text: str) -> Iterator[yaml.Event]:
    return iter(yaml.parse(text, Loader=yaml.SafeLoader))


def _entries(events: Iterator[yaml.Event], path: str) -> Iterator[Entry]:
    next(events)  # StreamStart
    if isinstance(next(events), yaml.StreamEndEvent):
        return  # comments alone
    top = next(events)
    if not isinstance(top, yaml.MappingStartEvent):
        if isinstance(top, yaml.ScalarEvent) and top.value == "" and top.style is None:
            return  # a document without content
        raise ConfigError(f"{_place(path, top)}: must be a mapping of settings: lines such as `port: 8000`")
    _require_bare(top, path)
    seen: dict[str, int] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent):
            raise ConfigError(f"{_place(path, event)}: a key must be the name of a setting")
        _require_bare(event, path)
        key, place = event.value, _place(path, event)
        require_plain_text(key, place)
        if key in seen:
            raise ConfigError(f"{place}: {key}: given twice, first in line {seen[key]}")
        seen[key] = _line(event)
        yield _entry(key, place, next(events), events, path)
    next(events)  # DocumentEnd
    if not isinstance(after := next(events), yaml.StreamEndEvent):
        raise ConfigError(f"{_place(path, after)}: a second document: one file has one mapping")


def _entry(key: str, place: str, event: yaml.Event, events: Iterator[yaml.Event], path: str) -> Entry:
    _require_bare(event, path)
    if isinstance(event, yaml.ScalarEvent):
        value = _scalar(event, f"{place}: {key}")
        return Entry(key=key, value=value, listed=False, place=place)
    if isinstance(event, yaml.MappingStartEvent) and key == MODELS:
        return Entry(key=key, value=_names(events, path), listed=False, place=place)
    if not isinstance(event, yaml.SequenceStartEvent):
        raise ConfigError(f"{place}: {key}: settings are flat: a value or a list of values, no mapping")
    words: list[str] = []
    while not isinstance(item := next(events), yaml.SequenceEndEvent):
        here = f"{_place(path, item)}: {key}"
        _require_bare(item, path)
        word = _scalar(item, here) if isinstance(item, yaml.ScalarEvent) else None
        if not isinstance(word, tuple):
            raise ConfigError(f"{here}: a list has only text and numbers")
        words += word
    return Entry(key=key, value=tuple(words), listed=True, place=place)


def _names(events: Iterator[yaml.Event], path: str) -> dict[str, str]:
    """A mapping of names to text, up to its end."""
    names: dict[str, str] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        place = f"{_place(path, event)}: {MODELS}"
        name, model = (_name(each, place, path) for each in (event, next(events)))
        if name in names:
            raise ConfigError(f"{place}: {name}: given twice")
        names[name] = model
    return names


def _name(event: yaml.Event, place: str, path: str) -> str:
    _require_bare(event, path)
    word = _scalar(event, place) if isinstance(event, yaml.ScalarEvent) else None
    if not isinstance(word, tuple):
        raise ConfigError(f"{place}: must be lines of a name and a model, such as `small: org/name`")
    return word[0]


def _scalar(event: yaml.ScalarEvent, place: str) -> bool | tuple[str, ...] | None:
    if event.style is None:
        if event.value in ("true", "false"):
            return event.value == "true"
        if event.value in ("null", "~"):
            return None
        if event.value == "":
            raise ConfigError(f'{place}: no value; write null for none, or "" for empty text')
        if _OCTAL.fullmatch(event.value):
            raise ConfigError(
                f"{place}: {event.value[:80]} may be octal: write a number without 0 before it, or quote it"
            )
    require_plain_text(event.value, place)
    return (event.value,)


def _require_bare(event: yaml.Event, path: str) -> None:
    """Raise `ConfigError` for anchors, aliases and tags, which make one value mean another."""
    tag = getattr(event, "tag", None)
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None or tag is not None:
        raise ConfigError(
            f"{_place(path, event)}: anchors, aliases and tags of YAML have no meaning here: write values"
        )


def _place(path: str, event: yaml.Event) -> str:
    return f"{path}:{_line(event)}"


def _line(event: yaml.Event) -> int:
    if event.start_mark is None:
        raise TypeError("an event of a text has a place in it")
    return event.start_mark.line + 1
