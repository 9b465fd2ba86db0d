"""`tandem verify`: run the exactness matrix on one checkpoint and report.

1. transformers generates every prompt greedily in float32, with logprobs; with KV of fewer bits, which transformers
   does not have, the first of our paths does it again, and the others are compared with that
2. the checkpoint is loaded once by Tandem; each path builds an engine (or a pair) around it
3. each path's outputs are compared; the table grows as paths finish
4. the first difference ends the run with exit status 1
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path as Folder
from tempfile import TemporaryDirectory

import msgspec
from tqdm import tqdm

from tandem_engine.config import CacheConfig, EngineConfig, GraphConfig, KvCacheDtype, ModelImpl, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.loaded_model import LoadedModel, load
from tandem_engine.messages.kv_events import Tier
from tandem_engine.model.sharing import can_share, require_shareable
from tandem_engine.scheduler.tally import SchedulerStats
from tandem_engine.verify.compare import RIVALS, Generate, PathResult, compare, generate_on, requests_for
from tandem_engine.verify.conversation import in_turns
from tandem_engine.verify.drained import Drained
from tandem_engine.verify.edited import edits_against
from tandem_engine.verify.fetched import Fetched
from tandem_engine.verify.grammars import compile_grammars
from tandem_engine.verify.pair import Pair
from tandem_engine.verify.path import Path
from tandem_engine.verify.paths import DraftPaths, make_paths, on_ranks
from tandem_engine.verify.prompts import make_prompts
from tandem_engine.verify.ranks import Alone, EngineMaker, PlatformMaker, ThreadRanks, platform_of_device
from tandem_engine.verify.reasoning import budgets_against
from tandem_engine.verify.reference import ReferenceOutput, TransformersReference
from tandem_engine.verify.threaded import Threaded

STAGGER_STEPS = 3
DEFAULT_RANKS = 2
GRAPH_ROWS = (2, 8, 32)
"""Of the graphs of each path's engines, on a device with graphs: some steps fill one, most are padded."""


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    model: str
    family: str
    impl: ModelImpl
    """Who computed it on our side."""
    torch: str
    transformers: str
    prompts: int
    equal: bool
    paths: tuple[PathResult, ...]


