"""Did a path do what it is named after? One that did not proves nothing, however equal its outputs are."""

from collections.abc import Sequence

from tandem_engine.messages.kv_events import Tier
from tandem_engine.scheduler.tally import SchedulerStats
from tandem_engine.verify.path import Path


def missing_effect(path: Path, cached_tokens: int, stats: Sequence[SchedulerStats]) -> str | None:
    """What `path` should have done and its engines, of which these are the `stats`, have not; None when all was."""
    if path.expects_cached and cached_tokens == 0:
        return "no prompt token came from the prefix cache"
    if path.expects_retraction and not any(one.retracted_total for one in stats):
        return "no request was retracted"
    if path.expects_accepted and accepted_drafts(stats) == 0:
        return "no draft was accepted"
    if path.expects_faults and _faults(stats) == 0:
        return "no step raised"
    return _stayed(path, stats)


def unexpected_faults(path: Path, stats: Sequence[SchedulerStats]) -> str | None:
    """Steps that raised on a path without faults; None when there were none."""
    faults = _faults(stats)
    return f"{faults} steps raised; the log has the errors" if faults and not path.expects_faults else None


def _faults(stats: Sequence[SchedulerStats]) -> int:
    return sum(one.engine_errors_total for one in stats)


def accepted_drafts(stats: Sequence[SchedulerStats]) -> int:
    """Of all engines together."""
    return sum(one.speculation.accepted_total for one in stats if one.speculation is not None)


def _stayed(path: Path, stats: Sequence[SchedulerStats]) -> str | None:
    """KV that should have left the device and come back."""
    if path.expects_tier is Tier.HOST and not any(each.host_cached_tokens_total for each in stats):
        return "no prompt token came from host memory"
    if path.expects_tier is Tier.DISK and not any(each.disk_cached_tokens_total for each in stats):
        return "no prompt token came from files"
    if path.expects_swap and not any(each.swapped_in_total for each in stats):
        return "no request was swapped and came back"
    return None
