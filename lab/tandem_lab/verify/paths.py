"""The exactness matrix: every way in which a token can be computed. New paths are added here.

Each function makes a group of paths about one feature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem_engine.config import (
    CacheConfig,
    HostConfig,
    PreemptionMode,
    SchedulePolicy,
    SchedulerConfig,
    SpecAlgorithm,
    SpecConfig,
    WritePolicy,
)
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.kv_events import Tier
from tandem_lab.verify.path import CHOICES, Path, Setups


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPaths:
    """Checkpoints that can draft for the model under test."""

    itself: str
    """The model: a draft model that is always right."""
    head: str | None = None
    """An EAGLE head for it, if there is one."""


def draft_paths(drafts: DraftPaths, setups: Setups) -> list[Path]:
    """The quickest first."""
    ngram = SpecConfig(algorithm=SpecAlgorithm.NGRAM, prompt_lookup_min=1, prompt_lookup_max=3, adaptive=False)
    # Adaptive lengths depend on measured time; a path must do what it is named after on any machine.
    draft = SpecConfig(algorithm=SpecAlgorithm.DRAFT, draft_model_path=drafts.itself, adaptive=False)
    return [
        *_alone(setups, ngram, draft),
        *([] if drafts.head is None else _with_head(setups, drafts.head)),
        *_handed_over(setups, ngram, draft),
    ]


def _alone(setups: Setups, ngram: SpecConfig, draft: SpecConfig) -> list[Path]:
    return [
        Path(name="n-gram drafts", cache=setups.warm, scheduler=setups.mixed, speculative=ngram, stagger=True),
        Path(
            name="drafts by the model itself",
            cache=setups.warm,
            scheduler=setups.mixed,
            speculative=draft,
            expects_accepted=True,
        ),
        Path(
            name="n-gram drafts, no overlap",
            cache=setups.warm,
            scheduler=setups.mixed_without_overlap,
            speculative=replace(ngram, adaptive=True),
        ),
        Path(name="n-gram drafts, resumed", cache=setups.warm, scheduler=setups.mixed, speculative=ngram, resume=True),
        Path(
            name="n-gram drafts, edited", cache=setups.warm, scheduler=setups.retracting, speculative=ngram, edited=True
        ),
        Path(
            name="drafts by itself, edited",
            cache=setups.warm,
            scheduler=setups.mixed,
            speculative=draft,
            edited=True,
            stagger=True,
        ),
        Path(
            name="drafts by itself, retracted",
            cache=setups.warm,
            scheduler=setups.retracting,
            speculative=draft,
            expects_retraction=True,
            expects_accepted=True,
        ),
    ]


def _with_head(setups: Setups, head: str) -> list[Path]:
    eagle = SpecConfig(algorithm=SpecAlgorithm.EAGLE, draft_model_path=head, adaptive=False)
    return [
        Path(name="EAGLE drafts", cache=setups.warm, scheduler=setups.mixed, speculative=eagle, stagger=True),
        Path(
            name="EAGLE drafts, prefix-cached",
            cache=setups.warm,
            scheduler=setups.mixed,
            speculative=eagle,
            repeat=True,
        ),
        Path(name="EAGLE drafts, retracted", cache=setups.warm, scheduler=setups.retracting, speculative=eagle),
        Path(
            name="EAGLE drafts, handed over",
            cache=setups.warm,
            scheduler=setups.mixed,
            speculative=eagle,
            disaggregated=True,
        ),
        Path(
            name="EAGLE drafts, drained mid-stream",
            cache=setups.warm,
            scheduler=setups.mixed,
            speculative=eagle,
            drained=True,
        ),
    ]


def _handed_over(setups: Setups, ngram: SpecConfig, draft: SpecConfig) -> list[Path]:
    return [
        Path(
            name=f"{name} drafts, handed over, page {size}",
            cache=setups.pages_of(size),
            scheduler=setups.mixed,
            speculative=spec,
            disaggregated=True,
            expects_accepted=spec is draft,
        )
        for name, spec in (("n-gram", ngram), ("self", draft))
        for size in (1, 64)
    ]


HOST_BYTES = 256 << 20
"""Plenty; memory is taken only as it is written."""


def tier_paths(*, cache: CacheConfig, short: CacheConfig, scheduler: SchedulerConfig, quick: bool) -> list[Path]:
    """`cache` has room for everything, `short` for a request and a half, so that prefixes leave the device."""
    swapping = replace(cache, host=HostConfig(swap_bytes=HOST_BYTES))
    swap = replace(scheduler, force_retract_every=3, max_retractions=10_000, preemption_mode=PreemptionMode.SWAP)
    paths = [
        Path(name="swapped (forced)", cache=swapping, scheduler=swap, expects_retraction=True, expects_swap=True),
        Path(
            name="host cache, write_back",
            cache=_tiered(short, WritePolicy.WRITE_BACK),
            scheduler=scheduler,
            repeat=True,
            expects_tier=Tier.HOST,
        ),
    ]
    if quick:
        return paths
    return [
        *paths,
        Path(
            name="swapped, disaggregated",
            cache=swapping,
            scheduler=swap,
            disaggregated=True,
            expects_swap=True,
        ),
        Path(
            name="edited: swapped (forced)",
            cache=swapping,
            scheduler=swap,
            edited=True,
            expects_swap=True,
        ),
        Path(
            name="host cache, write_through",
            cache=_tiered(short, WritePolicy.WRITE_THROUGH),
            scheduler=scheduler,
            repeat=True,
            stagger=True,
            expects_tier=Tier.HOST,
        ),
        Path(
            # Two choices share a prompt: the second is what the policy waits for.
            name="host cache, write_through_selective",
            cache=_tiered(short, WritePolicy.WRITE_THROUGH_SELECTIVE),
            scheduler=scheduler,
            repeat=True,
            choices=2,
            expects_tier=Tier.HOST,
        ),
        Path(
            name="host cache, disaggregated",
            cache=_tiered(short, WritePolicy.WRITE_BACK),
            scheduler=scheduler,
            repeat=True,
            disaggregated=True,
            expects_tier=Tier.HOST,
        ),
        Path(
            name="files, after a restart",
            cache=_tiered(cache, WritePolicy.WRITE_THROUGH),
            scheduler=scheduler,
            repeat=True,
            restart=True,
            expects_tier=Tier.DISK,
        ),
    ]


def with_drafts(tiers: Sequence[Path], drafting: Sequence[Path]) -> list[Path]:
    """The first two of `tiers`, swapping and host memory, with every way to draft that is in `drafting`."""
    ways = {path.speculative: path.name for path in reversed(drafting) if not path.speculative.adaptive}
    return [
        replace(path, name=f"{name}: {path.name}", speculative=spec, expects_retraction=False)
        for spec, name in ways.items()
        for path in tiers[:2]
    ]


def _tiered(cache: CacheConfig, policy: WritePolicy) -> CacheConfig:
    return replace(cache, host=HostConfig(enable_cache=True, size_bytes=HOST_BYTES, write_policy=policy))


WITHOUT_GRAPHS = "mixed, staggered, no graphs"


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
    setups = Setups(context_length=context_length, longest=longest, num_prompts=num_prompts)
    paths = _basic(setups)
    if graphs:
        paths.append(Path(name=WITHOUT_GRAPHS, cache=setups.warm, scheduler=setups.mixed, stagger=True, graphs=False))
    tiers = tier_paths(cache=setups.warm, short=setups.tight, scheduler=setups.mixed, quick=quick)
    speculative = [] if drafts is None else draft_paths(drafts, setups)
    if quick:
        return [*paths, *tiers, *speculative[:2]]
    return [
        *paths,
        *tiers,
        *_edited(setups),
        *_in_other_orders(setups),
        *_faulty(setups),
        *_interrupted(setups),
        *_of_several_choices(setups),
        *_of_page_sizes(setups),
        *speculative,
        *with_drafts(tiers, speculative),
    ]


def _basic(setups: Setups) -> list[Path]:
    """One of each kind, for a quick run too."""
    cold, warm, overlap, mixed = setups.cold, setups.warm, setups.overlap, setups.mixed
    return [
        Path(name="whole prompts, no overlap", cache=cold, scheduler=setups.plain),
        Path(name="overlap", cache=cold, scheduler=overlap),
        # Once before: a grammar's first request waits for it to be compiled, in whatever steps that takes.
        Path(name="twice, to the bit", cache=cold, scheduler=mixed, stagger=True, repeat=True, twice=True),
        Path(name="chunked by 7, overlap", cache=cold, scheduler=replace(overlap, chunked_prefill_size=7)),
        Path(name="prefix-cached", cache=warm, scheduler=overlap, repeat=True, expects_cached=True),
        Path(name="mixed, staggered", cache=warm, scheduler=mixed, stagger=True),
        Path(name="prompts appended in two turns", cache=warm, scheduler=mixed, appended=True),
        Path(
            name="retracted (forced)",
            cache=warm,
            scheduler=setups.retracting,
            expects_retraction=True,
        ),
        Path(name="disaggregated over NIXL", cache=warm, scheduler=mixed, disaggregated=True),
        Path(name="drained mid-stream", cache=warm, scheduler=mixed, drained=True),
        Path(name="prefix fetched over NIXL", cache=warm, scheduler=mixed, fetched=True, expects_cached=True),
        Path(name="disaggregated, layer by layer", cache=cold, scheduler=mixed, disaggregated=True, push_layers=1),
        Path(name="edited: mixed, staggered", cache=warm, scheduler=mixed, stagger=True, edited=True),
    ]


def _edited(setups: Setups) -> list[Path]:
    """With penalties, biases and bad words."""
    return [
        Path(name="edited: no overlap", cache=setups.cold, scheduler=setups.plain, edited=True),
        Path(
            name="edited: retracted (forced)",
            cache=setups.warm,
            scheduler=setups.retracting,
            edited=True,
            expects_retraction=True,
        ),
        Path(name="edited: resumed", cache=setups.warm, scheduler=setups.mixed, resume=True, edited=True),
        *(
            Path(
                name=f"edited: disaggregated, page size {size}",
                cache=setups.pages_of(size),
                scheduler=setups.mixed,
                disaggregated=True,
                repeat=True,
                edited=True,
            )
            for size in (1, 64)
        ),
        Path(
            name="edited: drained mid-stream",
            cache=setups.warm,
            scheduler=setups.plain,
            drained=True,
            edited=True,
            stagger=True,
        ),
    ]


def _in_other_orders(setups: Setups) -> list[Path]:
    """What is computed when, and which requests are retracted."""
    mixed = setups.mixed
    return [
        Path(name="mixed, no overlap", cache=setups.warm, scheduler=setups.mixed_without_overlap, stagger=True),
        Path(name="retracted (short of pages)", cache=setups.tight, scheduler=setups.eager, expects_retraction=True),
        Path(
            name="preempted by priority",
            cache=setups.warm,
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
            cache=setups.warm,
            scheduler=replace(mixed, schedule_policy=SchedulePolicy.LPM, max_tokens_per_step=72),
            repeat=True,
            expects_cached=True,
        ),
    ]


def _faulty(setups: Setups) -> list[Path]:
    return [
        Path(
            name=f"every fifth step raises{suffix}",
            cache=setups.warm,
            scheduler=replace(config, force_fault_every=5),
            stagger=True,
            disaggregated=disaggregated,
            push_layers=1 if disaggregated else None,
            edited=edited,
            expects_faults=True,
        )
        for config, disaggregated, edited, suffix in (
            (setups.mixed, False, False, ""),
            (setups.mixed_without_overlap, False, False, ", no overlap"),
            (setups.mixed, False, True, ", edited logits"),
            (setups.mixed, True, False, ", disaggregated"),
        )
    ]


def _interrupted(setups: Setups) -> list[Path]:
    """Outputs that stop and continue: by an operator's order, on another thread, in another request."""
    return [
        Path(name="paused in place", cache=setups.warm, scheduler=setups.mixed, stagger=True, pause=PauseMode.IN_PLACE),
        Path(
            name="paused and retracted",
            cache=setups.warm,
            scheduler=setups.mixed,
            stagger=True,
            pause=PauseMode.RETRACT,
            expects_retraction=True,
        ),
        Path(name="on a thread of its own", cache=setups.warm, scheduler=setups.mixed, threaded=True),
        Path(name="resumed", cache=setups.warm, scheduler=setups.mixed, resume=True),
        Path(
            name="continued in sessions",
            cache=setups.warm,
            scheduler=setups.mixed,
            resume=True,
            sessions=True,
            stagger=True,
            expects_cached=True,
        ),
    ]


def _of_several_choices(setups: Setups) -> list[Path]:
    return [
        Path(
            name="choices that share a prompt",
            cache=setups.crowd,
            scheduler=setups.mixed,
            choices=CHOICES,
            expects_cached=True,
        ),
        Path(
            name="choices, disaggregated",
            cache=setups.crowd,
            scheduler=setups.mixed,
            choices=CHOICES,
            disaggregated=True,
            expects_cached=True,
        ),
    ]


def _of_page_sizes(setups: Setups) -> list[Path]:
    return [
        *(
            Path(
                name=f"page size {size}",
                cache=setups.pages_of(size),
                scheduler=setups.mixed,
                stagger=True,
            )
            for size in (1, 16, 64)
        ),
        *(
            Path(
                name=f"disaggregated, page size {size}",
                cache=setups.pages_of(size),
                scheduler=setups.mixed,
                disaggregated=True,
                repeat=True,
            )
            for size in (1, 16, 64)
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
