"""From the configured name to the policy."""

from tandem_engine.clock import Clock
from tandem_engine.config import SchedulePolicy, SchedulerConfig
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.no_cache import NoPrefixCache
from tandem_engine.scheduler.policy.ageing import Ageing
from tandem_engine.scheduler.policy.by_prefix import ByPrefix
from tandem_engine.scheduler.policy.dfs_weight import HeaviestBranchFirst
from tandem_engine.scheduler.policy.fcfs import Fcfs
from tandem_engine.scheduler.policy.interface import Policy
from tandem_engine.scheduler.policy.lpm import longest_prefix_first
from tandem_engine.scheduler.policy.priority import ByPriority
from tandem_engine.scheduler.policy.shortest_remaining import ShortestRemaining


def make_policy(config: SchedulerConfig, *, memory: KvMemory, clock: Clock) -> Policy:
    """The policy that `config` names."""
    ageing = Ageing(clock=clock, seconds=config.policy_ageing_seconds)
    match config.schedule_policy:
        case SchedulePolicy.FCFS:
            return Fcfs(memory=None if isinstance(memory.cache, NoPrefixCache) else memory)
        case SchedulePolicy.LPM:
            return ByPrefix(memory=memory, ageing=ageing, ranking=longest_prefix_first)
        case SchedulePolicy.DFS_WEIGHT:
            return ByPrefix(memory=memory, ageing=ageing, ranking=HeaviestBranchFirst(page_size=memory.page_size))
        case SchedulePolicy.PRIORITY:
            return ByPriority(ageing=ageing, threshold=config.priority_preemption_threshold)
        case SchedulePolicy.SRF:
            return ShortestRemaining(ageing=ageing, chunk=config.chunked_prefill_size)
