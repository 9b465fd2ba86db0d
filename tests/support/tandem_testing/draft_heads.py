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
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.requests import AdapterRef, GenerateRequest
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


def request(rid: str, prompt: Sequence[int], *, adapter: AdapterRef | None = None, **sampling: Any) -> GenerateRequest:
    params = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(rid=rid, input_ids=tuple(prompt), sampling=SamplingParams(**params), adapter=adapter)


def workload() -> list[GenerateRequest]:
    """Greedy and sampled, sharing a prefix."""
    return [
        request("greedy", SHARED),
        request("hot", [*SHARED, 1], temperature=1.0, seed=1),
        request("filtered", range(3, 60), temperature=0.9, min_p=0.05, top_k=20, top_p=0.9, seed=4),
    ]


def tokens_with(
    loaded: LoadedModel, head: Path | None, *, requests: Sequence[GenerateRequest] | None = None, **options: Any
) -> list[tuple[int, ...]]:
    """Of `requests`, by default the workload; with a head, which must have drafted."""
    with engine_with_head(loaded, head, **options) as engine:
        outputs = engine.generate(workload() if requests is None else requests, steps_between=2)
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


BESIDE = {"fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "norm.": "post_norm."}
"""Beginnings of names under `mtp.` of Qwen, to those of transformers' `MtpLayer`."""


def add_mtp_layer(checkpoint: Path, *, seed: int = 5) -> Path:
    """Put a random layer that predicts ahead behind the last one, as DeepSeek publishes it, copies included; or beside
    the model, as Qwen does, whose layer is one with attention."""
    from safetensors.torch import load_file, save_file

    config = json.loads((checkpoint / "config.json").read_text())
    layers, beside = config["num_hidden_layers"], config["model_type"].startswith(("qwen3_next", "qwen3_5"))
    file = checkpoint / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
    size = tensors["model.norm.weight"].shape[0]

    def like(tensor: torch.Tensor) -> torch.Tensor:
        random = torch.randn(tensor.shape, generator=generator) * 0.2
        return random.add_(1.0) if tensor.dim() == 1 else random

    last = config["layer_types"].index("full_attention") if beside else layers - 1
    source, ahead = f"model.layers.{last}.", "mtp.layers.0." if beside else f"model.layers.{layers}."
    added = {name.replace(source, ahead): like(tensor) for name, tensor in tensors.items() if name.startswith(source)}
    outer = "mtp." if beside else ahead
    norms = (
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm") if beside else ("enorm", "hnorm", "shared_head.norm")
    )
    added |= {f"{outer}{name}.weight": like(torch.empty(size)) for name in norms}
    if not beside:
        added[f"{ahead}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        output = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        added[f"{ahead}shared_head.head.weight"] = output.clone()
    added[f"{outer}{'fc' if beside else 'eh_proj'}.weight"] = like(torch.empty(size, 2 * size))
    save_file({**tensors, **added}, file, metadata={"format": "pt"})
    return checkpoint


class KnowingProposer:
    """Drafts what a request is going to get, with every `wrong`-th token changed: some runs are accepted in part."""

    name, writes_kv = "KNOWING", False

    def __init__(self, texts: Sequence[Sequence[int]], *, wrong: int) -> None:
        """`texts`: prompts with their outputs."""
        self._texts = [[*text] for text in texts]
        self._wrong = wrong
        self._drafted = 0
        self.lengths: set[int] = set()
        """Of the chains so far."""

    def ready(self, request: DraftRequest) -> bool:
        return True

    def release(self, kv: RequestKv, token_ids: Sequence[int]) -> None:
        """It keeps nothing of a request."""

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTokens:
        chains = tuple(self._chain(one) for one in requests)
        self.lengths |= {len(chain) for chain in chains}
        return DraftTokens(chains)

    def _chain(self, request: DraftRequest) -> tuple[int, ...]:
        known = [*request.token_ids(0, request.seq_len)]
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        return tuple(self._maybe_wrong(token) for token in text[len(known) : len(known) + request.limit])

    def _maybe_wrong(self, token: int) -> int:
        self._drafted += 1
        return token ^ 1 if self._drafted % self._wrong == 0 else token
