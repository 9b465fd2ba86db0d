"""A checkpoint in memory: weights and what follows from it, for any number of engines of one process."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Self

import msgspec
import torch
from torch import Tensor

from tandem_engine.base.cgroups import describe_cpus, describe_memory, usable_cpus
from tandem_engine.base.environment import limit_products
from tandem_engine.base.errors import ConfigError
from tandem_engine.base.freed_memory import give_back
from tandem_engine.base.linux import movable, to_huge_pages
from tandem_engine.base.progress import Phase
from tandem_engine.config import EngineConfig, ModelConfig
from tandem_engine.engine.stateful_models import require_supported
from tandem_engine.executor.memory_profile import meter_for
from tandem_engine.kernels.interface import FLOAT8
from tandem_engine.memory.cache_groups import KvRow, common_row
from tandem_engine.memory.pool import kv_dtype, require_kv_dtype
from tandem_engine.messages.control import KvGeometry
from tandem_engine.model.adapters.loaded import LoadedAdapters, require_same_content
from tandem_engine.model.base import CausalLM
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.decoder import Decoder
from tandem_engine.model.loader import load_kv_scales, load_model, load_progress, resolve_dtype
from tandem_engine.model.long_context import default_context, fingerprint_of
from tandem_engine.model.quantization.kv_scales import scales_digest
from tandem_engine.model.recurrent.blocks import state_spec
from tandem_engine.model.weights import kv_rows, require_shareable
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import Parallel, device_of_rank, require_device
from tandem_engine.parallel.sharding import OUTPUTS
from tandem_engine.sampling.grammar.guidance.translate import GuidanceVocabulary
from tandem_engine.speculative.assembly import read_draft
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


def weight_memory(model: object) -> list[tuple[int, int]]:
    """Address and bytes of every tensor on a CPU that `model`, made of dataclasses and tuples of them, holds."""
    return list(_memory(model, set()))


def _memory(part: object, seen: set[int]) -> Iterator[tuple[int, int]]:
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        if part.device.type == "cpu":
            yield _place(part)
    elif is_dataclass(part):
        for each in fields(part):
            yield from _memory(getattr(part, each.name), seen)
    elif isinstance(part, tuple | list):
        for each in part:
            yield from _memory(each, seen)


def _place(tensor: Tensor) -> tuple[int, int]:
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    try:
        return int(torch.ops.mkldnn.data_ptr(tensor)), int(torch.ops.mkldnn._nbytes(tensor))
    except (AttributeError, RuntimeError):
        return 0, 0  # a torch, or a build of it, that does not say where an opaque tensor lies


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """Weights and everything that follows from the checkpoint. Immutable and shared."""

    config: EngineConfig
    model: CausalLM
    dtype: torch.dtype
    threads: int
    """That a forward may use."""
    text: TextTokenizer | None
    vocabulary: GuidanceVocabulary | None = None
    """For grammars; None without a tokenizer or an EOS token."""
    kv_scales: torch.Tensor | None = None
    """For float8 KV, of all heads of the model: [layers, 2, KV heads]. None where the checkpoint has none."""
    adapters: LoadedAdapters = field(default_factory=LoadedAdapters)
    parallel: Parallel = field(default_factory=Parallel)
    """This rank and those that hold the rest of the weights."""
    weight_bytes: int = 0
    """Memory that loading took for good, on this rank."""

    @property
    def model_config(self) -> ModelConfig:
        return self.model.config


def load(config: EngineConfig, *, progress: bool, parallel: Parallel | None = None) -> LoadedModel:
    """Read the checkpoint, or this rank's part of it. `parallel`: the ranks, if there are several (see `launch`).

    Raises `CheckpointError` and `ConfigError` before anything large is allocated.
    """
    parallel = parallel or Parallel()
    assert parallel.size == config.parallel.tp_size, f"{parallel.size} ranks for {config.parallel}"
    facts = require_loadable(config)
    require_supported(facts, config)
    config = replace(config, device=device_of_rank(config.device, config.parallel.local_rank(parallel.rank)))
    read_draft(config.speculative, target=facts, target_path=config.model_path)
    context_length = _context_length(config, facts)
    facts = replace(facts, fingerprint=fingerprint_of(facts, context_length))
    threads = max(1, _threads(config) // config.parallel.local_size)
    logger.info("computing with %d threads a rank (%s, %s)", threads, describe_cpus(), describe_memory())
    # This thread only schedules; see `ForwardThread` for what a second compute team would cost.
    torch.set_num_threads(1)
    limit_products()
    dtype = resolve_dtype(config.dtype, facts, device=config.device)
    meter = meter_for(config.device)
    before = meter.used()
    model = load_model(
        config.model_path,
        facts,
        dtype,
        config.device,
        context_length=context_length,
        progress=progress,
        group=parallel.forward,
        load_format=config.load_format,
        quantization=config.quantization,
        adapted=config.adapters.may_exist,
    )
    require_supported(model.config, config)
    adapters = LoadedAdapters.load(
        config.adapters,
        facts,
        dtype=dtype,
        device=config.device,
        group=parallel.forward,
        keeps_halves=reads_halves(model),
    )
    require_same_content(adapters.names, Agreement(parallel.forward).least)
    give_back()
    _to_huge_pages(model, progress=progress)
    scheduler = replace(config.scheduler, context_length=context_length)
    folder = Path(config.model_path)
    text = TextTokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    return LoadedModel(
        config=replace(config, scheduler=scheduler),
        model=model,
        dtype=dtype,
        threads=threads,
        text=text,
        vocabulary=None if text is None else _vocabulary(folder, facts),
        kv_scales=load_kv_scales(config.model_path, model.config, load_format=config.load_format),
        adapters=adapters,
        parallel=parallel,
        weight_bytes=max(0, meter.used() - before),
    )


def reads_halves(model: CausalLM) -> bool:
    """Whether its steps read adapters in bfloat16 as they are. Those of other models would widen them each time."""
    return isinstance(model, Decoder) and model.fused is not None


def _threads(config: EngineConfig) -> int:
    """CPU threads of one engine. More than the CPU quota of a container gives would be stopped in turns."""
    return config.threads or min(len(config.cpus) or torch.get_num_threads(), usable_cpus())


def _to_huge_pages(model: CausalLM, *, progress: bool) -> None:
    ranges = movable(weight_memory(model))
    if total := sum(size for _, size in ranges):
        with load_progress(
            total, shown=progress, doing="moving weights to huge pages", phase=Phase.HUGE_PAGES
        ) as advance:
            to_huge_pages(ranges, advance=advance)


def _vocabulary(folder: Path, facts: ModelConfig) -> GuidanceVocabulary | None:
    if not facts.eos_token_ids:
        return None
    return GuidanceVocabulary(
        tokenizer_file=folder / "tokenizer.json", vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids
    )


def require_loadable(config: EngineConfig) -> ModelConfig:
    """What the checkpoint says of itself. Raises what `load` would, before any weights are read."""
    require_device(config.device, ranks=config.parallel.local_size)
    require_kv_dtype(config.cache.dtype, config.device)
    facts = read_model_config(
        config.model_path,
        impl=config.model_impl,
        load_format=config.load_format,
        quantization=config.quantization,
        device=config.device,
    )
    require_shareable(facts, config.parallel.tp_size)
    _context_length(config, facts)
    return facts


def _context_length(config: EngineConfig, facts: ModelConfig) -> int:
    if config.context_length > facts.max_position:
        raise ConfigError(
            f"--context-length {config.context_length} is over the model's {facts.max_position} positions"
        )
    if config.context_length == 1:
        raise ConfigError("--context-length must be at least 2, a token of prompt and one of output, got 1")
    return config.context_length or default_context(facts, config.default_context)


LAYOUT_VERSION = 2
"""Of `KvPool`, [page, layer, kv, kv_head, slot, head_dim], and of the digests of its pages."""

NUMERICS_REVISION = 0
"""Of `KvGeometry.numerics`. `make skew` fails where it should have grown: outputs then differ between releases."""


def compat_hash(geometry: KvGeometry, kv_heads: int, peer_group: str = "", *, states: str | None = None) -> str:
    """Digest of everything two workers must share before one writes into the other's pages.

    Not of how many ranks share the model's `kv_heads`: each head goes to the rank that holds it there. `states`: those
    of the model, where ranks divide them by heads.
    """
    states = geometry.states if states is None else states
    whole = msgspec.structs.replace(geometry, num_kv_heads=kv_heads, tp_size=1, states=states)
    group = hashlib.blake2b(peer_group.encode(), digest_size=16).digest() if peer_group else b""
    return hashlib.blake2b(msgspec.msgpack.encode(whole), digest_size=16, key=group).hexdigest()


def kv_geometry(loaded: LoadedModel, config: EngineConfig) -> KvGeometry:
    """Of the pages of this rank."""
    facts, dtype = loaded.model_config, kv_dtype(config.cache.dtype, loaded.dtype)
    rows = kv_rows(facts, loaded.parallel.size)
    row = common_row(rows)
    return KvGeometry(
        fingerprint=facts.fingerprint,
        num_layers=len(facts.paged_layers),
        num_kv_heads=row.heads,
        head_dim=row.width,
        page_size=config.cache.page_size,
        dtype=dtype_name(dtype),
        layout_version=LAYOUT_VERSION,
        numerics=NUMERICS_REVISION,
        tp_size=loaded.parallel.size,
        model_dtype="" if dtype is loaded.dtype else dtype_name(loaded.dtype),
        kv_scales=kv_scales_name(loaded, dtype),
        value_width=loaded.model.attention[0].value_width or 0,
        states=states_name(loaded, loaded.parallel.size),
        rows=rows_name(rows, loaded.parallel.size),
    )


def rows_name(rows: Sequence[KvRow], size: int) -> str:
    """See `KvGeometry.rows`. Ranks cut layers in different ways, so those of other numbers of ranks fit nowhere."""
    if len(set(rows)) == 1:
        return ""
    return f"{' '.join(f'{row.heads}x{row.width}' for row in rows)}, 1 of {size} ranks"


def states_name(loaded: LoadedModel, size: int) -> str:
    """See `KvGeometry.states`, of an engine of `size` ranks."""
    spec = state_spec(loaded.model_config, loaded.dtype, size)
    return "" if spec is None else f"{spec.name}, 1 of {size} ranks"


def _peers_states(loaded: LoadedModel) -> str:
    """What peers need to have in common: the states of the model where ranks divide them by heads, else those of this
    number of ranks."""
    size = loaded.parallel.size
    spec = state_spec(loaded.model_config, loaded.dtype, size)
    return states_name(loaded, 1 if spec is not None and spec.head_blocks else size)


def kv_scales_name(loaded: LoadedModel, dtype: torch.dtype) -> str:
    """See `KvGeometry.kv_scales`."""
    return scales_digest(loaded.kv_scales) if dtype in FLOAT8 else ""


def scales_of_rank(loaded: LoadedModel) -> torch.Tensor:
    """Those of the KV heads that this rank holds."""
    facts, parallel = loaded.model_config, loaded.parallel
    part = OUTPUTS.part(facts.num_kv_heads, rank=parallel.rank, size=parallel.size)
    whole = torch.ones(facts.num_layers, 2, facts.num_kv_heads) if loaded.kv_scales is None else loaded.kv_scales
    return whole[list(facts.paged_layers), :, part.start : part.stop]


def dtype_name(dtype: torch.dtype) -> str:
    """As in flags: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


