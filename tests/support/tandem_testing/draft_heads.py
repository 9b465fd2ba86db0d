"""Engines of tiny models with a draft head, and what a head has proposed for which text."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem_engine.config import CacheConfig, SchedulerConfig, SpecAlgorithm, SpecConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.speculative.draft_model import ModelProposer
from tandem_engine.speculative.interface import DraftRequest, DraftTokens

SHARED = [7, 8, 9, 10, 11, 12, 13] * 6


def engine_with_head(loaded: LoadedModel, head: Path | None, *, page_size: int = 16, **scheduler: Any) -> Engine:
    """Three drafts in each step, always; no drafts without a `head`."""
    spec = SpecConfig()
    if head is not None:
        spec = SpecConfig(algorithm=SpecAlgorithm.EAGLE, draft_model_path=str(head), num_draft_tokens=3, adaptive=False)
    settings = {"context_length": 200, "audit_every_step": True, "enable_overlap": False, **scheduler}
    cache = CacheConfig(page_size=page_size, num_pages=2 + 1600 // page_size)
    config = replace(loaded.config, speculative=spec, cache=cache, scheduler=SchedulerConfig(**settings))
    return Engine.build(loaded, config)


def request(rid: str, prompt: Sequence[int], **sampling: Any) -> GenerateRequest:
    params = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(rid=rid, input_ids=tuple(prompt), sampling=SamplingParams(**params))


def workload() -> list[GenerateRequest]:
    """Greedy and sampled, sharing a prefix."""
    return [
        request("greedy", SHARED),
        request("hot", [*SHARED, 1], temperature=1.0, seed=1),
        request("filtered", range(3, 60), temperature=0.9, min_p=0.05, top_k=20, top_p=0.9, seed=4),
    ]


def tokens_with(loaded: LoadedModel, head: Path | None, **options: Any) -> list[tuple[int, ...]]:
    """Of the workload; with a head, which must have drafted."""
    with engine_with_head(loaded, head, **options) as engine:
        outputs = engine.generate(workload(), steps_between=2)
        assert head is None or engine.stats().speculation.drafted_total > 0
    return [output.token_ids for output in outputs]


class Listening:
    """Records what a head proposed for which text."""

    def __init__(self, proposer: ModelProposer) -> None:
        self._proposer = proposer
        self.proposed: list[tuple[list[int], tuple[int, ...]]] = []
        self.name, self.writes_kv = proposer.name, proposer.writes_kv
        self.ready, self.release = proposer.ready, proposer.release

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTokens:
        texts = [list(one.token_ids(0, one.seq_len)) for one in requests]
        drafts = self._proposer.propose(requests)
        self.proposed += [(text, chain) for text, chain in zip(texts, drafts.chains, strict=True) if chain]
        return drafts


def proposals(loaded: LoadedModel, head: Path, **options: Any) -> list[tuple[list[int], tuple[int, ...]]]:
    """Texts and their drafts, of requests that run together, and of one that begins in the prefix cache."""
    with engine_with_head(loaded, head, **options) as engine:
        listening = Listening(engine.scheduler._shared.speculation.proposer)
        engine.scheduler._shared.speculation.proposer = listening
        engine.generate([request("first", SHARED, max_tokens=12), request("other", range(20, 41), max_tokens=8)])
        engine.generate([request("cached", [*SHARED, 3, 4], max_tokens=8)], steps_between=1)
    assert len(listening.proposed) > 5
    return listening.proposed


def add_mtp_layer(checkpoint: Path, *, seed: int = 5) -> Path:
    """Put a random layer that predicts ahead behind the last one, as DeepSeek publishes it, copies included."""
    from safetensors.torch import load_file, save_file

    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    last, ahead = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    file = checkpoint / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
    size = tensors["model.norm.weight"].shape[0]

    def like(tensor: torch.Tensor) -> torch.Tensor:
        random = torch.randn(tensor.shape, generator=generator) * 0.2
        return random.add_(1.0) if tensor.dim() == 1 else random

    own = {name.replace(last, ahead): like(tensor) for name, tensor in tensors.items() if name.startswith(last)}
    norms = {f"{ahead}{name}.weight": like(torch.empty(size)) for name in ("enorm", "hnorm", "shared_head.norm")}
    copies = {
        f"{ahead}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{ahead}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    fuse = {f"{ahead}eh_proj.weight": like(torch.empty(size, 2 * size))}
    save_file({**tensors, **own, **norms, **copies, **fuse}, file, metadata={"format": "pt"})
    return checkpoint
