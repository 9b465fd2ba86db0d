"""Conditions about adapters: of the service, and of each ModelAdapter."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tandem_operator.api.adapters import AdapterStatus
from tandem_operator.api.model_adapter import LoadedWorker, ModelAdapterStatus
from tandem_operator.api.types import Condition, condition
from tandem_operator.planning.adapters import Accepted, AdapterAsk, Reading, Refusal, Workers
from tandem_operator.planning.status import ADAPTERS_READY, READY, settled

ACCEPTED = "Accepted"
MAX_SHOWN = 4
MAX_WORKERS = 64


def adapters_ready(adapters: Sequence[AdapterStatus], before: Iterable[Condition]) -> Iterator[Condition]:
    """Informational; nothing of a service that never had any."""
    if not adapters:
        if any(one.type == ADAPTERS_READY for one in before):
            yield condition(ADAPTERS_READY, True, "NoAdapters")
        return
    failed = [one for one in adapters if one.state == "Failed" or (one.state == "Unloading" and one.message)]
    waiting = [one for one in adapters if one.state in ("Pending", "Unloading")]
    if failed:
        yield condition(ADAPTERS_READY, False, "AdapterFailed", _listed(failed))
    elif waiting:
        yield condition(ADAPTERS_READY, None, "Loading", _listed(waiting))
    else:
        yield condition(ADAPTERS_READY, True, "AllLoaded")


def _listed(adapters: Sequence[AdapterStatus]) -> str:
    shown = "; ".join(f"{one.name}: {one.message or one.state}" for one in adapters[:MAX_SHOWN])
    more = len(adapters) - MAX_SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown


def model_adapter_statuses(
    asks: Iterable[AdapterAsk],
    found: Accepted,
    adapters: Iterable[AdapterStatus],
    reading: Reading,
    workers: Workers,
    now: str,
) -> dict[str, ModelAdapterStatus]:
    """By name of the object."""
    by_object = {one.model_adapter: one for one in adapters if one.state != "Unloading"}
    return {
        ask.name: _refused(ask, found.refusals[ask.name], now)
        if ask.name in found.refusals
        else _served(ask, by_object.get(ask.name), reading, workers, now)
        for ask in asks
    }


def without_service(asks: Iterable[AdapterAsk], service: str, now: str) -> Mapping[str, ModelAdapterStatus]:
    """Of ModelAdapters that name a service which is not there."""
    message = f"spec.serviceName: there is no ModelService {service!r} in this namespace; create it"
    return {ask.name: _refused(ask, Refusal(reason="ServiceMissing", message=message), now) for ask in asks}


def _refused(ask: AdapterAsk, refusal: Refusal, now: str) -> ModelAdapterStatus:
    conditions = (
        condition(ACCEPTED, False, refusal.reason, refusal.message),
        condition(READY, False, "NotAccepted", refusal.message),
    )
    return ModelAdapterStatus(observed_generation=ask.generation, conditions=_timed(ask, conditions, now))


def _served(
    ask: AdapterAsk, adapter: AdapterStatus | None, reading: Reading, workers: Workers, now: str
) -> ModelAdapterStatus:
    state = adapter.state if adapter is not None else "Pending"
    message = adapter.message if adapter is not None else ""
    held = (reading.held or {}).get(ask.served_name)
    has_it = sorted(held.workers & workers.keys()) if held is not None else []
    conditions = (
        condition(ACCEPTED, True, "Accepted"),
        condition(READY, None if state == "Pending" else state == "Loaded", state, message),
    )
    return ModelAdapterStatus(
        observed_generation=ask.generation,
        conditions=_timed(ask, conditions, now),
        digest=adapter.digest if adapter is not None else "",
        loaded=len(has_it),
        workers=[LoadedWorker(name=name) for name in has_it[:MAX_WORKERS]],
        failed=adapter.failed if adapter is not None else [],
        failed_workers=adapter.failed_workers if adapter is not None else 0,
    )


def _timed(ask: AdapterAsk, conditions: Sequence[Condition], now: str) -> list[Condition]:
    return settled(conditions, ask.before.conditions, generation=ask.generation, now=now)
