"""A few paths of `tandem verify` on one checkpoint, for the many models that need not take them all."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.config import EngineConfig, GrammarConfig, KvCacheDtype, ModelImpl
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.sampling.grammar.backend import CompiledGrammar
from tandem_engine.sampling.grammar.guidance.backend import GuidanceBackend
from tandem_engine.sampling.grammar.guidance.translate import GuidanceVocabulary
from tandem_lab.verify.compare import MIN_BOUND, PathResult, RememberedScores, Score, logprob_bound
from tandem_lab.verify.engines import PlatformMaker, ThreadRanks, platform_of_device
from tandem_lab.verify.path import Path as VerifyPath
from tandem_lab.verify.paths import DraftPaths, make_paths, on_ranks
from tandem_lab.verify.reference import PromptSet, TransformersReference, edits_against, make_prompts
from tandem_lab.verify.verification import Verification

CHUNKED, CACHED, MIXED, RETRACTED = "chunked by 7, overlap", "prefix-cached", "mixed, staggered", "retracted (forced)"
CONTINUED = "continued in sessions"
TWICE = "twice, to the bit"
DISAGGREGATED = "disaggregated over NIXL"
SWAPPED, HOST, FILES = "swapped (forced)", "host cache, write_back", "files, after a restart"
FETCHED = "prefix fetched over NIXL"
MOVED, FAULTY = "drained mid-stream", "every fifth step raises, disaggregated"
SHARED = "mixed, staggered, 2 ranks"
UNEQUAL = ("disaggregated over NIXL, 1 to 2 ranks", "disaggregated over NIXL, 2 to 1 ranks")

ALL_PATHS = ["qwen3", "gemma2"]
"""Tiny models that take every path between them: normalized heads; windows, soft caps and a second norm."""
MEETING_PATHS = (CHUNKED, CACHED, MIXED, RETRACTED, DISAGGREGATED, SHARED, *UNEQUAL)
"""On which pages of requests, engines and ranks meet."""
MEETING_HALVES = ((CHUNKED, MIXED, DISAGGREGATED, UNEQUAL[1]), (CACHED, RETRACTED, SHARED, UNEQUAL[0]))
"""For two families that are alike there."""
REDUCED_PATHS = [
    "llama-llama3-rope",
    "qwen2",
    "mistral",
    "mixtral",
    "qwen2-window",
    "qwen3-moe",
    "qwen3-moe-raw-weights",
    "gpt-oss",
    "gemma3",
    "deepseek-v2-groups",
    "deepseek-v3",
    "glm4-moe-lite",
]
"""All but the first two have windows shorter than the prompts, or experts; the last three keep latents."""

ADDED_PATHS = {
    # Layers that do not rotate next to layers with windows; two blocks that read one norm.
    "cohere2": (CHUNKED, CACHED, DISAGGREGATED),
    # Pages of keys in another order than the checkpoint's, between unequal numbers of ranks; a shared expert on each.
    "glm4-moe": (MIXED, SHARED, *UNEQUAL),
    # Keys normalized after their rotation.
    "hunyuan": (CACHED, SHARED),
    # Chunks, in pages of their own and in those of all layers; queries that depend on their position.
    "llama4": (CHUNKED, CACHED, DISAGGREGATED, SHARED),
    # Heads of two sizes, in pages of their own and in those of all layers, on ranks, and in pages of a draft.
    "gemma4": (CHUNKED, RETRACTED, DISAGGREGATED, SWAPPED, SHARED, "drafts by the model itself"),
    # Layers that read K and V of others, in pages with room for the larger heads.
    "gemma4-readers": (CACHED, DISAGGREGATED, SHARED),
    "gemma4-experts": (MIXED,),
    # Projections that are stored as one matrix, on two ranks.
    "phi4-mini": (CHUNKED, SHARED),
    # Queries that depend on their position: a chunk, a cached prefix and a receiver must know it.
    "ministral3": (CHUNKED, CACHED, DISAGGREGATED),
    # Pages of one part: to host memory and files, by a fetch, and beside those of drafts.
    "deepseek-v3": (SWAPPED, HOST, FILES, FETCHED, "self drafts, handed over, page 1"),
    # One norm over the heads of all ranks, twice over key heads that ranks share.
    "minimax-m2": (RETRACTED, SHARED, *UNEQUAL),
    # Two rotations and windows; blocks that read the hidden states as they are.
    "olmo3": (CHUNKED, RETRACTED),
    # States of requests: carried from chunk to chunk, given to other requests and engines, of each rank's heads.
    "qwen3-next": (
        CHUNKED,
        CACHED,
        MIXED,
        RETRACTED,
        SHARED,
        DISAGGREGATED,
        MOVED,
        FAULTY,
        f"{DISAGGREGATED}, 2 to 2 ranks",
        *UNEQUAL,
        f"{MOVED}, 1 to 2 ranks",
        "prefix fetched over NIXL, 2 to 1 ranks",
        "n-gram drafts",
    ),
    # The same from matrices that hold several projections.
    "qwen3.5": (CHUNKED, RETRACTED, SHARED, DISAGGREGATED, MOVED, SWAPPED),
    "qwen3.5-moe": (MIXED, UNEQUAL[0], f"{MOVED}, 2 to 1 ranks"),
    # A gated shared expert next to experts in every second layer.
    "qwen2-moe": (MIXED, SHARED),
}
"""Paths by what a family adds to them; `test_models_against_transformers` compares its layers."""


class SharedBackend:
    """A `GrammarBackend` that outlives the engines that use it.

    Its process would end with the thread that has started it, so it has a thread of its own.
    """

    def __init__(self, vocabulary: GuidanceVocabulary, config: GrammarConfig) -> None:
        self.serves = (vocabulary.tokenizer_file, config)
        self._backend = GuidanceBackend(vocabulary=vocabulary, config=config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return self._thread.submit(self._backend.compile, spec).result()

    def close(self) -> None:
        """An engine ends, and others continue."""

    def end(self) -> None:
        self._backend.close()
        self._thread.shutdown()


@contextmanager
def one_grammar_process() -> Iterator[None]:
    """Engines that are built in this context, all of one checkpoint, have their grammars compiled by one process.

    Each would start a process of its own, which costs as much as a path of `tandem verify`.
    """
    shared: list[SharedBackend] = []

    def backend(*, vocabulary: GuidanceVocabulary, config: GrammarConfig) -> SharedBackend:
        if not shared:
            shared.append(SharedBackend(vocabulary, config))
        assert shared[0].serves == (vocabulary.tokenizer_file, config)
        return shared[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem_engine.engine.assembly.GuidanceBackend", backend)
        try:
            yield
        finally:
            for one in shared:
                one.end()


HOST_BYTES = 16 << 20
"""More than all requests take of a tiny model. The audit of each step looks at every page of it."""


@contextmanager
def little_host_memory() -> Iterator[None]:
    """Paths that are made in this context have `HOST_BYTES` below the device, enough for tiny checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem_lab.verify.paths.HOST_BYTES", HOST_BYTES)
        yield


