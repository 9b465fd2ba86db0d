"""One checkpoint against its reference: each path's engines are built around it, driven, and their outputs compared."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from tempfile import TemporaryDirectory

import msgspec

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.config import CacheConfig, EngineConfig, GraphConfig, KvCacheDtype, SpecAlgorithm
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel
from tandem_engine.engine.stateful_models import unsupported
from tandem_engine.engine.stats import Generation
from tandem_lab.verify.compare import (
    MIN_BOUND,
    RIVALS,
    Generate,
    PathResult,
    Score,
    compare,
    compare_scored,
    generate_on,
    not_run,
    requests_for,
    tolerance_of,
)
from tandem_lab.verify.engine_pairs import Drained, Fetched, Pair
from tandem_lab.verify.engines import (
    Alone,
    EngineMaker,
    PlatformMaker,
    Threaded,
    ThreadRanks,
    appended,
    in_turns,
    platform_of_device,
)
from tandem_lab.verify.path import Path, accepted_drafts, missing_effect, unexpected_faults
from tandem_lab.verify.reference import ReferenceOutput
from tandem_lab.verify.rounding import Rounding

STAGGER_STEPS = 3

LEASE_S = 120.0
"""Between two engines that one thread turns: a step of one keeps the other from renewing what it has granted."""

GRAPH_ROWS = (2, 8, 32)
"""Of the graphs of each path's engines, on a device with graphs: some steps fill one, most are padded."""

