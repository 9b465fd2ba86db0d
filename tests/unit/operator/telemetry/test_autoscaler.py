"""From what was seen to pods of pools, flips and what pods cost."""

from tandem_operator.scaling.load import DecodeLoad, Load, PrefillLoad, Targets
from tandem_operator.scaling.policy import RoleBounds, ScalingConfig
from tandem_operator.telemetry.autoscaler import KEPT, UNKNOWN, Autoscaler, PoolCounts, Scaled, candidates
from tandem_operator.telemetry.samples import LoadReading
from tandem_testing.pod_builders import pod, worker

TARGETS = Targets(queue_seconds=1.0, kv_usage=0.85)


def config(*, least=1, most=8, **changes) -> ScalingConfig:
    role = RoleBounds(least=least, most=most, targets=TARGETS, gpus=1)
    values = {"prefill": role, "decode": role, "scale_down_window_s": 20.0, "cooldown_s": 10.0, **changes}
    return ScalingConfig(**values)


def load(at: float, *, tokens_per_s: float = 0.0, running: float = 0.0, **changes) -> Load:
    return Load(
        at=at,
        age_s=changes.get("age_s", 0.5),
        prefill=PrefillLoad(
            queued_tokens=0, oldest_wait_s=0, arrived_tokens_per_s=tokens_per_s, worker_tokens_per_s=1000
        ),
        decode=DecodeLoad(
            running=running,
            waiting=0,
            oldest_wait_s=0,
            arrived_per_s=0,
            seconds_each=10,
            worker_places=10,
            used_pages=0,
            worker_pages=100,
        ),
        held=changes.get("held", 0.0),
    )


def fleet(**roles: tuple[str, str, int]):
    """name=(role of its Deployment, what it serves as, outstanding) → pods and figures."""
    pods = [pod(name, role) for name, (role, _, _) in roles.items()]
    figures = {name: worker(serves, running=outstanding) for name, (_, serves, outstanding) in roles.items()}
    return pods, figures


class Run:
    """One autoscaler over several periods; pools are what it says."""

    def __init__(self, pods, figures, pools, law=None):
        self.pods, self.figures, self.pools = pods, figures, dict(pools)
        self.law = law or config()
        self.scaler = Autoscaler()

    def step(self, what: Load | None, reason: str = "", **changes) -> Scaled:
        seen = LoadReading(load=what, reason=reason, workers=self.figures)
        scaled = self.scaler.step(seen, self.law, self.pods, self.pools, revision="r1", **changes)
        self.pools = scaled.pools
        return scaled


PAIR = {"p0": ("prefill", "prefill", 0), "d0": ("decode", "decode", 0)}


def test_more_pods_for_more_tokens():
    run = Run(*fleet(**PAIR), {"prefill": 1, "decode": 1})
    scaled = run.step(load(0, tokens_per_s=2900, running=8))
    assert scaled.pools == {"prefill": 3, "decode": 1}
    assert [one.action for one in scaled.decisions] == ["scale"]
    assert not scaled.costs
    assert not scaled.flips


def test_requested_pods_are_not_requested_again():
    run = Run(*fleet(**PAIR), {"prefill": 1, "decode": 1})
    for at in range(0, 15, 5):
        scaled = run.step(load(at, tokens_per_s=2900, running=8))
    assert scaled.pools == {"prefill": 3, "decode": 1}
    assert not scaled.decisions


def test_missing_metrics_hold_and_report_why():  # [figures-or-hold]
    run = Run(*fleet(**PAIR), {"prefill": 4, "decode": 2})
    scaled = run.step(None, "no gateway reports its queue")
    assert scaled.pools == {"prefill": 4, "decode": 2}
    assert scaled.holding == "no gateway reports its queue"
    assert [one.action for one in scaled.decisions] == ["hold"]


def test_old_metrics_scale_nothing_not_even_to_zero():  # [figures-or-hold]
    run = Run(*fleet(**PAIR), {"prefill": 1, "decode": 1}, config(least=0, idle_s_to_zero=1.0))
    for at in (0, 60, 120):
        scaled = run.step(load(at, age_s=99.0))
        assert scaled.pools == {"prefill": 1, "decode": 1}
        assert "99 s old" in scaled.holding


def test_worker_flips_before_a_pod_is_made():
    pods, figures = fleet(p0=("prefill", "prefill", 0), d0=("decode", "decode", 5), d1=("decode", "decode", 2))
    run = Run(pods, figures, {"prefill": 1, "decode": 2})
    for at in (0, 5):
        run.step(load(at, tokens_per_s=500, running=7))
    scaled = run.step(load(10, tokens_per_s=1900, running=7))
    assert [(flip.pod.name, flip.role) for flip in scaled.flips] == [("d1", "prefill")]
    assert scaled.pools == {"prefill": 1, "decode": 2}, "a pool counts its pods, whatever they serve as"


