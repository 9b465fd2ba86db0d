"""Paths with speculative decoding: every proposer, page sizes, retraction, resumption, and a handoff."""

from dataclasses import dataclass, replace

from tandem_engine.config import SpecAlgorithm, SpecConfig
from tandem_engine.verify.path import Path
from tandem_engine.verify.setups import Setups


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
