"""The exactness matrix: every way a token can come to be computed. A new path adds itself here.

Each group is about one thing; tiers of memory, drafts and ranks have files of their own.
"""

from dataclasses import replace

from tandem_engine.config import SchedulePolicy
from tandem_engine.messages.control import PauseMode
from tandem_engine.verify.draft_paths import DraftPaths, draft_paths
from tandem_engine.verify.path import Path
from tandem_engine.verify.setups import CHOICES, Setups
from tandem_engine.verify.tier_paths import tier_paths, with_drafts

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
    """What is computed when, and who gives way."""
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
    """Outputs that stop and go on: by an operator's order, on another thread, in another request."""
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
