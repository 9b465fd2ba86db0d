"""Adapters of a service: which it should have, which its gateways have, the next command, and what statuses say.

    spec.adapters ─┐
                   ├─▶ `accepted` ─▶ wanted ─┬─▶ `next_command`, one at a time, to a gateway
    ModelAdapters ─┘                         └─▶ `statuses_of`
                                 `Reading`: what the gateway has registered, and what commands have failed with

The status of the service is the memory of what the operator has loaded: a name is loaded only after the status lists
it, and an adapter that is listed and no longer wanted is unloaded. So a ModelAdapter needs no finalizer, and adapters
that people have loaded by themselves are left alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem_operator.api.adapters import AdapterSource, AdapterState, AdapterStatus, FailedWorker
from tandem_operator.api.model_adapter import ModelAdapterSpec, ModelAdapterStatus
from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.builders.adapters import claims_of, folder_of
from tandem_operator.builders.served import Served
from tandem_operator.planning.adapter_rules import most_in_memory, name_problem

MAX_LISTED = 256
MAX_FAILED = 8
MAX_FAILED_IN_ALL = 256
"""Failed workers that a status names, of all adapters: one of each in any case, and more where few have failed. Less
than 1.5 MiB of an object fit into etcd, and a fleet may have 256 adapters on 1,000 workers."""
MAX_MESSAGE = 1024
MAX_REASON = 512
"""Bytes of JSON, as `MAX_MESSAGE`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterAsk:
    """A ModelAdapter that names the service."""

    name: str
    """Of the object."""
    created: str
    generation: int
    spec: ModelAdapterSpec | None
    """None: it does not match this operator's schema."""
    problem: str = ""
    """Why not."""
    before: ModelAdapterStatus = field(default_factory=ModelAdapterStatus)

    @property
    def served_name(self) -> str:
        """What clients call the adapter."""
        return (self.spec.name if self.spec is not None else None) or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedAdapter:
    """One adapter that the service should have."""

    name: str
    folder: str
    """Below the workers' folder of adapters."""
    digest: str = ""
    """No other content; empty: whatever is there."""
    pinned: bool = False
    model_adapter: str = ""
    """ModelAdapter that it comes from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a ModelAdapter is not served."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldAdapter:
    """What a name stands for at the gateways."""

    digest: str
    folder: str
    workers: frozenset[str] = frozenset()
    """Pods that have it in memory."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why pods could not load it for a request, by pod; at most `MAX_FAILED`."""
    failures: int = 0
    """Number of these pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What the last command about an adapter has failed with."""

    wanted: WantedAdapter | None
    """None: it was to be unloaded."""
    message: str
    workers: Mapping[str, str] = field(default_factory=dict)
    """Reason by pod; at most `MAX_FAILED`."""
    failures: int = 0
    """Number of pods that have failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The last look at a gateway."""

    held: Mapping[str, HeldAdapter] | None = None
    """Registered adapters by name; None: no gateway has answered yet."""
    failures: Mapping[str, Failure] = field(default_factory=dict)
    """By name."""
    announced: frozenset[str] = frozenset()
    """Names whose requests wait at the gateways until they are registered."""
    pinned_on: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Ready workers at the last successful load of each name; none for one that was not pinned."""
    problem: str = ""
    """Why no gateway answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A command."""

    wanted: WantedAdapter
    digest: str
    """No other content; empty: whatever is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unload:
    """A command."""

    name: str