@dataclass(kw_only=True, slots=True)
class Verification:
    """One checkpoint against its reference."""

    model: LoadedModel
    references: Sequence[ReferenceOutput]
    max_tokens: int
    edited: Sequence[ReferenceOutput] = ()
    """For the paths whose requests edit their logits, one for each of `references`."""
    platform: PlatformMaker = platform_of_device
    """For paths on one rank."""
    kv_dtype: KvCacheDtype = KvCacheDtype.AUTO
    """Of the pages of all paths."""
    ranks: dict[tuple[str, int], ThreadRanks] = field(default_factory=dict)
    """For paths on several ranks, by side and number; loaded when the first of them runs."""

    def run(self, path: Path) -> PathResult:
        """Build what the path needs, drive it, compare. Raises nothing for a difference: it is the result."""
        began = time.perf_counter()
        config = replace(
            self.model.config,
            cache=self._cache(path),
            scheduler=path.scheduler,
            speculative=path.speculative,
            graphs=GraphConfig(enabled=path.graphs, sizes=GRAPH_ROWS),
        )
        if path.restart:
            return self._restarted(path, config, began)
        if path.disaggregated or path.drained or path.fetched:
            return self._on_two(path, config, began)
        if path.tp_size > 1:
            with self._maker("sender", path.tp_size).engine(config) as engine:
                return self._compare(path, generate_on(engine), (engine,), began)
        if path.threaded:
            with Threaded.build(self.model, config) as threaded:
                return self._compare(path, threaded.generate, (threaded.engine,), began)
        with self._maker("sender", 1).engine(config) as engine:
            generate = generate_on(engine, pause=path.pause)
            return self._compare(path, in_turns(generate) if path.sessions else generate, (engine,), began)

    def _on_two(self, path: Path, config: EngineConfig, began: float) -> PathResult:
        """NIXL between them."""
        sides = self._sides(path)
        if path.drained:
            with Drained.build(*sides, config) as drained:
                return self._drained(path, drained, began)
        if path.fetched:
            with Fetched.build(*sides, config) as fetched:
                return self._fetched(path, fetched, began)
        config = replace(config, disagg=replace(config.disagg, kv_push_layers=path.push_layers))
        with Pair.build(*sides, config) as pair:
            return self._compare(path, pair.generate, (pair.prefill, pair.decode), began)

    def _drained(self, path: Path, drained: Drained, began: float) -> PathResult:
        result = self._compare(path, drained.generate, (drained.leaver, drained.taker), began)
        if result.equal and not drained.leaver.stats().moved_total:
            return msgspec.structs.replace(result, difference="no request moved with its KV")
        return result

    def _fetched(self, path: Path, fetched: Fetched, began: float) -> PathResult:
        result = self._compare(path, fetched.generate, (fetched.asker, fetched.lender), began)
        if result.equal and not fetched.asker.stats().prefix_fetch.fetched_total:
            return msgspec.structs.replace(result, difference="no prefix was fetched")
        return result

    def _sides(self, path: Path) -> tuple[EngineMaker, EngineMaker]:
        """Of a path with two engines: they live at the same time, so neither can use the other's ranks."""
        return self._maker("sender", path.tp_size), self._maker("receiver", path.receiver_tp_size)

    def _maker(self, side: str, size: int) -> EngineMaker:
        if size == 1:
            return Alone(model=self.model, platform=self.platform)
        if (side, size) not in self.ranks:
            self.ranks[side, size] = ThreadRanks.load(self.model.config, size)
        return self.ranks[side, size]

    def _restarted(self, path: Path, config: EngineConfig, began: float) -> PathResult:
        """Warm one engine up, and measure another that has nothing of it but its files."""
        with TemporaryDirectory(prefix="tandem-verify-") as folder:
            host = replace(path.cache.host, storage_dir=folder)
            config = replace(config, cache=replace(self._cache(path), host=host))
            with self._maker("sender", 1).engine(config) as first:
                self._warm_up(path, generate_on(first))
            with self._maker("sender", 1).engine(config) as second:
                return self._compare(replace(path, repeat=False), generate_on(second), (second,), began)

    def with_references_of(self, path: Path) -> "Verification":
        """The same, whose truth is what `path` makes of the references' prompts."""
        config = replace(self.model.config, cache=self._cache(path), scheduler=path.scheduler)
        with self._maker("sender", 1).engine(config) as engine:
            again = partial(_again, generate_on(engine), path, self.max_tokens)
            return replace(self, references=again(self.references), edited=again(self.edited))

    def _cache(self, path: Path) -> CacheConfig:
        return replace(path.cache, dtype=self.kv_dtype)

    def _warm_up(self, path: Path, generate: Generate) -> None:
        generate(requests_for(path, self._references(path), self.max_tokens, "warm"), _stagger(path))

    def _references(self, path: Path) -> list[ReferenceOutput]:
        once = self.edited if path.edited else self.references
        return [reference for reference in once for _ in range(path.choices)]

    def _compare(self, path: Path, generate: Generate, engines: Sequence[Engine], began: float) -> PathResult:
        references = self._references(path)
        if path.repeat:
            self._warm_up(path, generate)
        rounded_kv = self.kv_dtype is not KvCacheDtype.AUTO
        requests = requests_for(path, references, self.max_tokens, path.name, rivals=RIVALS if rounded_kv else 0)
        outputs = generate(requests, _stagger(path))
        found = compare(requests, outputs, references, rounded_kv=rounded_kv)
        cached = sum(output.cached_tokens for output in outputs)
        stats = [engine.scheduler.stats() for engine in engines]
        retractions = sum(one.retracted_total for one in stats)
        accepted = sum(one.speculation.accepted_total for one in stats if one.speculation is not None)
        faults = sum(one.engine_errors_total for one in stats)
        return PathResult(
            path=path.name,
            requests=len(requests),
            tokens=sum(len(output.token_ids) for output in outputs),
            cached_tokens=cached,
            retractions=retractions,
            accepted_drafts=accepted,
            max_logprob_difference=found.max_logprob_difference,
            seconds=time.perf_counter() - began,
            difference=found.difference
            or _unmet(path, cached, retractions, accepted, faults)
            or _stayed(path, stats)
            or (self._without_effect() if path.edited else None)
            or _audit(engines),
        )

    def _without_effect(self) -> str | None:
        # Outputs with a grammar or a budget come after all others and are not edited: a bad word may be all that is
        # allowed.
        pairs = zip(self.references, self.edited, strict=False)
        return None if any(a.token_ids != b.token_ids for a, b in pairs) else "no edit changed a token"


