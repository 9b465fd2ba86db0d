"""The autoscaler of both roles: a pure step from load, memory and current workers to the desired workers.

    load not reliable?            ─▶ hold, and report why
    no requests for long?         ─▶ zero, both roles together; requests waiting at zero? ─▶ one pair
    need of each role, by latency objective or queue ─▶ objective missed for long? one more
    ─▶ windows ─▶ tolerance ─▶ rejected numbers ─▶ bounds, steps, cooldown ─▶ GPU budget
                                                                                     ─▶ role flips before pods

Pending and warming workers count as present, because they were already requested. The operator and `tandem simulate
--autoscale` run the same code.

`ScaleDownHistory` prevents oscillation: a number of workers that proved too low is not used again at the same need.

The need is measured with the current workers and differs with fewer. Batches are then larger, each sequence takes
longer, excess requests become backlog, roles compete for shared resources, and waiting clients send less. A steady load
can need 1.7 workers as measured with three and 2.2 as measured with two. Scaling by the need alone would remove the
third worker and add it again forever.

    scale-down to m at need y, then scale-up from m within the trial without a higher load than before
                             ─▶ m was too low at y: `rejected_floor`
    a later scale-down to m  ─▶ only for a need below y by more than the tolerance
    that one outlasts its trial  ─▶ m is allowed again

The trial lasts as long as clearing a backlog may take, plus the time for a higher need, or a missed objective, to
appear. If arrivals per second have grown during the trial, a scale-up does not refute m.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.scaling import load as by_load
from tandem_operator.scaling import slo_need
from tandem_operator.scaling.distribution import Distribution
from tandem_operator.scaling.load import Load, Need, Targets

Counts = dict[RoleName, int]


def within_budget(
    wanted: Mapping[RoleName, int], least: Mapping[RoleName, int], gpus: Mapping[RoleName, int], budget: int | None
) -> Counts:
    """As much of `wanted` as `budget` GPUs allow. The role with the smaller share of its workers is always next.
    `least` is granted even beyond the budget, because nothing is served without it.
    """
    if budget is None or sum(wanted[role] * gpus[role] for role in ROLES) <= budget:
        return {role: wanted[role] for role in ROLES}
    given = {role: min(least[role], wanted[role]) for role in ROLES}
    left = budget - sum(given[role] * gpus[role] for role in ROLES)
    while True:
        open_roles = [role for role in ROLES if given[role] < wanted[role] and gpus[role] <= left]
        if not open_roles:
            return given
        role = min(open_roles, key=lambda one: given[one] / wanted[one])
        given[role] += 1
        left -= gpus[role]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A scale-down of the workers of one role."""

    at: float
    workers: int
    """Workers that remained."""
    need: float
    """Maximum need in the window before, as measured with the workers of that time."""
    arrivals: float
    """Maximum arrivals per second in that window."""


@dataclass(frozen=True, slots=True)
class ScaleDownHistory:
    """The last scale-down of one role, and the last number of workers that proved too low."""

    provisional: Reduction | None = None
    rejected_floor: Reduction | None = None

    def went_down(self, reduction: Reduction) -> "ScaleDownHistory":
        """Starts the trial of a scale-down."""
        return replace(self, provisional=reduction)

    def went_up(self, at: float, before: int, arrivals: float, trial_s: float) -> "ScaleDownHistory":
        """A scale-up from `before` workers, at this rate of arrivals."""
        last = self.provisional
        if last is None or last.workers != before:
            return replace(self, provisional=None)
        if at - last.at > trial_s:
            return ScaleDownHistory()
        return ScaleDownHistory(rejected_floor=last if arrivals <= last.arrivals else self.rejected_floor)

    def min_workers(self, need: float, tolerance: float) -> int:
        """Min. workers at the maximum need of the window; 0 if every number is allowed."""
        if self.rejected_floor is None or need < self.rejected_floor.need * (1 - tolerance):
            return 0
        return self.rejected_floor.workers + 1


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    workers: int
    need: float = 0.0
    """Before it was rounded."""
    arrivals: float = 0.0
    """Per second, in the role's own unit."""