def test_no_role_flip_during_rollout():
    pods, figures = fleet(p0=("prefill", "prefill", 0), d0=("decode", "decode", 5), d1=("decode", "decode", 2))
    run = Run(pods, figures, {"prefill": 1, "decode": 2})
    for at in (0, 5):
        run.step(load(at, tokens_per_s=500, running=7), rolling_out=True)
    scaled = run.step(load(10, tokens_per_s=1900, running=7), rolling_out=True)
    assert not scaled.flips
    assert scaled.pools == {"prefill": 2, "decode": 2}


def test_worker_with_the_fewest_requests_is_removed_first():
    pods, figures = fleet(
        p0=("prefill", "prefill", 0),
        d0=("decode", "decode", 3),
        d1=("decode", "decode", 1),
        d2=("decode", "decode", 2),
    )
    run = Run(pods, figures, {"prefill": 1, "decode": 3})
    for at in range(0, 30, 5):
        scaled = run.step(load(at, running=6))
        if scaled.pools["decode"] < 3:
            break
    assert scaled.pools == {"prefill": 1, "decode": 2}
    assert scaled.costs == {"d0": 3, "d1": 1, "d2": 2}


def test_cost_that_is_there_already_is_not_written_again():
    pods, figures = fleet(p0=("prefill", "prefill", 0), d0=("decode", "decode", 3), d1=("decode", "decode", 0))
    pods[1] = pod("d0", "decode", deletion_cost=3)
    run = Run(pods, figures, {"prefill": 1, "decode": 2})
    for at in range(0, 30, 5):
        scaled = run.step(load(at, running=3))
        if scaled.pools["decode"] < 2:
            break
    assert scaled.costs == {}, "0 is what a pod without the annotation costs"


def test_flipped_worker_is_removed_first():
    pods, figures = fleet(
        p0=("prefill", "prefill", 0),
        d0=("decode", "decode", 0),
        d1=("decode", "prefill", 9),
    )
    pods.append(pod("d2", "decode"))
    run = Run(pods, figures, {"prefill": 1, "decode": 3}, config(flip_roles=False))
    for at in range(0, 30, 5):
        scaled = run.step(load(at, running=15))
        if scaled.pools != {"prefill": 1, "decode": 3}:
            break
    assert scaled.pools == {"prefill": 1, "decode": 2}, "one prefill worker too many: the one that decode has lent"
    assert scaled.costs == {"d0": KEPT, "d1": 9, "d2": KEPT + UNKNOWN}


def test_scale_to_zero_and_back_in_pairs():
    run = Run(*fleet(**PAIR), {"prefill": 1, "decode": 1}, config(least=0, idle_s_to_zero=30.0))
    at = 0.0
    while run.pools["prefill"]:
        scaled = run.step(load(at))
        at += 5
        assert at < 100
    assert scaled.pools == {"prefill": 0, "decode": 0}
    run.pods, run.figures = [], {}
    assert run.step(load(at + 60)).pools == {"prefill": 0, "decode": 0}
    assert run.step(load(at + 65, held=1)).pools == {"prefill": 1, "decode": 1}


def test_flipped_worker_flips_back_first_and_last_one_stays():
    pods, figures = fleet(
        d0=("decode", "decode", 0),
        p1=("prefill", "decode", 8),
        d2=("decode", "decode", 1),
        p0=("prefill", "prefill", 0),
    )
    seen = LoadReading(load=None, workers=figures)
    assert [flip.pod.name for flip in candidates(1, pods, seen)] == ["p1"]
    assert [flip.pod.name for flip in candidates(5, pods, seen)] == ["p1", "d0"], "one decode worker stays"
    assert candidates(-1, pods, seen) == (), "the last prefill worker stays"


def test_draining_or_unready_worker_does_not_flip():
    pods, figures = fleet(d0=("decode", "decode", 0), d1=("decode", "decode", 5), d2=("decode", "decode", 6))
    pods[0] = pod("d0", ready=False)
    figures["d1"] = worker(running=5, draining=True)
    assert candidates(1, pods, LoadReading(load=None, workers=figures)) == ()


def test_pool_stays_within_its_bounds_wherever_its_pods_serve():
    counts = PoolCounts.of({"prefill": 1, "decode": 4}, {"prefill": 2, "decode": 0})
    assert counts.serving == {"prefill": 3, "decode": 2}
    assert counts.pools_for({"prefill": 3, "decode": 4}, config(most=4)) == {"prefill": 1, "decode": 4}
    assert counts.pools_for({"prefill": 1, "decode": 2}, config()) == {"prefill": 1, "decode": 2}
    assert counts.pools_for({"prefill": 0, "decode": 0}, config(least=0)) == {"prefill": 0, "decode": 0}