SHORT_OUTPUTS = 24
"""Tokens: more than a page of the default size has, and than Gemma's windows in tiny checkpoints."""


@contextmanager
def one_of_two(first: int) -> Iterator[None]:
    """`tandem verify` in this context takes every second prompt of its set, with `SHORT_OUTPUTS`, and every second
    path, all from number `first` on.

    Two models take all prompts and all paths between them.
    """
    whole: list[VerifyPath] = []

    def fewer_prompts(*args: Any, **options: Any) -> PromptSet:
        prompts = make_prompts(*args, **options)
        return replace(prompts, prompts=prompts.prompts[first::2], max_tokens=SHORT_OUTPUTS)

    def fewer_paths(**options: Any) -> list[VerifyPath]:
        whole[:] = make_paths(**options)
        return whole[first::2]

    def fewer_ranked(_: Sequence[VerifyPath], *args: Any, **options: Any) -> list[VerifyPath]:
        return on_ranks(whole, *args, **options)[first::2]

    with pytest.MonkeyPatch.context() as patch, little_host_memory():
        patch.setattr("tandem_lab.verify.command.make_prompts", fewer_prompts)
        patch.setattr("tandem_lab.verify.command.make_paths", fewer_paths)
        patch.setattr("tandem_lab.verify.command.on_ranks", fewer_ranked)
        yield