@dataclass(frozen=True, slots=True)
class Window:
    """Samples, oldest first, as far back as any window reaches."""

    samples: tuple[Sample, ...] = ()

    def add(self, at: float, workers: int, reach_s: float, need: float = 0.0, arrivals: float = 0.0) -> "Window":
        """With a new sample, and of those older than `reach_s` only the last, which has the state at that time."""
        recent = [one for one in self.samples if one.at > at - reach_s]
        older = [one for one in self.samples if one.at <= at - reach_s][-1:]
        return Window((*older, *recent, Sample(at, workers, need, arrivals)))

    def lasting(self, at: float, window_s: float) -> int:
        """Workers that were needed at every moment of the window. The newest sample is always in it."""
        return min(one.workers for one in self._within(at, window_s))

    def most(self, at: float, window_s: float) -> int:
        """Workers that were needed at some moment of it."""
        return max(one.workers for one in self._within(at, window_s))

    def peak(self, at: float, window_s: float) -> float:
        """The same, not rounded."""
        return max(one.need for one in self._within(at, window_s))

    def busiest(self, at: float, window_s: float) -> float:
        """Most arrivals per second."""
        return max(one.arrivals for one in self._within(at, window_s))

    def covers(self, at: float, window_s: float) -> bool:
        """Whether samples reach back to its beginning."""
        return bool(self.samples) and self.samples[0].at <= at - window_s

    def _within(self, at: float, window_s: float) -> Iterable[Sample]:
        return [one for one in self.samples if one.at >= at - window_s]


LATE_S = 30.0
"""A role that misses its objective and has a queue for so long gets one more worker, and another one when the last
that it got has had `clear_seconds` and this time to help."""

MEASURED_S = 60.0
"""Within this time measured latencies show that too few workers are left."""

STARTING_S = 600.0
"""While a worker starts, no other one is added for a missed objective, for so long."""

MIN_MEASURED = 20
"""Latencies before a quantile of them counts."""

