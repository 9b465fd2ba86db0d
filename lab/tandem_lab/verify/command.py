"""`tandem verify`: run the exactness matrix on one checkpoint and report.

1. transformers generates every prompt greedily in float32, with logprobs. It has no KV of fewer bits: there Tandem's
   first path generates the reference. In bfloat16 outputs may differ, and transformers gives instead the likelihood
   of each token of Tandem's (`compare`)
2. Tandem loads the checkpoint once; each path builds an engine (or a pair) around it
3. each path's outputs are compared; the table grows as paths finish
4. the first difference ends the run with exit status 1. A path without the effect that it is named after, such as one
   without a prefix to fetch, proves nothing: the other paths run, and the exit status is 4. A path that engines of the
   model reject when they start, such as a draft model that keeps states, is left out and named
5. a difference in float32 counts only if it is larger than what rounding explains in transformers itself (`rounding`)
"""

from collections.abc import Sequence
from pathlib import Path as Folder
from typing import TYPE_CHECKING

import msgspec

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.errors import ConfigError
from tandem_engine.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    KvCacheDtype,
    ModelConfig,
    ModelImpl,
    SchedulerConfig,
)
from tandem_engine.engine.loaded_model import load
from tandem_engine.model.weights import can_share, require_shareable
from tandem_engine.speculative.mtp import has_layer_ahead
from tandem_lab.verify.compare import MIN_BOUND, PathResult, RememberedScores, Score, logprob_bound, tolerance_of
from tandem_lab.verify.path import Path
from tandem_lab.verify.paths import DraftPaths, make_paths, on_ranks
from tandem_lab.verify.reference import (
    PATIENT,
    ReferenceOutput,
    TransformersReference,
    generate_references,
    make_prompts,
)
from tandem_lab.verify.rounding import Rounding
from tandem_lab.verify.verification import Verification

if TYPE_CHECKING:
    import torch


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A path that engines of the model reject at their start."""

    path: str
    reason: str


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    model: str
    family: str
    impl: ModelImpl
    """What computed it on our side."""
    dtype: str
    logprob_bound: float
    """How far a logprob may be from the reference's."""
    torch: str
    transformers: str
    prompts: int
    equal: bool
    """Every path that the model takes ran, did what it is named after, and equals the reference."""
    not_exercised: int
    """Paths that did not do what they are named after."""
    paths: tuple[PathResult, ...]
    left_out: tuple[LeftOut, ...]
    """Paths that the model does not take."""


def print_head() -> None:
    print(
        f"{'path':<34} {'requests':>8} {'tokens':>7} {'cached':>7} "
        f"{'retracted':>9} {'drafts':>7} {'max Δlogprob':>12} {'s':>6}  result"
    )


def print_row(result: PathResult) -> None:
    print(
        f"{result.path:<34} {result.requests:>8} {result.tokens:>7} {result.cached_tokens:>7} "
        f"{result.retractions:>9} {result.accepted_drafts:>7} "
        f"{result.max_logprob_difference:>12.1e} {result.seconds:>6.1f}  "
        f"{result.result}",
        flush=True,
    )


DEFAULT_RANKS = 2

DIFFERENT, NOT_EXERCISED = 1, 4
"""Exit statuses."""


