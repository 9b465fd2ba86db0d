"""Which tokens end a generation.

`generation_config.json` is the later word: instruction-tuned checkpoints list their end-of-turn token only
there. config.json decides when it names none.
"""

from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.directory import ModelDirectory
from tandem_engine.model.json_file import read_json_object

MAX_GENERATION_CONFIG = 1 << 20
MAX_EOS_TOKENS = 64


def read_eos(directory: ModelDirectory, config: ConfigFields, *, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids in the order of the file; () when neither file names any.

    Raises:
        CheckpointError: an id is not an integer of the vocabulary.
    """
    owner = config
    if directory.has("generation_config.json"):
        path = directory.file("generation_config.json")
        values = read_json_object(path, max_bytes=MAX_GENERATION_CONFIG)
        generation = ConfigFields(path=path, values=values)
        owner = generation if generation.has("eos_token_id") else config
    ids = owner.items("eos_token_id")
    if len(ids) > MAX_EOS_TOKENS:
        owner.refuse("eos_token_id", f"must name at most {MAX_EOS_TOKENS} tokens")
    return tuple(dict.fromkeys(_token(owner, value, vocab_size) for value in ids))


def _token(owner: ConfigFields, value: object, vocab_size: int) -> int:
    if type(value) is not int or not 0 <= value < vocab_size:
        owner.refuse("eos_token_id", f"must name tokens of the vocabulary (0 to {vocab_size - 1})")
    return value
