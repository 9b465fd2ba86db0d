"""From `SpecConfig` to a proposer.

read_draft          at start, before any weights: the draft's config, checked against the target's
draft_graph_bytes   the memory of its graphs, measured before the pool is sized
keep_states         what the target's forwards write for a head, if the draft is one
make_draft_runner   pool, weights and steps of the draft
make_proposer       bookkeeping
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.config import ModelConfig, SpecAlgorithm, SpecConfig
from tandem_engine.executor.interface import Runner
from tandem_engine.executor.platform import Platform, RunnerParts
from tandem_engine.memory.cache_groups import CacheLayout, common_row
from tandem_engine.memory.group_pools import GroupPools
from tandem_engine.model.base import CausalLM, StepModel, kv_specs
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.checkpoint_folder import open_directory, read_json_object
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.decoder import Decoder
from tandem_engine.model.loader import load_model
from tandem_engine.model.tensor_names import expected_shapes
from tandem_engine.model.weights import kv_rows
from tandem_engine.parallel.group import TpGroup
from tandem_engine.speculative.draft_history import PageStamps, RecentText, WholeText
from tandem_engine.speculative.draft_model import ModelProposer, OnForwardThread
from tandem_engine.speculative.eagle import EagleModel, HiddenStates, head_shapes, load_head, read_head_config
from tandem_engine.speculative.eagle3 import (
    Eagle3Facts,
    Eagle3Model,
    eagle3_shapes,
    is_eagle3,
    load_eagle3,
    load_features,
    read_eagle3,
)
from tandem_engine.speculative.interface import Proposer
from tandem_engine.speculative.mtp import can_predict_ahead, load_mtp, mtp_shapes, read_mtp
from tandem_engine.speculative.ngram import NgramProposer

HEAD_CONTEXT = 256
"""Tokens that a head looks at when it first meets a request."""

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The model that is drafted for, and what its pool and its batches look like."""

    model: CausalLM
    is_whole: bool
    """No other rank holds a part of it."""
    path: str
    dtype: torch.dtype
    device: str
    num_pages: int
    page_size: int
    rows: int
    """Largest `req_pool_idx`."""
    context_length: int
    max_text: int
    """Tokens that a draft model may catch up with in one step."""
    group: TpGroup
    """The ranks that share the model. Each has the whole draft, and all take rank 0's guesses [rank-zero-drafts]."""
    platform: Platform
    graph_sizes: tuple[int, ...] = ()
    """Of decodes, which guesses are, and the token or two that a draft network mostly has to catch up with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A draft model or head that fits its target."""

    path: str
    config: ModelConfig
    is_head: bool
    eagle3: Eagle3Facts | None = None
    """Of a head that reads several layers."""
    is_mtp: bool = False
    """Whether the head is a layer of the target's own checkpoint."""

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Memory beside each page of the target."""
        facts = self.config
        parts = 2 if facts.latent is None else 1
        row = common_row(kv_rows(facts, 1))
        values = len(facts.paged_layers) * parts * row.heads * row.width
        return (values + self.is_head * facts.hidden_size) * page_size * dtype.itemsize

    def weight_bytes(self, dtype: torch.dtype, *, target_path: str, target_is_whole: bool) -> int:
        """Memory that its weights will take; none for a model that drafts for itself."""
        if not self.is_head and _shares_weights(self.path, target_path, target_is_whole):
            return 0
        if self.eagle3 is not None:
            shapes = eagle3_shapes(self.config, self.eagle3)
        elif self.is_mtp:
            shapes = mtp_shapes(self.config)
        else:
            shapes = head_shapes(self.config) if self.is_head else expected_shapes(self.config)
        return sum(prod(shape) for shape in shapes.values()) * dtype.itemsize


def read_draft(config: SpecConfig, *, target: ModelConfig, target_path: str) -> Draft | None:
    """The draft that `config` names, None when it names none.

    Raises:
        CheckpointError: it cannot be read, or drafts for another vocabulary or hidden size.
    """
    eagle3, is_mtp = None, False
    if config.algorithm is SpecAlgorithm.EAGLE:
        own = Path(config.draft_model_path).resolve() == Path(target_path).resolve()
        is_mtp = own and can_predict_ahead(target)
        if is_mtp:
            facts = read_mtp(target_path, target)
        elif is_eagle3(read_fields(open_directory(config.draft_model_path))):
            facts, eagle3 = read_eagle3(config.draft_model_path, target)
        else:
            facts = read_head_config(config.draft_model_path, target)
    elif config.algorithm is SpecAlgorithm.DRAFT:
        facts = read_model_config(config.draft_model_path)
    else:
        return None
    if facts.has_states:
        raise CheckpointError(
            f"the draft in {config.draft_model_path} is a {facts.family}, whose layers keep states, which rejected "
            "drafts would change; name another one with --speculative-draft-model-path"
        )
    if facts.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the draft in {config.draft_model_path} has {facts.vocab_size} token ids and the model in {target_path} "
            f"{target.vocab_size}; --speculative-draft-model-path must name one with the same tokenizer"
        )
    _require_same_tokens(Path(config.draft_model_path), Path(target_path))
    is_head = config.algorithm is SpecAlgorithm.EAGLE
    return Draft(path=config.draft_model_path, config=facts, is_head=is_head, eagle3=eagle3, is_mtp=is_mtp)


def draft_graph_bytes(draft: Draft, target: Target) -> int:
    """Memory that graphs of the draft's steps will take, by capturing some over the few pages of `target`.

    Its weights are read for it, and dropped again: they are small beside the target's.
    """

    def parts() -> RunnerParts:
        positions, states = _positions(draft, target), keep_states(draft, target)
        model = _load(draft, target, positions) if states is None else _head(draft, target, states, positions)
        return _runner_parts(model, draft, target)

    return target.platform.graph_bytes(parts)


def keep_states(draft: Draft | None, target: Target) -> HiddenStates | None:
    """Where the target's hidden states go, when a head wants them."""
    if draft is None or not draft.is_head:
        return None
    features = None
    if draft.eagle3 is not None:
        _require_decoder(target.model)
        features = load_features(draft.path, draft.eagle3, dtype=target.dtype, device=target.device)
    return HiddenStates(
        num_pages=target.num_pages,
        page_size=target.page_size,
        hidden_size=draft.config.hidden_size,
        dtype=target.dtype,
        device=target.device,
        features=features,
    )