def run_verify(
    model_path: str,
    *,
    impl: ModelImpl = ModelImpl.AUTO,
    device: str = "cpu",
    dtype: str = "float32",
    kv_dtype: KvCacheDtype = KvCacheDtype.AUTO,
    quick: bool,
    as_json: bool,
    tp_size: int | None = None,
    host: str = LOOPBACK,
    adapters: Sequence[str] = (),
) -> int:
    """Entry point of the command; returns the exit status. Raises `EngineError`.

    Args:
        device: where Tandem computes; transformers always does on a CPU.
        dtype: that Tandem computes in.
        kv_dtype: of pages. Unless it is the model's, paths are compared with the first of them.
        tp_size: how many ranks share the model in the tensor-parallel paths; 1 leaves these out, None takes
            `DEFAULT_RANKS` where the model can be shared by so many.
        host: loopback address for engines that exchange KV.
        adapters: folders of LoRA adapters, whose outputs are verified next to those of the model alone.
    """
    import torch
    import transformers

    if adapters and dtype != "float32":
        raise ConfigError(f"--adapter is verified in float32: leave out --dtype {dtype}")
    if dtype != "float32" and kv_dtype is not KvCacheDtype.AUTO:
        raise ConfigError(f"--kv-cache-dtype {kv_dtype} is verified in float32: leave out --dtype {dtype}")
    config = EngineConfig(
        model_path=model_path,
        model_impl=impl,
        dtype=dtype,
        device=device,
        cache=CacheConfig(dtype=kv_dtype),
        grammar=PATIENT,
        scheduler=SchedulerConfig(audit_every_step=True),
        adapters=AdapterConfig.of({folder.rstrip("/").rsplit("/", 1)[-1]: folder for folder in adapters}),
    )
    if len(config.adapters.sources) < len(adapters):
        raise ConfigError("--adapter: two folders have the same name; rename one")
    model = load(config, progress=not as_json)
    facts = model.model.config
    ranks = _ranks(facts, device) if tp_size is None else tp_size
    require_shareable(facts, ranks)
    prompts = make_prompts(model_path, facts.vocab_size, quick=quick)
    reference = TransformersReference(model_path, weights=model.dtype)
    references = generate_references(reference, model, prompts, progress=not as_json)
    longest = references.longest + prompts.max_tokens
    paths = make_paths(
        context_length=longest + 1,
        longest=longest,
        num_prompts=len(references.outputs),
        quick=quick,
        drafts=DraftPaths(itself=model_path, head=_head_of(model_path, facts) if device == "cpu" else None),
        graphs=device != "cpu",
    )
    paths += on_ranks(paths, ranks, quick=quick)
    rounds = model.dtype is not torch.float32
    if rounds:
        # The second turn of a session follows the first's tokens, which need not be the reference's.
        paths = [path for path in paths if not path.sessions]
    score = RememberedScores(reference.score) if rounds else None
    rounding = None
    if not rounds and kv_dtype is KvCacheDtype.AUTO and not adapters:
        rounding = Rounding(
            score=RememberedScores(reference.score),
            exact=lambda: TransformersReference(model_path, computes=torch.float64).score,
            references=references.outputs,
        )
    verification = Verification(
        model=model,
        references=references.outputs,
        max_tokens=prompts.max_tokens,
        edited=references.edited,
        kv_dtype=kv_dtype,
        host=host,
        score=score,
        bound=MIN_BOUND if score is None else _bound(model_path, model.dtype, score, references.outputs),
        rounding=rounding,
    )
    if kv_dtype is not KvCacheDtype.AUTO:
        verification = verification.with_references_of(paths[0])
    left_out = _left_out(verification, paths)
    paths = [path for path in paths if path.name not in left_out]
    results = _run_paths(verification, paths, as_json=as_json)
    bound, usual = verification.logprob_bound, tolerance_of(rounded_kv=verification.rounded_kv)
    different = any(not result.equal for result in results)
    idle = sum(result.not_exercised is not None for result in results)
    if as_json:
        report = VerifyReport(
            model=model_path,
            family=facts.family,
            impl=facts.impl,
            dtype=dtype,
            logprob_bound=bound,
            torch=str(torch.__version__),
            transformers=transformers.__version__,
            prompts=len(references.outputs),
            equal=not different and not idle,
            not_exercised=idle,
            paths=tuple(results),
            left_out=tuple(LeftOut(path=name, reason=reason) for name, reason in left_out.items()),
        )
        print(msgspec.json.encode(report).decode())
    else:
        print(
            f"\n{_verdict(bound, different=different, idle=idle, rounds=rounds or bound > usual)}: "
            f"{len(references.outputs)} prompts, "
            f"{len(results)} of {len(paths)} paths run"
        )
        for reason in dict.fromkeys(left_out.values()):
            print(f"left out, as {reason}: {', '.join(name for name, each in left_out.items() if each == reason)}")
    return DIFFERENT if different else NOT_EXERCISED if idle else 0


def _left_out(verification: Verification, paths: Sequence[Path]) -> dict[str, str]:
    """Names of the `paths` that the model does not take, and why."""
    reasons = {path.name: verification.why_not(path) for path in paths}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _verdict(bound: float, *, different: bool, idle: int, rounds: bool) -> str:
    if different:
        return "DIFFERENT"
    verdict = f"all logprobs within {bound:.3g}" if rounds else "all equal"
    return f"{verdict}, but {idle} paths NOT EXERCISED" if idle else verdict


def _bound(model_path: str, dtype: "torch.dtype", truth: Score, references: Sequence[ReferenceOutput]) -> float:
    """By what transformers loses when it computes in `dtype`."""
    rounded = TransformersReference(model_path, weights=dtype, computes=dtype)
    return logprob_bound(truth, rounded.score, references)


def _ranks(facts: ModelConfig, device: str) -> int:
    """Threads of one process, which share one device."""
    return DEFAULT_RANKS if can_share(facts, DEFAULT_RANKS) and device == "cpu" else 1


def _head_of(model_path: str, facts: ModelConfig) -> str | None:
    """The draft head of the model, where the bundled one has its own: in a folder beside it; or the layer of its own
    checkpoint that predicts ahead."""
    beside = Folder(f"{model_path.rstrip('/')}-eagle")
    if beside.is_dir():
        return str(beside)
    return model_path if facts.impl is ModelImpl.TANDEM and has_layer_ahead(model_path, facts) else None


def _run_paths(verification: Verification, paths: Sequence[Path], *, as_json: bool) -> list[PathResult]:
    """Run until the first difference."""
    if not as_json:
        print_head()
    results = []
    for path in paths:
        result = verification.run(path)
        results.append(result)
        if not as_json:
            print_row(result)
        if not result.equal:
            break
    return results
