"""Pods of pools against workers of roles, whatever has flipped: the wanted number serves, wherever bounds allow it."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_operator.api.types import ROLES
from tandem_operator.scaling.load import Targets
from tandem_operator.scaling.policy import RoleBounds, ScalingConfig
from tandem_operator.telemetry.autoscaler import OTHER, Flip, PoolCounts
from tandem_testing.pod_builders import pod

FREE = RoleBounds(least=0, most=1000, targets=Targets(queue_seconds=1.0, kv_usage=0.85))
BOUNDED = RoleBounds(least=1, most=4, targets=Targets(queue_seconds=1.0, kv_usage=0.85))

counts = st.fixed_dictionaries({role: st.integers(0, 8) for role in ROLES})
pool_counts = st.builds(PoolCounts.of, counts, counts)


@given(pool_counts, counts)
def test_serving_counts_equal_desired_after_pools_are_scaled(now, wanted):
    pools = now.pools_for(wanted, ScalingConfig(prefill=FREE, decode=FREE))
    assert all(pools[role] >= 0 for role in ROLES)
    assert sum(pools.values()) == sum(wanted.values())
    gone = {role: min(now.flipped[role], max(0, now.serving[role] - wanted[role])) for role in ROLES}
    after = PoolCounts.of(pools, {role: now.flipped[role] - gone[role] for role in ROLES})
    assert after.serving == wanted


@given(pool_counts)
def test_desired_pool_counts_change_nothing(now):
    assert now.pools_for(now.serving, ScalingConfig(prefill=FREE, decode=FREE)) == now.pools


@given(pool_counts, counts)
def test_bounds_hold_for_pods(now, wanted):
    pools = now.pools_for(wanted, ScalingConfig(prefill=BOUNDED, decode=BOUNDED))
    assert all(1 <= pools[role] <= 4 for role in ROLES)


@given(pool_counts, st.sampled_from(ROLES), st.booleans())
def test_flip_moves_one_worker_and_no_pod(now, taker, returns):
    home = taker if returns else OTHER[taker]
    able = now.flipped[OTHER[taker]] if returns else now.pools[home] - now.flipped[taker]
    if not able:
        return
    after = now.after([Flip(pod("x", home), taker)])
    assert after.pools == now.pools
    assert after.serving[taker] == now.serving[taker] + 1
    assert sum(after.serving.values()) == sum(now.serving.values())
