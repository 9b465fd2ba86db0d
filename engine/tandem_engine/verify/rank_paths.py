"""Paths that several ranks run too, on one side of a handoff or on both."""

from collections.abc import Sequence
from dataclasses import replace

from tandem_engine.verify.path import Path

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
