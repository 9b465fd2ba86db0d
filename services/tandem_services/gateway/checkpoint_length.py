"""How long a context a checkpoint allows, by its own `config.json`: all there is to go by before a worker has come."""

from pathlib import Path
from typing import Annotated

import msgspec

from tandem_engine.errors import CheckpointError

MAX_FILE_BYTES = 1 << 20

Length = Annotated[int, msgspec.Meta(ge=1)]


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part about text of a model that has others."""

    max_position_embeddings: Length | None = None


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of `config.json` what is needed here."""

    max_position_embeddings: Length | None = None
    text_config: TextConfig = TextConfig()


def checkpoint_length(folder: Path) -> int:
    """Tokens of prompt and output. Raises `CheckpointError` naming the file where it does not say."""
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES)
        config = msgspec.json.decode(content, type=CheckpointConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: its context length cannot be read ({error})") from error
    length = config.max_position_embeddings or config.text_config.max_position_embeddings
    if length is None:
        raise CheckpointError(f"{path}: no max_position_embeddings; --from-zero-timeout needs it")
    return length
