"""The folder of an adapter: config and header are checked against the base model before any tensor is read.

    adapter_config.json ─▶ PeftFacts ──────────────┐
    adapter_model.safetensors ─▶ header ─▶ names ──┴▶ pairs of A and B ─▶ `AdapterCheckpoint`, its bytes known

A pair is accepted if the base model has the projection, shapes fit it, and the rank is the one that the config implies
and within the limit. The folder is untrusted: file names, links, sizes and headers are checked as those of a model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelConfig, ModelImpl
from tandem_engine.model.adapters.peft_config import PeftFacts, ends_with
from tandem_engine.model.adapters.tensor_names import PLAIN, SITES, Matrix, Site, parse_name
from tandem_engine.model.checkpoint_files import StoredTensor, read_header
from tandem_engine.model.checkpoint_folder import ModelDirectory, open_directory, shown
from tandem_engine.model.tensor_aliases import ALIASES, Aliases
from tandem_engine.model.tensor_names import FLOATS, expected_shapes, layer_prefix

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
PICKLED = "adapter_model.bin"
MAX_HEADER = 1 << 22
"""Bytes of the header of `WEIGHTS`: far more than all projections of any model need. It is parsed while an engine
serves."""

NEVER_SUPPORTED = ("lm_head", "embed_tokens")
"""Modules that an adapter may be trained for and that have none here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A and B of one projection, not read yet."""

    layer: int
    projection: str
    a: StoredTensor
    b: StoredTensor
    rank: int
    scale: float

    @property
    def site(self) -> Site:
        return SITES[self.projection]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterCheckpoint:
    """An adapter that fits its base model."""

    path: Path
    pairs: tuple[Pair, ...]
    """By layer and projection."""

    @property
    def rank(self) -> int:
        """The largest."""
        return max(pair.rank for pair in self.pairs)

    @property
    def num_bytes(self) -> int:
        """Of all tensors in the file."""
        return sum(pair.a.size + pair.b.size for pair in self.pairs)


def open_adapter(path: str | Path, base: ModelConfig, *, max_rank: int) -> AdapterCheckpoint:
    """Read config and header of the adapter in the folder `path`; no tensor data.

    Raises `CheckpointError`, naming the field or tensor, if the folder has no adapter for `base` with ranks of at most
    `max_rank`.
    """
    if base.impl is ModelImpl.TRANSFORMERS:
        raise CheckpointError(
            f"{path}: adapters need a model that Tandem computes itself; code of transformers computes this one"
        )
    if base.latent is not None:
        raise CheckpointError(
            f"{path}: adapters of models with latent attention (MLA) are not supported; merge the adapter into its base"
        )
    if base.varied is not None:
        raise CheckpointError(
            f"{path}: adapters of models whose layers differ in their heads ({base.family}) are not supported; merge "
            "the adapter into its base"
        )
    directory = open_directory(path)
    facts = PeftFacts.read(directory.file(CONFIG))
    matrices = _matrices(read_header(_weights_file(directory), max_bytes=MAX_HEADER))
    if not matrices:
        raise CheckpointError(f"{directory.path / WEIGHTS} has no tensors: the adapter changes nothing")
    shapes = base_shapes(base)
    pairs = tuple(
        _pair(matrix, matrices, facts, shapes, max_rank=max_rank) for matrix in sorted(matrices) if matrix.is_a
    )
    _require_partners(matrices)
    _require_targets(facts, matrices, base, shapes)
    return AdapterCheckpoint(path=directory.path, pairs=pairs)


def base_shapes(base: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of the weights of `base`, also under the names of matrices of its checkpoints that hold several projections."""
    shapes = expected_shapes(base)
    for joined, parts in ALIASES.get(base.family, Aliases()).joined.items():
        for layer in range(base.num_layers):
            own = [shapes.get(f"{layer_prefix(layer)}{part}.weight", ()) for part in parts]
            if all(len(shape) == 2 for shape in own):
                shapes[f"{layer_prefix(layer)}{joined}.weight"] = (sum(shape[0] for shape in own), own[0][1])
    return shapes


