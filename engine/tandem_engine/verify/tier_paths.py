"""Paths on which KV leaves the device and comes back: swapped requests, host memory, files."""

from collections.abc import Sequence
from dataclasses import replace

from tandem_engine.config import CacheConfig, HostConfig, PreemptionMode, SchedulerConfig, WritePolicy
from tandem_engine.messages.kv_events import Tier
from tandem_engine.verify.path import Path

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
