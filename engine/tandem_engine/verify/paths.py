"""The exactness matrix: every way a token can come to be computed. A new path adds itself here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem_engine.config import CacheConfig, SchedulePolicy, SchedulerConfig, SpecAlgorithm, SpecConfig
from tandem_engine.messages.control import PauseMode
from tandem_engine.verify.path import Path
from tandem_engine.verify.tier_paths import tier_paths, with_drafts

CHOICES = 3
WITHOUT_GRAPHS = "mixed, staggered, no graphs"


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPaths:
    """Checkpoints that can draft for the model under test."""

    itself: str
    """The model: a draft model that is always right."""
    head: str | None = None
    """An EAGLE head for it, if there is one."""


def make_paths(
    *,
    context_length: int,
    longest: int,
    num_prompts: int,
    quick: bool,
    drafts: DraftPaths | None = None,
    graphs: bool = False,
) -> list[Path]:
    """All paths for prompts whose prompt + output is at most `longest` tokens; speculative ones with `drafts`.

    `graphs`: the device has them, so there is a path without.
    """
    plain = SchedulerConfig(
        context_length=context_length,
        chunked_prefill_size=4096,
        max_prefill_tokens=8192,
        enable_overlap=False,
        enable_mixed_chunk=False,
        audit_every_step=True,
    )
    overlap = replace(plain, enable_overlap=True)
    mixed = replace(overlap, enable_mixed_chunk=True, chunked_prefill_size=16, max_prefill_tokens=48)
    cold = _cache(page_size=16, longest=longest, num_prompts=num_prompts, prefix=False)
    warm = _cache(page_size=16, longest=longest, num_prompts=num_prompts, prefix=True)
    crowd = _cache(page_size=16, longest=longest, num_prompts=CHOICES * num_prompts, prefix=True)
    # Room for the longest request and a half, and admission that expects next to no output: the rest must
    # give back pages again and again.
    tight = replace(warm, num_pages=2 + (3 * longest // 2) // 16)
    eager = replace(mixed, init_new_token_ratio=0.01, min_new_token_ratio=0.01, max_retractions=10_000)
    paths = [
        Path(name="whole prompts, no overlap", cache=cold, scheduler=plain),
        Path(name="overlap", cache=cold, scheduler=overlap),
        Path(name="chunked by 7, overlap", cache=cold, scheduler=replace(overlap, chunked_prefill_size=7)),
        Path(name="prefix-cached", cache=warm, scheduler=overlap, repeat=True, expects_cached=True),
        Path(name="mixed, staggered", cache=warm, scheduler=mixed, stagger=True),
        Path(
            name="retracted (forced)",
            cache=warm,
            scheduler=replace(mixed, force_retract_every=3, max_retractions=10_000),
            expects_retraction=True,
        ),
        Path(name="disaggregated over NIXL", cache=warm, scheduler=mixed, disaggregated=True),
        Path(name="drained mid-stream", cache=warm, scheduler=mixed, drained=True),
        Path(name="prefix fetched over NIXL", cache=warm, scheduler=mixed, fetched=True, expects_cached=True),
        Path(name="disaggregated, layer by layer", cache=cold, scheduler=mixed, disaggregated=True, push_layers=1),
        Path(name="edited: mixed, staggered", cache=warm, scheduler=mixed, stagger=True, edited=True),
    ]
    if graphs:
        paths.append(Path(name=WITHOUT_GRAPHS, cache=warm, scheduler=mixed, stagger=True, graphs=False))
    tiers = tier_paths(cache=warm, short=tight, scheduler=mixed, quick=quick)
    paths += tiers
    speculative = [] if drafts is None else _speculative(drafts, warm, mixed, longest, num_prompts)
    if quick:
        return [*paths, *speculative[:2]]
    no_overlap_mixed = replace(mixed, enable_overlap=False)
    return [
        *paths,
        Path(name="edited: no overlap", cache=cold, scheduler=plain, edited=True),
        Path(
            name="edited: retracted (forced)",
            cache=warm,
            scheduler=replace(mixed, force_retract_every=3, max_retractions=10_000),
            edited=True,
            expects_retraction=True,
        ),
        Path(name="edited: resumed", cache=warm, scheduler=mixed, resume=True, edited=True),
        *(
            Path(
                name=f"edited: disaggregated, page size {size}",
                cache=_cache(page_size=size, longest=longest, num_prompts=num_prompts, prefix=True),
                scheduler=mixed,
                disaggregated=True,
                repeat=True,
                edited=True,
            )
            for size in (1, 64)
        ),
        Path(name="edited: drained mid-stream", cache=warm, scheduler=plain, drained=True, edited=True, stagger=True),
        Path(name="mixed, no overlap", cache=warm, scheduler=no_overlap_mixed, stagger=True),
        Path(name="retracted (short of pages)", cache=tight, scheduler=eager, expects_retraction=True),
        Path(
            name="preempted by priority",
            cache=warm,
            scheduler=replace(
                mixed,
                schedule_policy=SchedulePolicy.PRIORITY,
                priority_preemption_threshold=1,
                max_running_requests=2,
                max_retractions=10_000,
            ),
            stagger=True,
            rising_priority=True,
            expects_retraction=True,
        ),
        Path(
            name="longest cached prefix first",
            cache=warm,
            scheduler=replace(mixed, schedule_policy=SchedulePolicy.LPM, max_tokens_per_step=72),
            repeat=True,
            expects_cached=True,
        ),
        *(
            Path(
                name=f"every fifth step raises{suffix}",
                cache=warm,
                scheduler=replace(config, force_fault_every=5),
                stagger=True,
                disaggregated=disaggregated,
                push_layers=1 if disaggregated else None,
                edited=edited,
                expects_faults=True,
            )
            for config, disaggregated, edited, suffix in (
                (mixed, False, False, ""),
                (no_overlap_mixed, False, False, ", no overlap"),
                (mixed, False, True, ", edited logits"),
                (mixed, True, False, ", disaggregated"),
            )
        ),
        Path(name="paused in place", cache=warm, scheduler=mixed, stagger=True, pause=PauseMode.IN_PLACE),
        Path(
            name="paused and retracted",
            cache=warm,
            scheduler=mixed,
            stagger=True,
            pause=PauseMode.RETRACT,
            expects_retraction=True,
        ),
        Path(name="on a thread of its own", cache=warm, scheduler=mixed, threaded=True),
        Path(name="resumed", cache=warm, scheduler=mixed, resume=True),
        Path(
            name="continued in sessions",
            cache=warm,
            scheduler=mixed,
            resume=True,
            sessions=True,
            stagger=True,
            expects_cached=True,
        ),
        Path(name="choices that share a prompt", cache=crowd, scheduler=mixed, choices=CHOICES, expects_cached=True),
        Path(
            name="choices, disaggregated",
            cache=crowd,
            scheduler=mixed,
            choices=CHOICES,
            disaggregated=True,
            expects_cached=True,
        ),
        *(
            Path(
                name=f"page size {size}",
                cache=_cache(page_size=size, longest=longest, num_prompts=num_prompts, prefix=True),
                scheduler=mixed,
                stagger=True,
            )
            for size in (1, 16, 64)
        ),
        *(
            Path(
                name=f"disaggregated, page size {size}",
                cache=_cache(page_size=size, longest=longest, num_prompts=num_prompts, prefix=True),
                scheduler=mixed,
                disaggregated=True,
                repeat=True,
            )
            for size in (1, 16, 64)
        ),
        *speculative,
        *with_drafts(tiers, speculative),
    ]


def _speculative(
    drafts: DraftPaths, warm: CacheConfig, mixed: SchedulerConfig, longest: int, num_prompts: int
) -> list[Path]:
    """Every proposer, with every page size, retraction, resumption, and a handoff."""
    ngram = SpecConfig(algorithm=SpecAlgorithm.NGRAM, prompt_lookup_min=1, prompt_lookup_max=3, adaptive=False)
    # Adaptive lengths depend on measured time; a path must do what it is named after on any machine.
    draft = SpecConfig(algorithm=SpecAlgorithm.DRAFT, draft_model_path=drafts.itself, adaptive=False)
    retracting = replace(mixed, force_retract_every=3, max_retractions=10_000)
    plain = replace(mixed, enable_overlap=False)
    paths = [
        Path(name="n-gram drafts", cache=warm, scheduler=mixed, speculative=ngram, stagger=True),
        Path(name="drafts by the model itself", cache=warm, scheduler=mixed, speculative=draft, expects_accepted=True),
        Path(name="n-gram drafts, no overlap", cache=warm, scheduler=plain, speculative=replace(ngram, adaptive=True)),
        Path(name="n-gram drafts, resumed", cache=warm, scheduler=mixed, speculative=ngram, resume=True),
        Path(name="n-gram drafts, edited", cache=warm, scheduler=retracting, speculative=ngram, edited=True),
        Path(
            name="drafts by itself, edited", cache=warm, scheduler=mixed, speculative=draft, edited=True, stagger=True
        ),
        Path(
            name="drafts by itself, retracted",
            cache=warm,
            scheduler=retracting,
            speculative=draft,
            expects_retraction=True,
            expects_accepted=True,
        ),
    ]
    heads = [] if drafts.head is None else [drafts.head]
    for head in heads:
        eagle = SpecConfig(algorithm=SpecAlgorithm.EAGLE, draft_model_path=head, adaptive=False)
        paths += [
            Path(name="EAGLE drafts", cache=warm, scheduler=mixed, speculative=eagle, stagger=True),
            Path(name="EAGLE drafts, prefix-cached", cache=warm, scheduler=mixed, speculative=eagle, repeat=True),
            Path(name="EAGLE drafts, retracted", cache=warm, scheduler=retracting, speculative=eagle),
            Path(name="EAGLE drafts, handed over", cache=warm, scheduler=mixed, speculative=eagle, disaggregated=True),
        ]
    algorithms = (("n-gram", ngram), ("self", draft))
    return [
        *paths,
        *(
            Path(
                name=f"{name} drafts, handed over, page {size}",
                cache=_cache(page_size=size, longest=longest, num_prompts=num_prompts, prefix=True),
                scheduler=mixed,
                speculative=spec,
                disaggregated=True,
                expects_accepted=spec is draft,
            )
            for name, spec in algorithms
            for size in (1, 64)
        ),
    ]


SHARED = (
    "whole prompts, no overlap",
    "chunked by 7, overlap",
    "prefix-cached",
    "mixed, staggered",
    "retracted (forced)",
    "choices that share a prompt",
    "edited: mixed, staggered",
    "n-gram drafts",
    "drafts by the model itself",
    "EAGLE drafts",
    "swapped (forced)",
    "host cache, write_back",
    "every fifth step raises",
)
"""Paths that run on several ranks too: between them they use every kind of step."""
SHARED_QUICKLY = ("mixed, staggered",)
HANDED_OVER = (
    "disaggregated over NIXL",
    "disaggregated, layer by layer",
    "drained mid-stream",
    "prefix fetched over NIXL",
    "disaggregated, page size 1",
    "disaggregated, page size 64",
    "every fifth step raises, disaggregated",
    "edited: drained mid-stream",
)
"""Paths between two engines that engines of unequal numbers of ranks run too."""


def on_ranks(paths: Sequence[Path], size: int, *, quick: bool) -> list[Path]:
    """Those of `paths` that several ranks run as well, for `size` ranks; none for 1."""
    if size == 1:
        return []
    names = SHARED_QUICKLY if quick else SHARED
    shared = [replace(path, name=f"{path.name}, {size} ranks", tp_size=size) for path in paths if path.name in names]
    return [*shared, *_between_ranks(paths, size, quick=quick)]


def _between_ranks(paths: Sequence[Path], size: int, *, quick: bool) -> list[Path]:
    """Those of `paths` in which KV goes from one engine to another, with `size` ranks on either side or on both."""
    names = HANDED_OVER[:1] if quick else HANDED_OVER
    return [
        replace(path, name=f"{path.name}, {senders} to {receivers} ranks", tp_size=senders, receiver_tp_size=receivers)
        for path in paths
        if path.name in names
        for senders, receivers in ((1, size), (size, 1), (size, size))
    ]


def _cache(*, page_size: int, longest: int, num_prompts: int, prefix: bool) -> CacheConfig:
    pages = 1 + num_prompts * (longest // page_size + 2)
    return CacheConfig(page_size=page_size, num_pages=pages, enable_prefix_cache=prefix)