def run_paths(
    checkpoint: Path, names: Sequence[str], *, impl: ModelImpl = ModelImpl.AUTO, host: str = LOOPBACK
) -> list[PathResult]:
    """Results of the named paths, in their order; prompts are some tokens to some ninety."""
    model = load(EngineConfig(model_path=str(checkpoint), model_impl=impl, dtype="float32"), progress=False)
    return run_paths_of(model, names, host=host)


def run_paths_of(
    model: LoadedModel,
    names: Sequence[str],
    *,
    platform: PlatformMaker = platform_of_device,
    every: int = 1,
    prompts: PromptSet | None = None,
    worth: Path | None = None,
    kv_dtype: KvCacheDtype = KvCacheDtype.AUTO,
    ranks: Mapping[tuple[str, int], ThreadRanks] | None = None,
    host: str = LOOPBACK,
) -> list[PathResult]:
    """As `run_paths`, of a model that is loaded, on engines of `platform`, with one prompt in `every` so many.

    `worth`: a checkpoint with the plain numbers that a quantized one stands for, which transformers is to compute.
    `ranks`: what paths on several use, where that is not the same on any device.
    `host`: of engines that exchange KV.
    With a `kv_dtype` they are compared with the first of all paths, a model in bfloat16 within its bounds.
    """
    checkpoint, facts = model.config.model_path, model.model_config
    prompts = prompts or make_prompts(checkpoint, facts.vocab_size, quick=True)
    reference = TransformersReference(str(worth or checkpoint), weights=model.dtype)
    eos = frozenset(facts.eos_token_ids)
    references = [
        reference.generate(prompt, prompts.max_tokens, eos, ignore_eos=True) for prompt in prompts.prompts[::every]
    ]
    longest = max(len(prompt) for prompt in prompts.prompts) + prompts.max_tokens
    head = Path(f"{checkpoint}-eagle")
    with little_host_memory():
        paths = make_paths(
            context_length=longest + 1,
            longest=longest,
            num_prompts=len(references),
            quick=False,
            drafts=DraftPaths(itself=checkpoint, head=str(head) if head.is_dir() else None),
            graphs=True,
        )
    by_name = {path.name: path for path in [*paths, *on_ranks(paths, 2, quick=False)]}
    edited = [
        reference.generate(each.prompt, prompts.max_tokens, eos, ignore_eos=True, edits=edits_against(each.token_ids))
        for each in references
        if any(by_name[name].edited for name in names)
    ]
    score = None if model.dtype is torch.float32 else RememberedScores(reference.score)
    verification = Verification(
        model=model,
        references=references,
        max_tokens=prompts.max_tokens,
        edited=edited,
        platform=platform,
        kv_dtype=kv_dtype,
        ranks={**(ranks or {})},
        host=host,
        score=score,
        bound=MIN_BOUND if score is None else logprob_bound(score, _rounded(model, worth), references),
    )
    if kv_dtype is not KvCacheDtype.AUTO:
        verification = verification.with_references_of(paths[0])
    results = [verification.run(by_name[name]) for name in names]
    assert [result.not_exercised for result in results] == [None] * len(results)
    return results


def _rounded(model: LoadedModel, worth: Path | None) -> Score:
    """What transformers makes of tokens when it computes in the model's dtype, too."""
    dtype = model.dtype
    return TransformersReference(str(worth or model.config.model_path), weights=dtype, computes=dtype).score
