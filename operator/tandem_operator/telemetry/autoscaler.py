"""The autoscaler of one ModelService: from observed pods to the replicas of each WorkerPool, and role flips.

    observed ─▶ workers of each role: all desired ones, including pending and warming; flipped ones where they serve
             ─▶ scaling.policy.decide ─▶ flips: the least loaded candidates, before pods are created or deleted
             ─▶ replicas of each pool; for a shrinking pool, the deletion cost of each pod

Pure: the caller provides pods and metrics, and applies the outcome: costs first, then flips, then pools. Only the
windows are lost with the process: a new leader holds until it has polled twice, and waits the whole window before any
scale-down [figures-or-hold].

    costs     The ReplicaSet controller deletes the pods with the lowest cost first: the least loaded ones, because
              their requests must migrate, and before them pods that serve in the role with too many workers
    flips     Changes of role without a restart. A flip is safe to repeat: a worker already in that role continues.
              Workers export their role as a metric, so nothing is stored here: a restarted worker has the role of its
              Deployment again, and the next poll shows it
    counts    A WorkerPool counts the pods of its Deployments, whatever role they serve in. The scaling policy counts
              workers by the role they serve in. `PoolCounts` converts between both
    status    Recent decisions for status and events. A hold is reported once while it lasts: its message has numbers
              that change each period, and would cause a status write each time
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import httpx

from tandem_operator.api.model_service import Decision as StatusDecision
from tandem_operator.api.slo import Slo
from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.builders.engine_flags import gpus_of
from tandem_operator.builders.served import Served
from tandem_operator.scaling.load import Targets
from tandem_operator.scaling.policy import Decision, RoleBounds, ScalingConfig, ScalingState, decide
from tandem_operator.telemetry.pods import HEALTH_PORT, PodSeen
from tandem_operator.telemetry.pool_owner import PoolOwner, Verdict
from tandem_operator.telemetry.samples import LoadReading
from tandem_operator.telemetry.worker_control import post_order

KEPT = 1_000_000
"""Above whatever can be outstanding on one worker."""

UNKNOWN = KEPT // 2
"""Of a pod without metrics: it may be full. Those that are not ready go before all others anyway."""


def changed_costs(
    workers: Iterable[PodSeen], seen: LoadReading, *, pools: Collection[RoleName], roles: Collection[RoleName]
) -> dict[str, int]:
    """New costs by pod name, where they differ. `pools` are those that shrink, `roles` those with too many workers."""
    costs = {pod.name: cost_of(pod, seen, roles) for pod in workers if pod.worker_role in pools}
    before = {pod.name: pod.deletion_cost for pod in workers}
    return {name: cost for name, cost in costs.items() if cost != before[name]}


def cost_of(pod: PodSeen, seen: LoadReading, roles: Collection[RoleName]) -> int:
    """Of one pod."""
    figures = seen.workers.get(pod.name)
    outstanding = UNKNOWN if figures is None else min(round(figures.outstanding), UNKNOWN)
    return outstanding if seen.serves(pod) in roles else outstanding + KEPT


ORDER_S = 35.0
"""The worker gives its engine 30 s: a step that is being computed has to end first."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A live worker is to serve in another role."""

    pod: PodSeen
    role: RoleName


def flips_of(workers: Iterable[PodSeen], seen: LoadReading) -> dict[RoleName, int]:
    """Pods that serve in each role and belong to the other's pool."""
    flipped: dict[RoleName, int] = {"prefill": 0, "decode": 0}
    for pod in workers:
        serves = seen.serves(pod)
        if serves is not None and serves != pod.worker_role:
            flipped[serves] += 1
    return flipped


def candidates(count: int, workers: Iterable[PodSeen], seen: LoadReading) -> tuple[Flip, ...]:
    """The workers to flip: `count` from decode to prefill, negative the other way; fewer where fewer can.

    Workers that return to their pool's role go first, then the least loaded. One without metrics, or draining, stays.
    """
    giver: RoleName = "decode" if count > 0 else "prefill"
    taker: RoleName = "prefill" if count > 0 else "decode"
    able = [
        pod
        for pod in workers
        if pod.ready
        and pod.name in seen.workers
        and not seen.workers[pod.name].draining
        and seen.workers[pod.name].serves == giver
    ]
    # The last worker of a role stays: without it nothing is served, whatever the metrics are.
    able = sorted(able, key=lambda pod: _price(pod, taker, seen))[: max(0, len(able) - 1)]
    return tuple(Flip(pod, taker) for pod in able[: abs(count)])


def _price(pod: PodSeen, taker: RoleName, seen: LoadReading) -> tuple[bool, float, str]:
    return (pod.worker_role != taker, seen.workers[pod.name].outstanding, pod.name)