Command = Load | Unload
Workers = Mapping[str, RoleName]
"""Roles of ready workers by pod."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """All adapters that a service should have."""

    wanted: tuple[WantedAdapter, ...] = ()
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """By name of the ModelAdapter."""


def accepted(service: Served, asks: Iterable[AdapterAsk]) -> Accepted:
    """Those of the spec have priority, then the oldest ModelAdapter of a name."""
    wanted = {
        one.name: WantedAdapter(name=one.name, folder=folder_of(one.source), digest=one.digest or "", pinned=one.pinned)
        for one in service.spec.adapters
    }
    claims, refusals = claims_of(service), dict[str, Refusal]()
    for ask in sorted(asks, key=lambda one: (one.created, one.name)):
        refusal = _refusal(service, ask, claims, wanted)
        if refusal is not None:
            refusals[ask.name] = refusal
        elif ask.spec is not None:
            wanted[ask.served_name] = WantedAdapter(
                name=ask.served_name,
                folder=folder_of(AdapterSource(claim=ask.spec.source.claim)),
                digest=ask.spec.digest or "",
                pinned=ask.spec.pinned,
                model_adapter=ask.name,
            )
    return Accepted(wanted=tuple(wanted.values()), refusals=refusals)


def _refusal(
    service: Served, ask: AdapterAsk, claims: Sequence[str], taken: Mapping[str, WantedAdapter]
) -> Refusal | None:
    if ask.spec is None:
        return Refusal(reason="InvalidSpec", message=ask.problem)
    field = "spec.name" if ask.spec.name is not None else "metadata.name"
    problem = name_problem(service, ask.served_name)
    if problem is not None:
        return Refusal(reason="NameTaken", message=f"{field}: {problem}")
    other = taken.get(ask.served_name)
    if other is not None:
        owner = f"ModelAdapter {other.model_adapter!r}" if other.model_adapter else "spec.adapters of the ModelService"
        message = f"{field}: {ask.served_name!r} is the name of an adapter of {owner}; take another name"
        return Refusal(reason="NameTaken", message=message)
    claim = ask.spec.source.claim.claim_name
    if claim not in claims:
        message = (
            f"spec.source.claim.claimName: the workers of ModelService {service.name!r} do not mount {claim!r}; add it "
            f"to its spec.adapterClaims"
        )
        return Refusal(reason="NotMounted", message=message)
    return _without_room(service, ask.spec, taken)


def _without_room(service: Served, spec: ModelAdapterSpec, taken: Mapping[str, WantedAdapter]) -> Refusal | None:
    if len(taken) >= MAX_LISTED:
        return Refusal(reason="TooMany", message=f"the service has {MAX_LISTED} adapters; delete some")
    most = min(most_in_memory(service, role) for role in ROLES) - 1
    if spec.pinned and sum(one.pinned for one in taken.values()) >= most:
        message = (
            f"spec.pinned: {most} adapters of ModelService {service.name!r} are pinned, and others need room; leave "
            f"it out, or raise engine.lora.maxCpuLoras of the service"
        )
        return Refusal(reason="TooManyPinned", message=message)
    return None


def next_command(
    wanted: Iterable[WantedAdapter],
    listed: Mapping[str, bool],
    reading: Reading,
    workers: Workers,
    held_back: Iterable[str],
) -> Command | None:
    """What to send next. `listed`: names in the status, and whether they were pinned; `held_back`: names whose last
    command has just failed.

    Nothing is loaded while no worker is ready: none could read the directory.
    """
    held, held_back = reading.held or {}, set(held_back)
    by_name = {one.name: one for one in wanted}
    for name in sorted(listed.keys() - by_name.keys() - held_back):
        if name in held:
            return Unload(name=name)
    for one in by_name.values():
        if one.name not in listed or one.name in held_back or not workers:
            continue
        found = held.get(one.name)
        if found is None or not _is_held(one, found):
            return Load(wanted=one, digest=one.digest)
        if _pin_differs(one, found, reading, workers, pinned=listed[one.name]):
            # To repeat the command loads it where it is missing, and nothing else than it.
            return Load(wanted=one, digest=found.digest)
    return None


def to_announce(wanted: Iterable[WantedAdapter], listed: Iterable[str], reading: Reading) -> frozenset[str]:
    """Names whose requests are to wait, although nothing is registered yet: those that the next worker loads.

    The status has to list them, or nothing would withdraw a name that is removed again. One that could not be loaded
    is unknown to clients, as before.
    """
    names = {one.name for one in wanted if _failure(reading, one.name, one) is None}
    return frozenset(names & {*listed})


def _pin_differs(one: WantedAdapter, held: HeldAdapter, reading: Reading, workers: Workers, *, pinned: bool) -> bool:
    """Whether it has to be pinned on some worker, or is pinned and no longer should be. `pinned`: as the status says.

    A worker that has loaded it for a request has not pinned it.
    """
    if one.pinned:
        return not workers.keys() <= reading.pinned_on.get(one.name, frozenset()) & held.workers
    return bool(reading.pinned_on[one.name]) if one.name in reading.pinned_on else pinned


def _is_held(wanted: WantedAdapter, held: HeldAdapter | None) -> bool:
    """Whether the name stands for what is wanted."""
    return held is not None and held.folder == wanted.folder and wanted.digest in ("", held.digest)


def statuses_of(
    wanted: Iterable[WantedAdapter], before: Iterable[AdapterStatus], reading: Reading, workers: Workers
) -> list[AdapterStatus]:
    """Of what is wanted, and of what still has to be unloaded."""
    by_name, before = {one.name: one for one in wanted}, list(before)
    pinned = {one.name for one in before if one.pinned}
    leaving = [one for one in before if one.name not in by_name and _stays(one, reading)]
    # What has been listed stays listed, as it may be loaded; others are listed once there is room.
    listed = {one.name for one in before}
    shown = sorted(by_name, key=lambda name: (name not in listed, name))[: MAX_LISTED - len(leaving)]
    most = max(1, min(MAX_FAILED, MAX_FAILED_IN_ALL // max(1, _failing(reading))))
    return [
        *(_status(by_name[name], reading, workers, pinned=name in pinned, most_failed=most) for name in sorted(shown)),
        *(_leaving(one, reading, workers, most_failed=most) for one in leaving),
    ]


def _failing(reading: Reading) -> int:
    """Adapters that some worker has failed to load or to unload."""
    names = {name for name, failure in reading.failures.items() if failure.workers}
    return len(names | {name for name, held in (reading.held or {}).items() if held.failed})


def _stays(one: AdapterStatus, reading: Reading) -> bool:
    """Whether a removed adapter is, or may be, still registered or announced."""
    return reading.held is None or one.name in reading.held or one.name in reading.announced


def _status(one: WantedAdapter, reading: Reading, workers: Workers, *, pinned: bool, most_failed: int) -> AdapterStatus:
    held = (reading.held or {}).get(one.name)
    failure = _failure(reading, one.name, one)
    state: AdapterState = "Loaded" if _is_held(one, held) else "Pending" if failure is None else "Failed"
    message = failure.message if failure is not None else ""
    if state == "Pending":
        message = reading.problem or ("it is being loaded" if workers else "no worker is ready")
    return AdapterStatus(
        name=one.name,
        source=one.folder,
        model_adapter=one.model_adapter,
        digest=held.digest if held is not None else "",
        state=state,
        pinned=bool(reading.pinned_on[one.name]) if one.name in reading.pinned_on else pinned,
        prefill=_count(held, workers, "prefill"),
        decode=_count(held, workers, "decode"),
        message=_cut(message, MAX_MESSAGE),
        failed=_failed(failure, held, most_failed),
        failed_workers=_failures(failure, held),
    )


def _leaving(one: AdapterStatus, reading: Reading, workers: Workers, *, most_failed: int) -> AdapterStatus:
    held, failure = (reading.held or {}).get(one.name), _failure(reading, one.name, None)
    return AdapterStatus(
        name=one.name,
        source=one.source,
        model_adapter=one.model_adapter,
        digest=one.digest,
        state="Unloading",
        prefill=_count(held, workers, "prefill"),
        decode=_count(held, workers, "decode"),
        message=_cut(failure.message if failure is not None else reading.problem, MAX_MESSAGE),
        failed=_failed(failure, None, most_failed),
        failed_workers=_failures(failure, None),
    )


def _failure(reading: Reading, name: str, wanted: WantedAdapter | None) -> Failure | None:
    """Of the last command, if that was about the same."""
    found = reading.failures.get(name)
    return found if found is not None and found.wanted == wanted else None


def _count(held: HeldAdapter | None, workers: Workers, role: RoleName) -> int:
    """Ready workers of a role that have it in memory."""
    return 0 if held is None else sum(of == role for name, of in workers.items() if name in held.workers)


def _failures(failure: Failure | None, held: HeldAdapter | None) -> int:
    """Workers that have failed, named or not: of the last command, or of loads for requests if these are more."""
    of_command = 0 if failure is None else max(failure.failures, len(failure.workers))
    return max(of_command, 0 if held is None else max(held.failures, len(held.failed)))


def _failed(failure: Failure | None, held: HeldAdapter | None, most: int) -> list[FailedWorker]:
    """Of the last command, then of loads for requests."""
    of_command = failure.workers if failure is not None else {}
    of_requests = held.failed if held is not None else {}
    further = ((name, reason) for name, reason in sorted(of_requests.items()) if name not in of_command)
    shown = [*sorted(of_command.items()), *further][:most]
    return [FailedWorker(name=name, reason=_cut(reason, MAX_REASON)) for name, reason in shown]


def _cut(text: str, most: int) -> str:
    """The beginning of `text`, of at most `most` bytes of JSON: a character takes one to six of them.

    Halves of surrogate pairs, which JSON may escape and UTF-8 does not have, become question marks.
    """
    cut = text[:most].encode("utf-8", "replace").decode("utf-8")
    while (size := len(msgspec.json.encode(cut)) - 2) > most:
        cut = cut[: len(cut) * most // size]
    return cut