def _again(
    generate: Generate, path: Path, max_tokens: int, references: Sequence[ReferenceOutput]
) -> list[ReferenceOutput]:
    """`references` with what `generate` makes of their prompts."""
    outputs = generate(requests_for(replace(path, choices=1), references, max_tokens, "reference"), 0)
    return [
        replace(
            reference,
            token_ids=tuple(output.token_ids),
            logprobs=tuple(each.logprob for each in output.logprobs),
            prompt_logprobs=tuple(each.logprob for each in output.prompt_logprobs or () if each is not None),
        )
        for reference, output in zip(references, outputs, strict=True)
    ]


def _unmet(path: Path, cached: int, retractions: int, accepted: int, faults: int) -> str | None:
    """A path that did not do what it is named after proves nothing."""
    if path.expects_cached and cached == 0:
        return "no prompt token came from the prefix cache"
    if path.expects_retraction and retractions == 0:
        return "no request was retracted"
    if path.expects_accepted and accepted == 0:
        return "no draft was accepted"
    if path.expects_faults and faults == 0:
        return "no step raised"
    if faults and not path.expects_faults:
        return f"{faults} steps raised; the log says what"
    return None


def _stayed(path: Path, stats: Sequence[SchedulerStats]) -> str | None:
    """As `_unmet`, for KV that should have left the device and come back."""
    if path.expects_tier is Tier.HOST and not any(each.host_cached_tokens_total for each in stats):
        return "no prompt token came from host memory"
    if path.expects_tier is Tier.DISK and not any(each.disk_cached_tokens_total for each in stats):
        return "no prompt token came from files"
    if path.expects_swap and not any(each.swapped_in_total for each in stats):
        return "no request was swapped and came back"
    return None


def _stagger(path: Path) -> int:
    return STAGGER_STEPS if path.stagger else 0


def _audit(engines: Sequence[Engine]) -> str | None:
    problems = [problem for engine in engines for problem in engine.audit().problems]
    return f"audit: {problems[0]}" if problems else None