def make_draft_runner(draft: Draft | None, target: Target, *, states: HiddenStates | None) -> Runner | None:
    """Computes the draft's steps over a pool of its own. Raises `CheckpointError`, and `ConfigError` for a target
    that has no draft.
    """
    if draft is None:
        return None
    positions = _positions(draft, target)
    model = _load(draft, target, positions) if states is None else _head(draft, target, states, positions)
    runner = target.platform.runner(_runner_parts(model, draft, target))
    runner.backend.warm_up()
    return runner


def make_proposer(
    config: SpecConfig, draft: Draft | None, target: Target, *, runner: Runner | None, run: OnForwardThread
) -> Proposer:
    """The proposer that `config` names; `runner` is the draft's."""
    if draft is None or runner is None:
        return NgramProposer(shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max)
    stamps = PageStamps(target.num_pages)
    return ModelProposer(
        name="EAGLE" if draft.is_head else "DRAFT",
        network=runner.guess,
        history=RecentText(stamps=stamps, longest=HEAD_CONTEXT) if draft.is_head else WholeText(stamps=stamps),
        run=run,
        page_size=target.page_size,
        positions=_positions(draft, target),
        max_text=target.max_text,
    )


def _runner_parts(model: StepModel, draft: Draft, target: Target) -> RunnerParts:
    pools = _pools(model, draft, target)
    return RunnerParts(
        model=model,
        pool=pools.first,
        groups=None if pools.is_plain else pools,
        num_heads=draft.config.num_heads,
        dtype=target.dtype,
        rows=target.rows,
        group=target.group,
        max_pages=-(-target.context_length // target.page_size) + 1,
        graph_sizes=target.graph_sizes,
    )


def _positions(draft: Draft, target: Target) -> int:
    """That the draft can be asked about."""
    return min(target.context_length, draft.config.max_position)


def _load(draft: Draft, target: Target, positions: int) -> CausalLM:
    if _shares_weights(draft.path, target.path, target.is_whole):
        return target.model
    return load_model(draft.path, draft.config, target.dtype, target.device, context_length=positions, progress=False)


def _shares_weights(path: str, target_path: str, target_is_whole: bool) -> bool:
    """A model that drafts for itself is loaded once, unless ranks share it: each of them has the whole draft."""
    return target_is_whole and Path(path).resolve() == Path(target_path).resolve()


def _head(draft: Draft, target: Target, states: HiddenStates, positions: int) -> EagleModel | Eagle3Model:
    decoder = _require_decoder(target.model)
    path, config, dtype, device = draft.path, draft.config, target.dtype, target.device
    if draft.eagle3 is not None:
        own = load_eagle3(path, config, draft.eagle3, dtype=dtype, device=device, positions=positions)
        return Eagle3Model(facts=config, head=own, target=decoder, states=states)
    if draft.is_mtp:
        head = load_mtp(path, decoder.config, config, dtype=dtype, device=device, positions=positions)
    else:
        head = load_head(path, config, dtype=dtype, device=device, positions=positions)
    return EagleModel(facts=config, head=head, target=decoder, states=states)


def _require_decoder(model: CausalLM) -> Decoder:
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"--speculative-algorithm EAGLE shares the embedding of the model, and a {model.config.family} "
            "model does not give it away; use DRAFT or NGRAM"
        )
    return model


def _pools(model: StepModel, draft: Draft, target: Target) -> GroupPools:
    """As many pages of as many tokens as the target's: one page table serves both."""
    return GroupPools.of(
        CacheLayout.merged(kv_specs(model, kv_rows(draft.config, 1))),
        [target.num_pages],
        page_ids=target.num_pages,
        page_size=target.page_size,
        dtype=target.dtype,
        device=target.device,
    )


def _require_same_tokens(draft: Path, target: Path) -> None:
    """As many ids are not the same ids. Folders without a tokenizer are taken at their word."""
    files = [folder / TOKENIZER for folder in (draft, target)]
    if not all(file.is_file() for file in files):
        return
    mine, theirs = (read_json_object(file, max_bytes=MAX_TOKENIZER).get("model") for file in files)
    if mine != theirs:
        raise CheckpointError(
            f"{files[0]} and {files[1]} cut text into different tokens; --speculative-draft-model-path must name a "
            "model with the same tokenizer"
        )
