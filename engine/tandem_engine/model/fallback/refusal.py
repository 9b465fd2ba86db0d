"""Errors of transformers become one sentence of ours, whatever its validators, model code and loader raise."""

import contextlib
import re
from collections.abc import Iterator

from tandem_engine.errors import CheckpointError, EngineError

SENTENCE_END = re.compile(r"(?<=[a-z)\]`'])\. ")
MAX_REASON = 400
"""Characters of an error of transformers that a message repeats."""


@contextlib.contextmanager
def refused_by_transformers(what: str) -> Iterator[None]:
    """Raise a `CheckpointError` that begins with `what` for whatever the block raises, except errors of ours."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        # Code of several hundred models meets a config.json of unknown origin here.
        raise CheckpointError(f"{what}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """The first sentence of the error, short enough for a log."""
    text = SENTENCE_END.split(" ".join(str(error).split()))[0] or type(error).__name__
    if isinstance(error, KeyError | TypeError | AttributeError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"