def run_verify(
    model_path: str,
    *,
    impl: ModelImpl = ModelImpl.AUTO,
    device: str = "cpu",
    kv_dtype: KvCacheDtype = KvCacheDtype.AUTO,
    quick: bool,
    as_json: bool,
    tp_size: int | None = None,
) -> int:
    """Entry point of the command; returns the exit status. Raises `EngineError`.

    Args:
        device: where Tandem computes; transformers always does on a CPU.
        kv_dtype: of pages. Unless it is the model's, paths are compared with the first of them.
        tp_size: how many ranks share the model in the tensor-parallel paths; 1 leaves these out, None takes
            `DEFAULT_RANKS` where the model can be shared by so many.
    """
    import torch
    import transformers

    config = EngineConfig(
        model_path=model_path,
        model_impl=impl,
        dtype="float32",
        device=device,
        cache=CacheConfig(dtype=kv_dtype),
        scheduler=SchedulerConfig(audit_every_step=True),
    )
    model = load(config, progress=not as_json)
    facts = model.model.config
    if tp_size is None:
        # Threads of one process, which share one device.
        tp_size = DEFAULT_RANKS if can_share(facts, DEFAULT_RANKS) and device == "cpu" else 1
    require_shareable(facts, tp_size)
    prompts = make_prompts(model_path, facts.vocab_size, quick=quick)
    reference = TransformersReference(model_path)
    eos = frozenset(facts.eos_token_ids)
    references = [
        # Every second prompt runs to its full length whatever the model says: EOS must not end coverage early.
        reference.generate(prompt, prompts.max_tokens, eos, ignore_eos=i % 2 == 1)
        for i, prompt in enumerate(
            tqdm(prompts.prompts, desc="transformers", unit="prompt", file=sys.stderr, disable=as_json)
        )
    ]
    edited = [
        reference.generate(r.prompt, prompts.max_tokens, eos, ignore_eos=r.ignore_eos, edits=edits_against(r.token_ids))
        for r in references
    ]
    for prompt, (spec, grammar) in zip(prompts.prompts, compile_grammars(model).items(), strict=False):
        output = reference.generate(prompt, prompts.max_tokens, eos, ignore_eos=False, matcher=grammar.matcher())
        references.append(replace(output, grammar=spec))
    for budget in budgets_against(references[0].token_ids, facts.vocab_size):
        references.append(
            reference.generate(references[0].prompt, prompts.max_tokens, eos, ignore_eos=True, budget=budget)
        )
    longest = max(len(r.prompt) for r in references) + prompts.max_tokens
    paths = make_paths(
        context_length=longest + 1,
        longest=longest,
        num_prompts=len(references),
        quick=quick,
        drafts=DraftPaths(itself=model_path, head=_head_of(model_path) if device == "cpu" else None),
        graphs=device != "cpu",
    )
    paths += on_ranks(paths, tp_size, quick=quick)
    verification = Verification(
        model=model, references=references, max_tokens=prompts.max_tokens, edited=edited, kv_dtype=kv_dtype
    )
    if kv_dtype is not KvCacheDtype.AUTO:
        verification = verification.with_references_of(paths[0])
    results = _run_paths(verification, paths, as_json=as_json)
    equal = len(results) == len(paths) and all(result.equal for result in results)
    if as_json:
        report = VerifyReport(
            model=model_path,
            family=facts.family,
            impl=facts.impl,
            torch=str(torch.__version__),
            transformers=transformers.__version__,
            prompts=len(references),
            equal=equal,
            paths=tuple(results),
        )
        print(msgspec.json.encode(report).decode())
    else:
        print(
            f"\n{'all equal' if equal else 'DIFFERENT'}: {len(references)} prompts, "
            f"{len(results)} of {len(paths)} paths run"
        )
    return 0 if equal else 1


def _head_of(model_path: str) -> str | None:
    """The draft head of the model, where the bundled one has its own: in a folder beside it."""
    beside = Folder(f"{model_path.rstrip('/')}-eagle")
    return str(beside) if beside.is_dir() else None


def _run_paths(verification: Verification, paths: Sequence[Path], *, as_json: bool) -> list[PathResult]:
    """Run until the first difference."""
    if not as_json:
        print(
            f"{'path':<34} {'requests':>8} {'tokens':>7} {'cached':>7} "
            f"{'retracted':>9} {'drafts':>7} {'max Δlogprob':>12} {'s':>6}  result"
        )
    results = []
    for path in paths:
        result = verification.run(path)
        results.append(result)
        if not as_json:
            print(
                f"{result.path:<34} {result.requests:>8} {result.tokens:>7} {result.cached_tokens:>7} "
                f"{result.retractions:>9} {result.accepted_drafts:>7} "
                f"{result.max_logprob_difference:>12.1e} {result.seconds:>6.1f}  "
                f"{result.difference or 'equal'}",
                flush=True,
            )
        if not result.equal:
            break
    return results