def _weights_file(directory: ModelDirectory) -> Path:
    if directory.has(WEIGHTS):
        return directory.file(WEIGHTS)
    if directory.has(INDEX):
        raise CheckpointError(f"{directory.path / INDEX}: an adapter in several files is not supported; save it as one")
    if directory.has(PICKLED):
        raise CheckpointError(
            f"{directory.path / PICKLED} is in pickle format, which can run code when loaded, and is never read; save "
            "the adapter with safe_serialization=True"
        )
    raise CheckpointError(f"no {WEIGHTS} in {directory.path}")


def _matrices(tensors: Mapping[str, StoredTensor]) -> dict[Matrix, StoredTensor]:
    found: dict[Matrix, StoredTensor] = {}
    taken: dict[tuple[int, str, bool], str] = {}
    for name, tensor in tensors.items():
        matrix = parse_name(name)
        if isinstance(matrix, str):
            raise CheckpointError(f"{tensor.path}: {matrix}")
        other = taken.setdefault((matrix.layer, matrix.projection, matrix.is_a), name)
        if other != name:
            raise CheckpointError(f"{tensor.path}: tensors {shown(other)} and {shown(name)} are the same matrix")
        found[matrix] = tensor
    return found


def _pair(
    matrix: Matrix,
    matrices: Mapping[Matrix, StoredTensor],
    facts: PeftFacts,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    max_rank: int,
) -> Pair:
    """Of the A `matrix`."""
    a = matrices[matrix]
    b = matrices.get(matrix._replace(is_a=False))
    if b is None:
        raise CheckpointError(f"{a.path}: tensor {shown(a.name)} has no lora_B of the same module")
    base = shapes.get(matrix.base_weight)
    if base is None:
        raise CheckpointError(f"{a.path}: tensor {shown(a.name)} is for a projection that the base model does not have")
    rank = facts.rank_of(matrix.module)
    if rank > max_rank:
        raise CheckpointError(f"{a.path}: tensor {shown(a.name)} has rank {rank}; the limit is {max_rank}")
    outputs, inputs = base
    _require(a, (rank, inputs), base)
    _require(b, (outputs, rank), base)
    scale = facts.scale_of(matrix.module)
    return Pair(layer=matrix.layer, projection=matrix.projection, a=a, b=b, rank=rank, scale=scale)


def _require(tensor: StoredTensor, shape: tuple[int, ...], base: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: tensor {shown(tensor.name)} has shape {list(tensor.shape)}; a projection of shape "
            f"{list(base)} in the base model and {CONFIG} imply {list(shape)}"
        )
    if tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{tensor.path}: tensor {shown(tensor.name)} is {str(tensor.dtype).removeprefix('torch.')}; adapters are "
            "float32, bfloat16 or float16"
        )


def _require_partners(matrices: Mapping[Matrix, StoredTensor]) -> None:
    for matrix, tensor in matrices.items():
        if matrix._replace(is_a=not matrix.is_a) not in matrices:
            raise CheckpointError(f"{tensor.path}: tensor {shown(tensor.name)} has no lora_A of the same module")


def _require_targets(
    facts: PeftFacts, matrices: Iterable[Matrix], base: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise for a module that the config lists and the model has, but that has no tensors here."""
    modules = [matrix.module for matrix in matrices]
    known = PLAIN if base.delta is None else SITES
    in_layers = None if facts.layers is None else _modules_of(facts.layers, known, base, shapes)
    for target in facts.target_modules:
        if facts.excludes(target) or any(ends_with(module, target) for module in modules):
            continue
        if in_layers is None:
            is_known = any(ends_with(name, target) or ends_with(target, name) for name in (*known, *NEVER_SUPPORTED))
        else:
            is_known = any(ends_with(module, target) for module in in_layers)
        if is_known:
            raise CheckpointError(
                f"{facts.path}: target_modules lists {shown(target)}, but {WEIGHTS} has no tensors of it; save the "
                "adapter again, or remove the entry"
            )


def _modules_of(
    layers: Iterable[int], known: Iterable[str], base: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Those of `known` that these layers have: layers of hybrid models have different ones."""
    there = sorted({*layers} & {*range(base.num_layers)})
    names = (f"{layer_prefix(layer)}{projection}" for layer in there for projection in known)
    return [name for name in names if f"{name}.weight" in shapes]
