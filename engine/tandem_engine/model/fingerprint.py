"""Identity of a model: equal for the same weights, different for any others, and cheap to compute.

KV pages are only meaningful to workers that run the same weights, so this goes into the compatibility hash
of a worker. Reading every byte would double the start-up time of a large model; instead a few blocks of
every tensor are read, which tells apart fine-tunes that share a shape and most of their tensors, and does
not depend on how the checkpoint is cut into shards.
"""

import hashlib
from collections.abc import Mapping

import msgspec

from tandem_engine.config import ModelConfig
from tandem_engine.errors import CheckpointError
from tandem_engine.model.json_file import shown
from tandem_engine.model.safetensors_file import ReadableTensor, StoredTensor

DIGEST_BYTES = 16
BLOCK_BYTES = 4096
BLOCKS_PER_TENSOR = 4


def fingerprint(config: ModelConfig, tensors: Mapping[str, ReadableTensor]) -> str:
    """Hexadecimal digest of `config`, of the name, dtype and shape of all tensors, and of samples of their bytes.

    Raises:
        CheckpointError: a file became unreadable since its header was checked.
    """
    digest = hashlib.blake2b(msgspec.json.encode(config), digest_size=DIGEST_BYTES)
    for name in sorted(tensors):
        for tensor in tensors[name].sources:
            digest.update(msgspec.json.encode((name, str(tensor.dtype), tensor.shape)))
            digest.update(_sample(tensor))
    return digest.hexdigest()


def _sample(tensor: StoredTensor) -> bytes:
    """The whole of a small tensor, evenly spaced blocks of a large one, first and last included."""
    if tensor.size <= BLOCK_BYTES * BLOCKS_PER_TENSOR:
        places = {0: tensor.size}
    else:
        stride = (tensor.size - BLOCK_BYTES) // (BLOCKS_PER_TENSOR - 1)
        places = {index * stride: BLOCK_BYTES for index in range(BLOCKS_PER_TENSOR)}
    try:
        with tensor.path.open("rb", buffering=0) as file:
            blocks = []
            for begin, size in places.items():
                file.seek(tensor.offset + begin)
                blocks.append(file.read(size))
    except OSError as error:
        raise CheckpointError(f"{tensor.path}: tensor {shown(tensor.name)} cannot be read: {error.strerror}") from error
    return b"".join(blocks)
