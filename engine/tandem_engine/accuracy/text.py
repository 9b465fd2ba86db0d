"""What is predicted: a text cut into windows, each of which a model sees from its beginning.

The text that comes along is the beginning of Lewis Carroll's "Alice's Adventures in Wonderland" (1865), which is in the
public domain.
"""

from collections.abc import Sequence
from pathlib import Path

from tandem_engine.errors import ConfigError

OURS = Path(__file__).with_name("text.txt")
SHORTEST = 2
"""Tokens of a window: one that is seen and one that is predicted."""


def read_text(path: Path | None) -> str:
    """The file's text, or ours. Raises `ConfigError` when it cannot be read."""
    try:
        return (path or OURS).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read as UTF-8: {error}") from error


def cut(tokens: Sequence[int], window: int, *, at_most: int) -> list[tuple[int, ...]]:
    """The first `at_most` of `tokens` as windows of `window`, the last one shorter.

    Raises:
        ConfigError: there is nothing to predict.
    """
    used = tokens[:at_most]
    windows = [tuple(used[begin : begin + window]) for begin in range(0, len(used), window)]
    windows = [each for each in windows if len(each) >= SHORTEST]
    if not windows:
        raise ConfigError(f"the text has {len(used)} tokens, of which none follows another: --text takes a longer one")
    return windows
