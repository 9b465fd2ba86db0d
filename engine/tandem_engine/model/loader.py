"""From a model directory to weights in memory.

    1. headers of all files are checked, and the tensors they name compared with the config
    2. tensor by tensor: read, copied into its place in the target dtype, checked for NaN and infinity

Projections that take the same input are stacked into one matrix as they are read, so that a block has four
GEMMs instead of seven. Besides the weights themselves, memory holds one stored tensor at a time.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tandem_engine.config import LoadFormat, ModelConfig, ModelImpl, Quantization
from tandem_engine.errors import CheckpointError, ConfigError
from tandem_engine.model.base import CausalLM
from tandem_engine.model.checkpoint import read_fields
from tandem_engine.model.decoder import build_decoder
from tandem_engine.model.directory import open_directory
from tandem_engine.model.dummy_weights import DummyWeights
from tandem_engine.model.kv_scales import read_kv_scales
from tandem_engine.model.layers.quantized import can_multiply
from tandem_engine.model.load_progress import load_progress
from tandem_engine.model.quantization.dequantized import DequantizedTensor
from tandem_engine.model.quantization.holding import Holding, holding_of
from tandem_engine.model.quantization.levels import Levels, int8_levels
from tandem_engine.model.quantization.scheme import read_scheme
from tandem_engine.model.safetensors_file import ReadableTensor
from tandem_engine.model.shards import open_tensors
from tandem_engine.model.sharing import require_shareable
from tandem_engine.model.stored_part import StoredPart
from tandem_engine.model.stored_weights import open_weights
from tandem_engine.model.tensor_names import EMBEDDING, expected_shapes, require_tensors
from tandem_engine.parallel.group import SingleRank, TpGroup
from tandem_engine.parallel.split import Split, part_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(requested: str, config: ModelConfig, *, device: str = "cpu") -> torch.dtype:
    """The dtype of weights, activations and KV for the flag `--dtype`: auto is the checkpoint's, bfloat16 on a GPU.

    Raises:
        ConfigError: `requested` is neither auto nor a supported dtype.
    """
    auto = config.dtype if torch.device(device).type == "cpu" else "bfloat16"
    name = auto if requested == "auto" else requested
    if name not in DTYPES:
        raise ConfigError(f"--dtype must be auto, {', '.join(DTYPES)}, got {requested}")
    return DTYPES[name]


def load_model(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    *,
    context_length: int | None = None,
    progress: bool = True,
    group: TpGroup | None = None,
    load_format: LoadFormat = LoadFormat.AUTO,
    quantization: Quantization = Quantization.DEQUANTIZE,
) -> CausalLM:
    """Load the weights in `path`, the directory that `config` was read from.

    Args:
        context_length: positions that will be used at most; None for all that the model can have.
        progress: show a bar on standard error when that is a terminal, else lines in the log.
        group: the ranks that share the model; this one reads its part alone. None reads all.
        load_format: with `dummy`, no weight file is opened.
        quantization: how projections are held; what `config` was read with.

    Raises:
        ConfigError: the ranks of `group` cannot share this model evenly, or it is not held like that.
        CheckpointError: a file is absent or broken, a tensor missing, superfluous, misshapen or not finite.
    """
    group = group or SingleRank()
    require_shareable(config, group.size)
    directory = open_directory(path)
    positions = min(context_length or config.max_position, config.max_position)
    if config.impl is ModelImpl.TRANSFORMERS:
        # Nobody else needs transformers installed, or waits for its import.
        from tandem_engine.model.fallback.model import load_fallback

        return load_fallback(
            directory, config, dtype, torch.device(device), context_length=positions, progress=progress
        )
    place, scheme = torch.device(device), read_scheme(read_fields(directory))
    holding = holding_of(quantization, scheme, place)
    if load_format is LoadFormat.DUMMY:
        dummy = DummyWeights(shapes=expected_shapes(config), dtype=dtype, device=place, group=group, holding=holding)
        return build_decoder(config, dummy, positions=positions)
    tensors = open_weights(directory, scheme)
    require_tensors(config, tensors, where=directory.path)
    total = sum(tensors[name].size for name in expected_shapes(config))
    with load_progress(total, shown=progress) as advance:
        weights = WeightReader(
            tensors=tensors, dtype=dtype, device=place, advance=advance, group=group, holding=holding
        )
        return build_decoder(config, weights, positions=positions)


def load_kv_scales(path: str | Path, config: ModelConfig, *, load_format: LoadFormat) -> torch.Tensor | None:
    """The scales for float8 KV that the model in `path` brings: see `read_kv_scales`."""
    if load_format is LoadFormat.DUMMY:
        return None
    directory = open_directory(path)
    return read_kv_scales(open_tensors(directory), config, read_fields(directory))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReader:
    """Reads tensors that `require_tensors` has accepted, in the dtype and on the device of the model."""

    tensors: Mapping[str, ReadableTensor]
    dtype: torch.dtype
    device: torch.device
    advance: Callable[[int], object]
    """Told the bytes of every tensor once, however often it is read, those of other ranks included."""
    group: TpGroup = field(default_factory=SingleRank)
    holding: Holding = Holding.DTYPE
    _told: set[str] = field(default_factory=set, init=False)

    def matrix(self, *names: str, split: Split | None = None, rounded: bool = True) -> torch.Tensor | Levels:
        """See `Weights.matrix`."""
        levels = None if self.holding is Holding.DTYPE else self._levels(*names, split=split, rounded=rounded)
        if levels is None or not can_multiply(levels, self.device):
            return self.stacked(*names, split=split)
        for name in names:
            self._tell(name)
        return levels.to(self.device)

    def _tell(self, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self.advance(self.tensors[name].size)

    def _levels(self, *names: str, split: Split | None, rounded: bool) -> Levels | None:
        """This rank's part of each, stacked; None where they do not go together, or ranks cannot have parts of them."""
        parts = []
        for name in names:
            stored = self.tensors[name]
            whole = self._whole(stored, rounded=rounded)
            dim, range_ = part_of(stored.shape, split, rank=self.group.rank, size=self.group.size)
            part = None if whole is None else whole.part(dim, range_.start, range_.stop)
            if part is None:
                return None
            if not part.is_sound():
                raise CheckpointError(
                    f"{stored.path}: tensor {stored.name} holds NaN or infinity; download the checkpoint again"
                )
            parts.append(part.padded(range_.length) if dim == 0 else part)
        return Levels.stacked(parts)

    def _whole(self, stored: ReadableTensor, *, rounded: bool) -> Levels | None:
        """All of it even if a rank holds a part: that must not depend on how many ranks there are."""
        if isinstance(stored, DequantizedTensor):
            return stored.levels()
        if not (rounded and self.holding is Holding.INT8):
            return None
        return int8_levels(stored.read_part(0, 0, stored.shape[0]))

    def stacked(self, *names: str, split: Split | None = None) -> torch.Tensor:
        """The named tensors one below the other, along dimension 0; just the tensor when there is one.

        With `split`, this rank's part of each.
        """
        parts = [StoredPart.of(self.tensors[name], split, self.group) for name in names]
        rows = [part.shape[0] for part in parts]
        target = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        for name, values, part in zip(names, target.split_with_sizes(rows), parts, strict=True):
            part.read_into(values)
            self._require_sound(values, part.stored)
            self._tell(name)
        return target

    def _require_sound(self, values: torch.Tensor, tensor: ReadableTensor) -> None:
        """Checked after the cast, which can overflow to infinity too; min and max propagate NaN."""
        least, most = (float(bound) for bound in torch.aminmax(values))
        if not (math.isfinite(least) and math.isfinite(most)):
            dtype = str(self.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name} holds NaN or infinity as {dtype}; "
                "download the checkpoint again or choose another --dtype"
            )
        # Ranks beyond the first may hold nothing but rows that no token uses.
        if least == most == 0.0 and tensor.name == EMBEDDING and self.group.rank == 0:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name} is all zero; the weights were never written")
