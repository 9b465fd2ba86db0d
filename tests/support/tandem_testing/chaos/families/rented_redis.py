"""Redis of several servers, one of which takes over (69 to 71)."""

import asyncio

from tandem_testing.chaos.families.redis_faults import back_in_use, routed_by_redis, steady
from tandem_testing.chaos.fleet import Rented, Shape
from tandem_testing.chaos.scenario import PATIENCE_S, Run, scenario
from tandem_testing.chaos.streams import Kind, Load
from tandem_testing.redis_fleets import RedisCluster, RedisPair, WatchedPair, in_step
from tandem_testing.waiting import until

USED_AGAIN_S = 3.0
"""After the new primary answers."""
VOTES = {"cluster-node-timeout": "2000", "cluster-replica-no-failover": "no"}
"""From now on the nodes themselves replace one that is silent for 2 s."""


async def more(run: Run, load: Load, first: int) -> None:
    """Requests that are sent after what was just done."""
    load.send(run.asks(Kind.PLAIN, count=8, tokens=32, first=first))
    await until(lambda: load.begun >= len(load.answers), PATIENCE_S, "the new ones speak")


@scenario(69, shape=Shape(rented=Rented.PAIR))
async def redis_fails_over_behind_one_address(run: Run) -> None:
    pair = run.fleet.rented
    assert isinstance(pair, RedisPair)

    async def fault(load: Load) -> None:
        await pair.in_step()
        pair.fail_over()
        await steady(run, load)
        await until(lambda: routed_by_redis(run), PATIENCE_S, "the new primary is used")
        await pair.in_step()
        pair.fail_over()
        await more(run, load, 500)

    await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN), fault)
    await back_in_use(run, USED_AGAIN_S)


@scenario(70, shape=Shape(rented=Rented.SENTINELS))
async def redis_dies_and_sentinels_promote_its_replica(run: Run) -> None:
    watched = run.fleet.rented
    assert isinstance(watched, WatchedPair)

    async def fault(load: Load) -> None:
        await watched.in_step()
        watched.primary.kill()
        await steady(run, load)
        await watched.is_failed_over()
        await more(run, load, 500)

    await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN), fault)
    await back_in_use(run, USED_AGAIN_S)


@scenario(71, shape=Shape(rented=Rented.CLUSTER))
async def the_slot_of_a_cluster_moves_then_its_owner_dies(run: Run) -> None:
    cluster, key = run.fleet.rented, run.fleet.keys.starting
    assert isinstance(cluster, RedisCluster)

    async def fault(load: Load) -> None:
        owner = cluster.owner(key)
        taker = next(node for node in cluster.primaries if node is not owner)
        cluster.begin_move(key, taker)
        await more(run, load, 400)
        # Commands of seconds: the event loop has streams to read.
        await asyncio.to_thread(cluster.move_keys, owner, taker, cluster.slot(key))
        cluster.end_move(owner, taker, cluster.slot(key))
        await steady(run, load)
        await until(lambda: routed_by_redis(run), PATIENCE_S, "the slot's new owner is used")
        promoted = cluster.replica_of(taker)
        await in_step(taker, promoted)
        for node in cluster.alive:
            for name, value in VOTES.items():
                node.command("CONFIG", "SET", name, value)
        taker.kill()
        await more(run, load, 500)
        await cluster.is_taken_over(key, promoted)
        await more(run, load, 600)

    await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN), fault)
    await back_in_use(run, USED_AGAIN_S)