async def order_flip(client: httpx.AsyncClient, flip: Flip, token: str) -> None:
    """Send the command. Raises `OrderFailedError` with the error of the worker, or of the network."""
    await post_order(client, flip.pod, HEALTH_PORT, "/role", {"role": flip.role}, token=token, within_s=ORDER_S)


Counts = dict[RoleName, int]
OTHER: dict[RoleName, RoleName] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Pods of each pool, and how many of the other pool's pods serve in each role."""

    pools: Counts
    flipped: Counts
    """By the role they serve in: pods of the other pool. Never more than that pool has."""

    @staticmethod
    def of(pools: Mapping[RoleName, int], flipped: Mapping[RoleName, int]) -> "PoolCounts":
        """A pool smaller than the number of its flipped pods counts only the pods that it has."""
        return PoolCounts(
            {role: pools[role] for role in ROLES}, {role: min(flipped[role], pools[OTHER[role]]) for role in ROLES}
        )

    @property
    def serving(self) -> Counts:
        """Workers of each role. Pods that are desired and not there yet will serve as their pool specifies."""
        return {role: self.pools[role] + self.flipped[role] - self.flipped[OTHER[role]] for role in ROLES}

    def after(self, flips: Iterable[Flip]) -> "PoolCounts":
        flipped = dict(self.flipped)
        for flip in flips:
            if flip.pod.worker_role == flip.role:
                flipped[OTHER[flip.role]] -= 1
            else:
                flipped[flip.role] += 1
        return PoolCounts.of(self.pools, {role: max(0, flipped[role]) for role in ROLES})

    def pools_for(self, wanted: Mapping[RoleName, int], config: ScalingConfig) -> Counts:
        """Pods of each pool so that `wanted` workers serve in each role. Of a role that shrinks, flipped ones go first.

        No pool leaves its bounds for that: more than `maxReplicas` pods are never made, wherever they would serve.
        """
        pools, serving = dict(self.pools), self.serving
        for role in ROLES:
            change = wanted[role] - serving[role]
            back = min(max(0, -change), self.flipped[role])
            pools[OTHER[role]] -= back
            pools[role] += change + back
        return {role: min(max(pools[role], config.bounds(role).least), config.bounds(role).most) for role in ROLES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """What there should be."""

    pools: Counts
    """Replicas of each WorkerPool."""
    flips: tuple[Flip, ...] = ()
    decisions: tuple[Decision, ...] = ()
    costs: Mapping[str, int] = field(default_factory=dict)
    """pod-deletion-cost by pod name, where it is to be another than now. Empty unless a pool shrinks: an annotation
    written each period would be load on the API server for nothing."""
    holding: str = ""
    """Why nothing can be decided; "" while figures can be trusted."""


@dataclass(kw_only=True, slots=True)
class Autoscaler:
    """One per ModelService. It remembers needs over time."""

    memory: ScalingState = field(default_factory=ScalingState)
    owner: PoolOwner = field(default_factory=PoolOwner)

    def carried_out(
        self, at: float, scaled: Scaled, before: Mapping[RoleName, int], unwritten: Collection[RoleName] = ()
    ) -> None:
        """Pools have the replicas of `scaled`; `before` they had these. `unwritten`: pools of which that is not known,
        because writing them failed."""
        if not scaled.holding:
            self.owner.ordered(at, scaled.pools, before)
            self.owner.forget(unwritten)

    def step(
        self,
        seen: LoadReading,
        config: ScalingConfig,
        pods: Sequence[PodSeen],
        pools: Mapping[RoleName, int],
        *,
        revision: str,
        rolling_out: bool = False,
        at: float = 0.0,
    ) -> Scaled:
        """`pools`: `spec.replicas` of each. `revision`: the one that is served. While `rolling_out`, no worker changes
        roles: those that would are about to go. `at`: monotonic seconds, as of `carried_out`."""
        now = {role: pools[role] for role in ROLES}
        bounds = {role: (config.bounds(role).least, config.bounds(role).most) for role in ROLES}
        verdict = self.owner.judge(at, now, bounds)
        if verdict.holding:
            return _hold(now, verdict.holding)
        if verdict.restore:
            return _restored(now, verdict)
        if seen.load is None:
            return _hold(now, seen.reason)
        workers = [pod for pod in pods if pod.worker_role is not None and not pod.terminating]
        counts = PoolCounts.of(now, flips_of(workers, seen))
        law = replace(config, flip_roles=config.flip_roles and not rolling_out)
        outcome = decide(seen.load, counts.serving, self.memory, law)
        self.memory = outcome.memory
        if seen.load.error():
            return Scaled(pools=now, decisions=outcome.decisions, holding=outcome.decisions[0].reason)
        flips = candidates(outcome.flips, [pod for pod in workers if pod.revision == revision], seen)
        flipped = counts.after(flips)
        wanted = flipped.pools_for(outcome.wanted, config)
        return Scaled(
            pools=wanted,
            flips=flips,
            decisions=outcome.decisions,
            costs=changed_costs(
                workers,
                seen,
                pools={role for role in ROLES if wanted[role] < now[role]},
                roles={role for role in ROLES if outcome.wanted[role] < flipped.serving[role]},
            ),
        )


def _hold(pools: Counts, reason: str) -> Scaled:
    total = sum(pools.values())
    held = Decision(role="both", action="hold", before=total, after=total, reason=reason)
    return Scaled(pools=pools, decisions=(held,), holding=reason)


def _restored(pools: Counts, verdict: Verdict) -> Scaled:
    decisions = tuple(
        Decision(role=role, action="restore", before=pools[role], after=count, reason=verdict.reason)
        for role, count in verdict.restore.items()
    )
    return Scaled(pools={**pools, **verdict.restore}, decisions=decisions)


def scaling_config(service: Served) -> ScalingConfig:
    """Bounds, targets and windows of both roles."""
    given = service.spec.autoscaling
    return ScalingConfig(
        prefill=_bounds(service, "prefill"),
        decode=_bounds(service, "decode"),
        gpu_budget=given.gpu_budget,
        flip_roles=given.flip_roles,
        scale_up_window_s=given.scale_up_window_seconds,
        scale_down_window_s=given.scale_down_window_seconds,
        tolerance=given.tolerance,
        max_step_up=given.max_step_up,
        max_step_down=given.max_step_down,
        idle_s_to_zero=given.idle_seconds_to_zero,
        cooldown_s=given.cooldown_seconds,
    )


def _bounds(service: Served, name: RoleName) -> RoleBounds:
    role, slo = service.role(name), service.spec.slo or Slo()
    return RoleBounds(
        least=role.scaling.min_replicas,
        most=role.scaling.max_replicas,
        targets=Targets(
            queue_seconds=role.scaling.target_queue_seconds,
            kv_usage=role.scaling.target_kv_usage,
            clear_seconds=role.scaling.clear_seconds,
            latency_s=slo.ttft_seconds if name == "prefill" else slo.itl_seconds,
            percentile=slo.percentile,
        ),
        gpus=gpus_of(role.resources) * service.nodes(name),
    )


MAX_HISTORY = 10
MAX_REASON = 1024
_FIGURES = re.compile(r"[\d.]+")


def merge_history(before: Sequence[StatusDecision], new: Iterable[Decision], now: str) -> list[StatusDecision]:
    """Newest first, at most `MAX_HISTORY`; equal to `before` if nothing is new. `now`: RFC 3339."""
    history = list(before)
    for decision in new_events(before, new):
        history.insert(0, _status_decision(decision, now))
    return history[:MAX_HISTORY]


def new_events(before: Sequence[StatusDecision], new: Iterable[Decision]) -> list[Decision]:
    """Decisions of `new` that differ from the last reported one: these become events."""
    events: list[Decision] = []
    last = _kind(before[0].action, before[0].reason) if before else None
    for decision in new:
        kind = _kind(decision.action, decision.reason)
        if decision.action != "hold" or kind != last:
            events.append(decision)
            last = kind
    return events


def event_of(decision: Decision) -> tuple[str, str, str]:
    """Type, reason and message of a Kubernetes event."""
    if decision.action == "hold":
        return "Warning", "ScalingHeld", f"{decision.after} workers stay: {decision.reason}"
    if decision.action == "restore":
        change = f"{decision.role} from {decision.before} to {decision.after}"
        return "Warning", "ReplicasRestored", f"{change}: {decision.reason}"
    if decision.action == "flip":
        return "Normal", "RolesFlipped", f"{decision.after} workers flip {decision.reason}"
    direction = "up" if decision.after > decision.before else "down"
    change = f"{decision.role} from {decision.before} to {decision.after}"
    return "Normal", f"Scaled{direction.capitalize()}", f"{change}: {decision.reason}"


def _status_decision(decision: Decision, now: str) -> StatusDecision:
    return StatusDecision(
        time=now,
        role=decision.role,
        action=decision.action,
        before=decision.before,
        after=decision.after,
        reason=decision.reason[:MAX_REASON],
    )


def _kind(action: str, reason: str) -> tuple[str, str]:
    return action, _FIGURES.sub("#", reason)
