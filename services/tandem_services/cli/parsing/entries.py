"""What a file of settings gives, apart from the format that it is written in."""

from dataclasses import dataclass

from tandem_engine.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What a file gives for one key."""

    key: str
    value: bool | tuple[str, ...] | dict[str, str] | None
    """true or false; null; words, one unless it is a list; or text by name."""
    listed: bool
    place: str
    """file:line"""


def require_plain_text(text: str, place: str) -> None:
    """Raise `ConfigError` for what no command line could hold, or no log line should."""
    if not text.isprintable():
        raise ConfigError(f"{place}: has a character that cannot be printed: {text[:80]!a}")