GRAPH_TOKENS = (8, 24, 64)
"""The same of steps with prompts."""


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
    score: Score | None = None
    """What the reference gives for tokens, where the model's dtype rounds too much for them to be equal (`rounded`)."""
    bound: float = MIN_BOUND
    """How far logprobs may be from the truth of `score`."""
    rounding: Rounding | None = None
    """How sensitive the model is to rounding in float32; asked when first an output differs."""
    host: str = LOOPBACK
    """Address of this machine for engines that exchange KV."""
    ranks: dict[tuple[str, int], ThreadRanks] = field(default_factory=dict)
    """For paths on several ranks, by side and number; loaded when the first of them runs."""

    @property
    def rounded_kv(self) -> bool:
        return self.kv_dtype is not KvCacheDtype.AUTO

    @property
    def logprob_bound(self) -> float:
        """How far a logprob may be from the reference's."""
        if self.score is not None:
            return self.bound
        measured = 0.0 if self.rounding is None else self.rounding.measured
        return max(tolerance_of(rounded_kv=self.rounded_kv), measured)

    def run(self, path: Path) -> PathResult:
        """Build what the path needs, drive it, compare. Raises nothing for a difference: it is the result."""
        began = time.perf_counter()
        reason = self.why_not(path)
        if reason is not None:
            return not_run(path, reason)
        config = self._config(path)
        peers = path.disaggregated or path.drained or path.fetched
        if path.restart:
            return self._restarted(path, config, began)
        if peers:
            return self._on_two(path, config, began)
        if path.tp_size > 1:
            with self._maker("sender", path.tp_size).engine(config) as engine:
                return self._compare(path, generate_on(engine), (engine,), began)
        if path.threaded:
            with Threaded.build(self.model, config) as threaded:
                return self._compare(path, threaded.generate, (threaded.engine,), began)
        with self._maker("sender", 1).engine(config) as engine:
            generate = generate_on(engine, pause=path.pause)
            if path.sessions or path.appended:
                generate = in_turns(generate) if path.sessions else appended(generate)
            return self._compare(path, generate, (engine,), began)

    def _config(self, path: Path) -> EngineConfig:
        return replace(
            self.model.config,
            cache=self._cache(path),
            scheduler=path.scheduler,
            speculative=path.speculative,
            graphs=GraphConfig(enabled=path.graphs, sizes=GRAPH_ROWS, prompt_sizes=GRAPH_TOKENS),
        )

    def why_not(self, path: Path) -> str | None:
        """Why engines of this model do not take `path`, as docs/features.md has it; None where they do."""
        return unsupported(self.model.model_config, self._config(path)) or self._not_taken(path)

    def _not_taken(self, path: Path) -> str | None:
        """The reason of models that keep more than K and V of equal heads."""
        facts = self.model.model_config
        unequal = (path.disaggregated or path.drained or path.fetched) and path.tp_size != path.receiver_tp_size
        if facts.varied is not None and unequal:
            return "its layers differ in their heads, whose pages only equal numbers of ranks exchange"
        if not facts.has_states:
            return None
        if path.speculative.algorithm is SpecAlgorithm.DRAFT:
            return "its layers keep states, which a draft model may not"
        if facts.state_parts and unequal:
            return "transformers computes its states, which only equal numbers of ranks exchange"
        return None

    def _on_two(self, path: Path, config: EngineConfig, began: float) -> PathResult:
        """NIXL between them."""
        sides = self._sides(path)
        leases = replace(config.disagg, grant_timeout=LEASE_S, hold_timeout=LEASE_S, prefix_fetch_timeout=LEASE_S)
        config = replace(config, disagg=leases)
        if path.drained:
            with Drained.build(*sides, config, host=self.host) as drained:
                return self._drained(path, drained, began)
        if path.fetched:
            with Fetched.build(*sides, config, host=self.host) as fetched:
                return self._fetched(path, fetched, began)
        config = replace(config, disagg=replace(config.disagg, kv_push_layers=path.push_layers))
        with Pair.build(*sides, config, host=self.host) as pair:
            return self._compare(path, pair.generate, (pair.prefill, pair.decode), began)

    def _drained(self, path: Path, drained: Drained, began: float) -> PathResult:
        result = self._compare(path, drained.generate, (drained.leaver, drained.taker), began)
        if result.equal and not drained.leaver.stats().moved_total:
            return msgspec.structs.replace(result, not_exercised="no request moved with its KV")
        return result

    def _fetched(self, path: Path, fetched: Fetched, began: float) -> PathResult:
        result = self._compare(path, fetched.generate, (fetched.requester, fetched.source), began)
        if result.equal and not fetched.requester.stats().prefix_fetch.fetched_total:
            return msgspec.structs.replace(result, not_exercised="no prefix was fetched")
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
        rivals = RIVALS if self.rounded_kv else 0
        requests = requests_for(path, references, self.max_tokens, path.name, rivals=rivals)
        outputs = generate(requests, _stagger(path))
        if self.score is not None:
            found = compare_scored(requests, outputs, references, self.score, self.bound)
        else:
            found = compare(requests, outputs, references, rounded_kv=self.rounded_kv)
            # The second turn of a session follows the tokens of its first, which must be the reference's.
            if found.difference is not None and self.rounding is not None and not path.sessions:
                found = self.rounding.compare(requests, outputs, references, otherwise=found)
        again = outputs
        if path.twice:
            tag = f"{path.name}, again"
            again = generate(requests_for(path, references, self.max_tokens, tag, rivals=rivals), _stagger(path))
        cached = sum(output.cached_tokens for output in outputs)
        stats = [engine.scheduler.stats() for engine in engines]
        return PathResult(
            path=path.name,
            requests=len(requests),
            tokens=sum(len(output.token_ids) for output in outputs),
            cached_tokens=cached,
            retractions=sum(one.retracted_total for one in stats),
            accepted_drafts=accepted_drafts(stats),
            max_logprob_difference=found.max_logprob_difference,
            seconds=time.perf_counter() - began,
            difference=found.difference
            or _difference_of_bits(outputs, again)
            or unexpected_faults(path, stats)
            or _audit(engines),
            not_exercised=missing_effect(path, cached, stats) or (self._without_effect() if path.edited else None),
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


def _difference_of_bits(first: Sequence[Generation], second: Sequence[Generation]) -> str | None:
    """Between two runs of the same requests."""
    for one, other in zip(first, second, strict=True):
        if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs):
            return f"{one.rid}: the second run gives other tokens or other bits of their logprobs"
    return None


def _stagger(path: Path) -> int:
    return STAGGER_STEPS if path.stagger else 0


def _audit(engines: Sequence[Engine]) -> str | None:
    problems = [problem for engine in engines for problem in engine.audit().problems]
    return f"audit: {problems[0]}" if problems else None