ANOTHER_WITH_OTHER_WEIGHTS = ("fingerprint", "dtype")
"""Of a `ModelConfig`: the dtype on disk says nothing about the one in memory, and the fingerprint is what changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Of one rank."""

    loaded_with: EngineConfig
    model_config: ModelConfig
    geometry: KvGeometry
    states: str
    """As peers need to have them."""
    peer_group: str

    @classmethod
    def of(cls, loaded: LoadedModel, config: EngineConfig) -> Self:
        return cls(
            loaded_with=loaded.config,
            model_config=loaded.model_config,
            geometry=kv_geometry(loaded, config),
            states=_peers_states(loaded),
            peer_group=config.disagg.peer_group,
        )

    @property
    def compat_hash(self) -> str:
        """Workers with different ones exchange no KV."""
        return compat_hash(self.geometry, self.kv_heads, self.peer_group, states=self.states)

    @property
    def kv_heads(self) -> int:
        """Those of the whole model, as pages hold them."""
        if self.geometry.rows:
            return self.geometry.num_kv_heads * self.geometry.tp_size
        return self.model_config.num_kv_heads

    def with_weights(self, loaded: LoadedModel, kv_dtype: torch.dtype) -> "Served":
        """The same with the weights of `loaded`, over pages of `kv_dtype`."""
        geometry = msgspec.structs.replace(
            self.geometry,
            fingerprint=loaded.model_config.fingerprint,
            kv_scales=kv_scales_name(loaded, kv_dtype),
        )
        return replace(self, loaded_with=loaded.config, model_config=loaded.model_config, geometry=geometry)

    def require_same_architecture(self, loaded: LoadedModel) -> None:
        """Raise `ConfigError` unless `loaded` can take the place of what is served."""
        path, dtype = loaded.config.model_path, dtype_name(loaded.dtype)
        served = self.geometry.model_dtype or self.geometry.dtype
        if dtype != served:
            raise ConfigError(f"{path} loads as {dtype}, but the engine serves {served}: restart with --dtype")
        old, new = asdict(self.model_config), asdict(loaded.model_config)
        differing = [name for name in old if old[name] != new[name] and name not in ANOTHER_WITH_OTHER_WEIGHTS]
        if differing:
            name = differing[0]
            raise ConfigError(
                f"{path} has {name} {new[name]}, served is {old[name]}: a reload keeps the architecture, "
                "start a worker for another one"
            )