Action = Literal["scale", "flip", "hold", "restore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleBounds:
    """The settings of one role."""

    least: int
    most: int
    targets: Targets
    gpus: int = 0
    """Of one worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """The settings of both roles."""

    prefill: RoleBounds
    decode: RoleBounds
    gpu_budget: int | None = None
    flip_roles: bool = True
    scale_up_window_s: float = 0.0
    scale_down_window_s: float = 300.0
    tolerance: float = 0.1
    max_step_up: int = 4
    max_step_down: int = 1
    idle_s_to_zero: float = 0.0
    cooldown_s: float = 30.0

    def bounds(self, role: RoleName) -> RoleBounds:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class Change:
    """The last one of a role."""

    at: float
    up: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingState:
    """State from one step to the next. A restart loses it: the window of a scale-down then starts again."""

    windows: Mapping[RoleName, Window] = field(default_factory=dict)
    changes: Mapping[RoleName, Change] = field(default_factory=dict)
    scale_downs: Mapping[RoleName, ScaleDownHistory] = field(default_factory=dict)
    late_since: Mapping[RoleName, float] = field(default_factory=dict)
    """Since when a role with an objective has missed it and had a queue, without a pause."""
    busy_at: float | None = None
    """Time of the last request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One decision, for status and events."""

    role: RoleName | Literal["both"]
    action: Action
    before: int
    after: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one step: the desired workers."""

    wanted: Counts
    """Desired workers of each role; flipped ones count in their new role."""
    flips: int
    """Live workers to flip before pods are added or removed: positive from decode to prefill, negative opposite."""
    decisions: tuple[Decision, ...]
    memory: ScalingState


def decide(load: Load, there: Mapping[RoleName, int], memory: ScalingState, config: ScalingConfig) -> Outcome:
    """`there`: workers of each role, including pending and warming ones."""
    now = {role: there[role] for role in ROLES}
    error = load.error()
    if error:
        return _hold(now, f"metrics are not reliable: {error}", memory)
    needs = {role: need_of(role, load, config) for role in ROLES}
    memory = _remember(load, now, needs, memory, config)
    zero = _zero(load, now, memory, config)
    if zero is not None:
        return zero
    wanted = {role: _wanted(role, now[role], needs[role], load.at, memory, config) for role in ROLES}
    flips = _flips(now, wanted, load.at, memory, config)
    if flips:
        wanted = _after(flips, now, wanted)
    wanted = within_budget(
        wanted, _least(config), {role: config.bounds(role).gpus for role in ROLES}, config.gpu_budget
    )
    scale_downs = {role: _history(role, load, now[role], wanted[role], memory, config) for role in ROLES}
    return _outcome(load.at, now, wanted, flips, needs, replace(memory, scale_downs=scale_downs))


def _remember(
    load: Load, now: Counts, needs: Mapping[RoleName, Need], memory: ScalingState, config: ScalingConfig
) -> ScalingState:
    reach = max(config.scale_up_window_s, config.scale_down_window_s, config.cooldown_s)
    since = {role: _late_since(role, load, needs[role], memory, config) for role in ROLES}
    late_since = {role: at for role, at in since.items() if at is not None}
    windows = {}
    for role in ROLES:
        need = needs[role].workers
        workers = rounded(need, config.tolerance)
        if role in late_since and load.at - late_since[role] >= LATE_S:
            # Whatever the model of latencies says.
            least = now[role] + _have_helped(role, load, now[role], memory, config)
            workers, need = max(workers, least), max(need, float(least))
        if needs[role].lacks_figures:
            workers, need = max(workers, now[role]), max(need, float(now[role]))
        windows[role] = memory.windows.get(role, Window()).add(load.at, workers, reach, need, _arrivals(role, load))
    busy_at = memory.busy_at if load.idle and memory.busy_at is not None else load.at
    return replace(memory, windows=windows, late_since=late_since, busy_at=busy_at)


def _have_helped(role: RoleName, load: Load, now: int, memory: ScalingState, config: ScalingConfig) -> bool:
    """Whether the last workers that were added have had the time to."""
    change = memory.changes.get(role)
    if change is None or not change.up:
        return True
    serving = load.prefill.serving if role == "prefill" else load.decode.serving
    if serving is not None and serving < now and load.at - change.at < STARTING_S:
        return False
    return load.at - change.at >= config.bounds(role).targets.clear_seconds + LATE_S


def need_of(role: RoleName, load: Load, config: ScalingConfig) -> Need:
    """Workers that a role needs: for its latency objective if it has one and latencies are predicted well, else for its
    queue."""
    targets = config.bounds(role).targets
    is_by_latency = targets.latency_s is not None and load.is_calibrated
    if role == "prefill":
        prefill_need = slo_need.prefill_need if is_by_latency else by_load.prefill_need
        return prefill_need(load.prefill, targets)
    decode_need = slo_need.decode_need if is_by_latency else by_load.decode_need
    return decode_need(load.decode, targets)


def _late_since(role: RoleName, load: Load, need: Need, memory: ScalingState, config: ScalingConfig) -> float | None:
    """None where the objective is met, nothing waits, or no number of workers meets it."""
    targets = config.bounds(role).targets
    measured, waits = _measured(role, load)
    if targets.latency_s is None or measured is None or not waits or need.infeasible:
        return None
    if measured.count < MIN_MEASURED or measured.quantile(targets.percentile) <= targets.latency_s:
        return None
    return memory.late_since.get(role, load.at)


def _measured(role: RoleName, load: Load) -> tuple[Distribution | None, bool]:
    """Latencies of the last minute, and whether work waits."""
    if role == "prefill":
        prompts = load.prefill.prompts
        return None if prompts is None else prompts.measured_s, load.prefill.queued_tokens > 0
    steps = load.decode.steps
    return None if steps is None else steps.measured_s, load.decode.waiting > 0


def _arrivals(role: RoleName, load: Load) -> float:
    return load.prefill.arrived_tokens_per_s if role == "prefill" else load.decode.arrived_per_s


def rounded(workers: float, tolerance: float) -> int:
    """Whole workers; a small part of one more is not worth it."""
    whole = math.floor(workers)
    return whole if whole > 0 and workers - whole <= tolerance else math.ceil(workers)


def _least(config: ScalingConfig) -> Counts:
    """While anything is served each role has a worker."""
    return {role: max(1, config.bounds(role).least) for role in ROLES}


def _zero(load: Load, now: Counts, memory: ScalingState, config: ScalingConfig) -> Outcome | None:
    """Scale to zero, stay at zero, or scale from zero: both roles together. None if no case applies."""
    assert memory.busy_at is not None, "just remembered"
    idle_s = load.at - memory.busy_at
    allowed = config.idle_s_to_zero > 0 and not any(config.bounds(role).least for role in ROLES)
    if not any(now.values()):
        if load.idle and allowed:
            return Outcome(wanted=now, flips=0, decisions=(), memory=memory)
        reason = f"{load.held:.0f} requests wait at the gateway" if load.held else "zero workers are not allowed"
        return _outcome(load.at, now, _least(config), 0, dict.fromkeys(ROLES, Need(workers=1, reason=reason)), memory)
    if allowed and load.idle and idle_s >= config.idle_s_to_zero:
        need = Need(workers=0, reason=f"no requests for {idle_s:.0f} s")
        return _outcome(load.at, now, dict.fromkeys(ROLES, 0), 0, dict.fromkeys(ROLES, need), memory)
    return None


def _wanted(role: RoleName, now: int, need: Need, at: float, memory: ScalingState, config: ScalingConfig) -> int:
    window, bounds = memory.windows[role], config.bounds(role)
    up = window.lasting(at, config.scale_up_window_s)
    down = window.most(at, config.scale_down_window_s)
    target = now
    lasting = window.covers(at, config.scale_up_window_s)
    if up > now and lasting and not _resting(role, at, memory, config, up=False):
        target = min(up, now + config.max_step_up)
    elif (
        down < now and window.covers(at, config.scale_down_window_s) and not _resting(role, at, memory, config, up=True)
    ):
        target = _fewer(now, max(down, now - config.max_step_down), need, config)
        target = min(now, max(target, _history_minimum(role, at, memory, config)))
    return min(max(target, bounds.least, 1), bounds.most)


def _fewer(now: int, target: int, need: Need, config: ScalingConfig) -> int:
    """`target`, or the lowest number above it that suffices with the tolerance."""
    while target < now and need.workers > target * (1 - config.tolerance):
        target += 1
    return target


def _history_minimum(role: RoleName, at: float, memory: ScalingState, config: ScalingConfig) -> int:
    """Min. workers, because fewer have proved too few at this need."""
    peak = memory.windows[role].peak(at, config.scale_down_window_s)
    return memory.scale_downs.get(role, ScaleDownHistory()).min_workers(peak, config.tolerance)


def _history(
    role: RoleName, load: Load, now: int, wanted: int, memory: ScalingState, config: ScalingConfig
) -> ScaleDownHistory:
    history, window = memory.scale_downs.get(role, ScaleDownHistory()), memory.windows[role]
    at, window_s = load.at, config.scale_down_window_s
    if wanted < now:
        return history.went_down(Reduction(at, wanted, window.peak(at, window_s), window.busiest(at, window_s)))
    if wanted > now:
        targets = config.bounds(role).targets
        trial_s = config.scale_up_window_s + targets.clear_seconds
        if targets.latency_s is not None:
            trial_s += MEASURED_S + LATE_S
        return history.went_up(at, now, _arrivals(role, load), trial_s)
    return history


def _resting(role: RoleName, at: float, memory: ScalingState, config: ScalingConfig, *, up: bool) -> bool:
    """Whether the last change in this direction was recent, so that the opposite change must wait."""
    change = memory.changes.get(role)
    return change is not None and change.up is up and at - change.at < config.cooldown_s


def _flips(now: Counts, wanted: Counts, at: float, memory: ScalingState, config: ScalingConfig) -> int:
    """Workers that change from decode to prefill; negative: the other way.

    A flip takes seconds and is taken back as fast, so what has been spare throughout the cooldown is enough.
    """
    if not config.flip_roles or config.prefill.gpus != config.decode.gpus:
        return 0
    directions: tuple[tuple[RoleName, RoleName, int], ...] = (("prefill", "decode", 1), ("decode", "prefill", -1))
    for taker, giver, sign in directions:
        missing = wanted[taker] - now[taker]
        if missing > 0 and not _resting(giver, at, memory, config, up=True):
            return sign * min(missing, _spare(giver, now, at, memory, config))
    return 0


def _spare(role: RoleName, now: Counts, at: float, memory: ScalingState, config: ScalingConfig) -> int:
    window = memory.windows[role]
    if not window.covers(at, config.cooldown_s):
        return 0
    tried = _history_minimum(role, at, memory, config)
    busy = max(window.most(at, config.cooldown_s), config.bounds(role).least, 1, tried)
    return max(0, now[role] - busy)


def _after(flips: int, now: Counts, wanted: Counts) -> Counts:
    """What is given away is not wanted any more."""
    giver: RoleName = "decode" if flips > 0 else "prefill"
    return {**wanted, giver: min(wanted[giver], now[giver] - abs(flips))}


def _outcome(
    at: float, now: Counts, wanted: Counts, flips: int, needs: Mapping[RoleName, Need], memory: ScalingState
) -> Outcome:
    decisions: list[Decision] = []
    if flips:
        taker: RoleName = "prefill" if flips > 0 else "decode"
        decisions.append(
            Decision(
                role="both", action="flip", before=0, after=abs(flips), reason=f"to {taker}: {needs[taker].reason}"
            )
        )
    signs: Counts = {"prefill": flips, "decode": -flips}
    for role in ROLES:
        before = now[role] + signs[role]
        if wanted[role] != before:
            reason = needs[role].reason
            decisions.append(Decision(role=role, action="scale", before=before, after=wanted[role], reason=reason))
    changes = dict(memory.changes)
    for role in ROLES:
        if wanted[role] != now[role]:
            changes[role] = Change(at, wanted[role] > now[role])
    return Outcome(wanted=wanted, flips=flips, decisions=tuple(decisions), memory=replace(memory, changes=changes))


def _hold(now: Counts, reason: str, memory: ScalingState) -> Outcome:
    total = sum(now.values())
    held = Decision(role="both", action="hold", before=total, after=total, reason=reason)
    return Outcome(wanted=now, flips=0, decisions=(held,), memory=memory)
