"""A checkpoint in memory: weights and what follows from it, for any number of engines of one process."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tandem_engine.config import EngineConfig, ModelConfig
from tandem_engine.errors import ConfigError
from tandem_engine.executor.memory_meter import meter_for
from tandem_engine.freed import give_back
from tandem_engine.huge_pages import movable, to_huge_pages
from tandem_engine.memory.kv_dtype import require_kv_dtype
from tandem_engine.model.base import CausalLM
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.load_progress import load_progress
from tandem_engine.model.loader import load_kv_scales, load_model, resolve_dtype
from tandem_engine.model.long_context import default_context, fingerprint_of
from tandem_engine.model.sharing import require_shareable
from tandem_engine.model.weight_memory import weight_memory
from tandem_engine.parallel.devices import device_of_rank, require_device
from tandem_engine.parallel.group import Parallel
from tandem_engine.sampling.grammar.guidance.vocabulary import GuidanceVocabulary
from tandem_engine.speculative.assembly import read_draft
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer


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
    config = replace(config, device=device_of_rank(config.device, config.parallel.local_rank(parallel.rank)))
    read_draft(config.speculative, target=facts, target_path=config.model_path)
    context_length = _context_length(config, facts)
    facts = replace(facts, fingerprint=fingerprint_of(facts, context_length))
    threads = max(1, (config.threads or len(config.cpus) or torch.get_num_threads()) // config.parallel.local_size)
    # This thread only schedules; see `ForwardThread` for what a second compute team would cost.
    torch.set_num_threads(1)
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
    )
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
        parallel=parallel,
        weight_bytes=max(0, meter.used() - before),
    )


def _to_huge_pages(model: CausalLM, *, progress: bool) -> None:
    ranges = movable(weight_memory(model))
    if total := sum(size for _, size in ranges):
        with load_progress(total, shown=progress, doing="moving weights to huge pages") as advance:
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
