"""From a model directory to weights in memory, with progress reports; or random weights of the same shapes.

    1. headers of all files are checked, and the tensors they name compared with the config
    2. tensor by tensor: read, copied into its place in the target dtype, checked for NaN and infinity

Projections with the same input are stacked into one matrix as they are read, so that a block has four GEMMs instead of
seven. Apart from the weights, memory holds one stored tensor at a time.

`load_progress`: a checkpoint of a hundred gigabytes takes minutes to read, and the log of a pod must distinguish that
from a hang. Progress is a bar on a terminal, else a line in the log at intervals. A checkpoint that is read within
`PERIOD_S` gives a single line.

`DummyWeights` (`--load-format dummy`) measures speed and memory without a checkpoint. Weights are drawn on their
device, in seconds for models that would take minutes to read. Each matrix has its own seed, so that two engines of one
config, such as a prefill and a decode worker, have the same weights. Their scale is that of freshly initialized models:
activations stay finite through any number of layers.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from tandem_engine.base.clock import Clock, MonotonicClock
from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.base.progress import START, Phase
from tandem_engine.config import LoadFormat, ModelConfig, ModelImpl, Quantization
from tandem_engine.model.base import CausalLM
from tandem_engine.model.checkpoint import open_stored, open_weights
from tandem_engine.model.checkpoint_files import ReadableTensor
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.decoder import build_decoder
from tandem_engine.model.layers.linear import can_multiply
from tandem_engine.model.long_context import has_long_angles, log_long_angles
from tandem_engine.model.quantization.dequantized import DequantizedRows, DequantizedTensor
from tandem_engine.model.quantization.kv_scales import read_kv_scales
from tandem_engine.model.quantization.levels import Levels, int8_levels
from tandem_engine.model.quantization.scheme import Holding, holding_of, read_scheme
from tandem_engine.model.tensor_names import EMBEDDING, expected_shapes, require_tensors
from tandem_engine.model.weights import require_shareable
from tandem_engine.parallel.group import SingleRank, TpGroup
from tandem_engine.parallel.sharding import Part, Split, part_of, shape_of_part

STD = 0.02
"""`initializer_range` of most families."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DummyWeights:
    """Implements `Weights` for tensors of the named shapes."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    group: TpGroup = field(default_factory=SingleRank)
    holding: Holding = Holding.DTYPE
    """`PACKED` is that of a checkpoint, and means nothing here."""

    def matrix(self, *names: str, split: Split | None = None, rounded: bool = True) -> Tensor | Levels:
        """See `Weights.matrix`."""
        plain = self.stacked(*names, split=split)
        if not (rounded and self.holding is Holding.INT8):
            return plain
        levels = int8_levels(plain)
        return levels if can_multiply(levels, self.device) else plain

    def stacked(self, *names: str, split: Split | None = None) -> Tensor:
        """As `Weights.stacked`: normal with deviation `STD`; weights of norms lie around 1."""
        shapes = [self._held(self.shapes[name], split) for name in names]
        target = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        target.normal_(0.0, STD, generator=self._dice(names, split))
        return target.add_(1.0) if all(name.endswith("norm.weight") for name in names) else target

    def exact(self, name: str) -> Tensor:
        """See `Weights.exact`."""
        return self.stacked(name).float()

    def _held(self, shape: tuple[int, ...], split: Split | None) -> tuple[int, ...]:
        return shape_of_part(shape, *part_of(shape, split, rank=self.group.rank, size=self.group.size))

    def _dice(self, names: tuple[str, ...], split: Split | None) -> torch.Generator:
        rank = 0 if split is None else self.group.rank
        digest = hashlib.blake2b(f"{rank} {' '.join(names)}".encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest) >> 1)


logger = logging.getLogger(__name__)

PERIOD_S = 10.0
"""Seconds between two lines."""

GIB = 1 << 30


@contextmanager
def load_progress(
    total: int,
    *,
    shown: bool,
    doing: str = "loading weights",
    phase: Phase = Phase.WEIGHTS,
    clock: Clock | None = None,
) -> Iterator[Callable[[int], object]]:
    """The function that takes the bytes of every tensor that was read, of `total`. Without `shown` it reports nothing.

    `doing`: what the bar and the lines begin with.
    """
    with tqdm(total=total, unit="B", unit_scale=True, desc=doing, disable=None if shown else True) as bar:
        if bar.disable and shown:
            yield _reported(_LogLines(total, doing, clock or MonotonicClock()).advance, phase, total)
        else:
            yield _reported(bar.update, phase, total)


def _reported(advance: Callable[[int], object], phase: Phase, total: int) -> Callable[[int], object]:
    """`advance`, and the same as the progress of this process's start."""
    done = 0

    def both(size: int) -> None:
        nonlocal done
        done += size
        START.report(phase, done=done, total=total, unit="bytes")
        advance(size)

    return both


