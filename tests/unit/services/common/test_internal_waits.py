"""No wait inside the fabric is longer than ten seconds by default [bounded-waits].

Every duration of the fabric's packages is found by its name, so that a new one is judged here too: a constant in
capitals that ends in _S, _MS or _TIMEOUT, and a dataclass field with such a name and a default.
"""

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType

import tandem_engine.disaggregation
import tandem_engine.ipc
import tandem_services.common
import tandem_services.gateway
import tandem_services.router
import tandem_services.worker
from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.nixl.thread import STUCK_S
from tandem_services.router.keys import FENCE_AFTER_MS, HEARTBEAT_S, LEASE_MS, SWEEP_EVERY_MS
from tandem_services.router.membership import RETRY_LOST_AFTER_S

MAX_S = 10.0
PACKAGES = (
    tandem_engine.disaggregation,
    tandem_engine.ipc,
    tandem_services.common,
    tandem_services.gateway,
    tandem_services.router,
    tandem_services.worker,
)
DURATION = re.compile(r"(?:^|_)(?:s|ms|timeout|patience)$|_S$|_MS$|TIMEOUT$")

LONGER = {
    # The client's own time, or an operator's, or that of a process to start or to end.
    "GatewayConfig.request_timeout_s": "the deadline of a request",
    "RetryPolicy.recovery_s": "a stream waits for a worker until its deadline when there is none [streams-wait]",
    "ModelConfig.recovery_s": "the same",
    "gateway.limits.BODY_TIMEOUT_S": "a client sends its body",
    "gateway.limits.HEAD_TIMEOUT_S": "a client sends its headers",
    "gateway.limits.SEND_STALL_S": "a client takes what it is sent",
    "router.registered_adapters.REMOVED_S": "nothing waits: an administrator's command is remembered",
    "gateway.processes.supervisor.STABLE_S": "nothing waits: the pause before restarts of a process is reset",
    "router.cells.neighbour_cell.IDLE_S": "nothing waits: an unused view is closed",
    "gateway.dispatch.engine_pool.IDLE_S": "nothing waits: an unused connection is closed",
    "gateway.models.tokenizer_loads.MAX_PAUSE_S": "files that cannot be loaded are parsed again; others are at once",
    "ModelConfig.room_s": "a client's request waits for room, until its deadline at most",
    "AdmissionPolicy.room_s": "the same",
    "ModelConfig.start_wait_s": "a client's request waits for a worker that loads a model, until its deadline",
    "AdmissionPolicy.start_s": "the same",
    "GatewayConfig.keep_alive_s": "an idle connection of a client",
    "GatewayConfig.drain_timeout_s": "running requests finish before the process ends",
    "WorkerConfig.drain_timeout_s": "the same",
    "WorkerConfig.start_timeout_s": "a model is loaded",
    "WorkerConfig.redis_start_timeout_s": "Redis starts beside the worker",
    "RouterConfig.start_timeout_s": "Redis starts beside the gateway",
    "worker.http_api.ANSWER_S": "an operator's order",
    "worker.http_api.RELOAD_S": "an operator loads weights",
    "worker.http_api.LIVE_S": "a stalled engine, not offered since 3 s, is restarted",
    "worker.standby.ALONE_S": "an operator sends a canary; only where nobody serves the model",
    "worker.standby.UNTRIED_S": "an operator tries it; others of its revision serve",
    "worker.standby.HOLD_S": "the next canary of an operator that said so; others of its revision serve",
    "worker.main.END_GRACE_S": "the engine that it belongs to drains and ends; added to the drain's bound",
    # Between two of something, or how long something is remembered: no request waits for its end.
    "ipc.private_tmpdir.UNMARKED_S": "an empty folder may be about to be marked",
    "disaggregation.links.REPEAT_S": "a link's self-test is repeated",
    "disaggregation.nixl.thread.STUCK_S": "a WRITE ends; longer than a receiver that stands still lives",
    "disaggregation.holds.FENCED_AT_MAX_S": "pages that a stopped writer may be writing to stay unused",
    "worker.peers.REFRESH_S": "peers are introduced again",
    "ModelConfig.session_ttl_s": "an unused conversation is kept",
    "gateway.models.adapter_updates.LOAD_S": "an administrator loads an adapter; as long as its worker may take",
    "gateway.models.adapter_updates.TURN_S": "an administrator's command waits for the one before it",
    "gateway.models.adapter_updates.UNLOAD_S": "an administrator's command ends after the step that is computed",
    "gateway.fleets.COPY_EVERY_S": "nothing waits: Redis is asked whether it still has a copy",
    "gateway.models.fleet_tokenizer.BUNDLE_S": "a model not served yet: all parts of its tokenizer, each within 5 s",
    "gateway.models.fleet_tokenizer.PARTIAL_S": "nothing waits: age of what killed processes have begun to write",
    "worker.rates.MAX_S": "no request: a measurement of the worker's rates",
    "worker.rates.REQUEST_S": "one request of that measurement",
    "router.shared_state.COPY_TTL_MS": "nothing waits: a copy in Redis is kept",
    "gateway.queueing.turnover.MAX_RETRY_S": "the Retry-After of a client",
    "gateway.queueing.slo_admission.MAX_RETRY_S": "the same",
    "gateway.objectives.MAX_MS": "nothing waits: the largest objective of a client",
    "router.calibration.MAX_S": "nothing waits: the largest latency that is learned from",
    "router.policies.FORGET_S": "a worker that the registry has lost is remembered",
    "router.policies.START_S": "whoever comes belongs to the start of a fleet",
    "router.usage_counters.WINDOW_S": "the minute of a limit",
    "router.keys.LEASE_OF_REQUEST_MS": "a running request of a gateway that died counts against its tenant",
    "gateway.dispatch.quarantine.QUARANTINE_S": "a quarantined request is remembered",
    "router.shared_state.MAX_QUARANTINE_S": "the same, whatever Redis says",
    "gateway.console.fleet_history.KEPT_S": "curves of the console",
    "router.keys.FENCED_MEMORY_MS": "a fenced incarnation is recognised",
    "router.keys.INDEX_TTL_MS": "an index outlives a short loss of Redis",
    "router.keys.FLEET_TTL_MS": "keys of a cluster that is gone",
    "router.keys.DESCRIBE_EVERY_S": "an unchanged worker of a large fleet describes itself again",
    "worker.index_publisher.NAME_AGAIN_S": "a worker names some of its stored blocks again",
    "router.keys.DESCRIBED_TTL_MS": "a description outlives two that were missed",
    "common.redis_client.WARN_EVERY_S": "between two log lines",
    "RarelyLogged.every_s": "the same",
}


def modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                yield importlib.import_module(found.name)
            except ModuleNotFoundError as missing:
                # Kernels for devices do not wait, and cannot be imported everywhere.
                if missing.name != "triton":
                    raise


def durations() -> dict[str, float]:
    """Seconds by the name of a constant or a field."""
    found: dict[str, float] = {}
    for module in modules():
        short = module.__name__.partition(".")[2]
        for name, value in vars(module).items():
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__:
                found |= fields_of(value)
            elif isinstance(value, int | float) and DURATION.search(name) and defined_in(module, name):
                found[f"{short}.{name}"] = value / 1000 if name.endswith("_MS") else value
    return found | fields_of(DisaggConfig)


def fields_of(kind: type) -> dict[str, float]:
    return {
        f"{kind.__name__}.{field.name}": field.default
        for field in dataclasses.fields(kind)
        if DURATION.search(field.name) and isinstance(field.default, int | float) and not field.name.startswith("_")
    }


def defined_in(module: ModuleType, name: str) -> bool:
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as source:
        return any(re.match(rf"{name}(:.*)? = ", line) for line in source)


def test_no_wait_is_longer_than_ten_seconds():
    found = durations()
    assert len(found) > 40, sorted(found)
    longer = {name for name, seconds in found.items() if seconds > MAX_S}
    assert longer == set(LONGER), longer ^ set(LONGER)


def test_grants_and_leases_expire_before_fencing():  # [late-write] [grant-expiry]
    """Its pages are given to others when it is fenced; until then every lease it may hold has run out."""
    leases = DisaggConfig()
    assert max(leases.grant_timeout, leases.hold_timeout) < FENCE_AFTER_MS / 1000
    assert LEASE_MS < FENCE_AFTER_MS


def test_silent_worker_is_removed_within_12_seconds():  # [dead-peer-released]
    """Silence is noticed by a sweep, which any worker's heartbeat starts, and reported with the next heartbeat."""
    assert (FENCE_AFTER_MS + SWEEP_EVERY_MS) / 1000 + HEARTBEAT_S <= 12.0
    # A write is given up, and its receiver may use the pages again, when one that stands still has been fenced
    # [late-write].
    assert STUCK_S > 12.0
    # A gateway gives a worker that it lost another chance only when the registry would have fenced a dead one.
    assert RETRY_LOST_AFTER_S >= FENCE_AFTER_MS / 1000