class _LogLines:
    """One at the beginning, and one in each period in which there is news."""

    def __init__(self, total: int, doing: str, clock: Clock) -> None:
        self._clock = clock
        self._total = total
        self._doing = doing
        self._done = 0
        self._due = clock.now() + PERIOD_S
        logger.info("%s: %.2f GiB", doing, total / GIB)

    def advance(self, done: int) -> None:
        self._done += done
        if self._clock.now() < self._due:
            return
        self._due = self._clock.now() + PERIOD_S
        share = 100 * self._done // self._total
        logger.info("%s: %.2f of %.2f GiB, %d %%", self._doing, self._done / GIB, self._total / GIB, share)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """A range of one dimension of a stored tensor, with zeros behind it where the split is padded."""

    stored: ReadableTensor
    dim: int
    part: Part

    @classmethod
    def of(cls, stored: ReadableTensor, split: Split | None, group: TpGroup) -> "StoredPart":
        """What `group`'s rank holds of `stored`."""
        dim, part = part_of(stored.shape, split, rank=group.rank, size=group.size)
        return cls(stored=stored, dim=dim, part=part)

    @property
    def shape(self) -> tuple[int, ...]:
        """Padding included."""
        return shape_of_part(self.stored.shape, self.dim, self.part)

    def read_into(self, target: Tensor) -> None:
        """Fill `target`, of this shape. Raises `CheckpointError` as `StoredTensor.read` does."""
        start, stop = self.part.start, self.part.stop
        held = stop - start
        target.narrow(self.dim, 0, held).copy_(self.stored.read_part(self.dim, start, stop))
        target.narrow(self.dim, held, self.part.length - held).zero_()


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
    adapted: bool = False,
) -> CausalLM:
    """Load the weights in `path`, the directory that `config` was read from.

    Args:
        context_length: positions that will be used at most; None for all that the model can have.
        progress: show a bar on standard error when that is a terminal, else lines in the log.
        group: the ranks that share the model; this one reads its part alone. None reads all.
        load_format: with `dummy`, no weight file is opened.
        quantization: how projections are held; what `config` was read with.
        adapted: tokens may have adapters.

    Raises:
        ConfigError: the ranks of `group` cannot share this model evenly, or it is not held like that.
        CheckpointError: a file is absent or broken, a tensor missing, superfluous, misshapen or not finite.
    """
    group = group or SingleRank()
    require_shareable(config, group.size)
    directory = open_directory(path)
    positions = min(context_length or config.max_position, config.max_position)
    if config.impl is ModelImpl.TRANSFORMERS:
        # No other path needs transformers installed, or waits for its import.
        from tandem_engine.model.fallback import load_fallback

        return load_fallback(
            directory, config, dtype, torch.device(device), context_length=positions, progress=progress
        )
    if has_long_angles(config, positions):
        log_long_angles(config.rope.original_max_position or positions)
    place, scheme = torch.device(device), read_scheme(read_fields(directory))
    holding = holding_of(quantization, scheme, place)
    if load_format is LoadFormat.DUMMY:
        dummy = DummyWeights(shapes=expected_shapes(config), dtype=dtype, device=place, group=group, holding=holding)
        return build_decoder(config, dummy, positions=positions, adapted=adapted)
    tensors = open_weights(directory, scheme, config)
    require_tensors(config, tensors, where=directory.path)
    total = sum(tensors[name].size for name in expected_shapes(config))
    with load_progress(total, shown=progress) as advance:
        weights = WeightReader(
            tensors=tensors, dtype=dtype, device=place, advance=advance, group=group, holding=holding
        )
        return build_decoder(config, weights, positions=positions, adapted=adapted)


def load_kv_scales(path: str | Path, config: ModelConfig, *, load_format: LoadFormat) -> torch.Tensor | None:
    """The scales for float8 KV that the model in `path` brings: see `read_kv_scales`."""
    if load_format is LoadFormat.DUMMY:
        return None
    directory = open_directory(path)
    return read_kv_scales(open_stored(directory, config), config, read_fields(directory))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReader:
    """Reads tensors that `require_tensors` has accepted, in the dtype and on the device of the model."""

    tensors: Mapping[str, ReadableTensor]
    dtype: torch.dtype
    device: torch.device
    advance: Callable[[int], object]
    """Called with the bytes of every tensor once, however often it is read, those of other ranks included."""
    group: TpGroup = field(default_factory=SingleRank)
    holding: Holding = Holding.DTYPE
    _counted: set[str] = field(default_factory=set, init=False)

    def matrix(self, *names: str, split: Split | None = None, rounded: bool = True) -> torch.Tensor | Levels:
        """See `Weights.matrix`."""
        levels = None if self.holding is Holding.DTYPE else self._levels(*names, split=split, rounded=rounded)
        if levels is None or not can_multiply(levels, self.device):
            return self.stacked(*names, split=split)
        for name in names:
            self._count(name)
        return levels.to(self.device)

    def _count(self, name: str) -> None:
        if name not in self._counted:
            self._counted.add(name)
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
        if isinstance(stored, DequantizedTensor | DequantizedRows):
            return stored.levels()
        if not (rounded and self.holding is Holding.INT8):
            return None
        return int8_levels(stored.read_part(0, 0, stored.shape[0]))

    def stacked(self, *names: str, split: Split | None = None) -> torch.Tensor:
        """The named tensors one below the other, along dimension 0; just the tensor when there is one.

        With `split`, this rank's part of each.
        """
        return self._read(*names, split=split, dtype=self.dtype)

    def exact(self, name: str) -> torch.Tensor:
        """See `Weights.exact`."""
        return self._read(name, split=None, dtype=torch.float32)

    def _read(self, *names: str, split: Split | None, dtype: torch.dtype) -> torch.Tensor:
        parts = [StoredPart.of(self.tensors[name], split, self.group) for name in names]
        rows = [part.shape[0] for part in parts]
        target = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=dtype, device=self.device)
        for name, values, part in zip(names, target.split_with_sizes(rows), parts, strict=True):
            part.read_into(values)
            self._require_sound(values, part.stored)
            self._count(name)
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
