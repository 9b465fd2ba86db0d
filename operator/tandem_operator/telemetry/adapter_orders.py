"""Commands about adapters to a gateway, and the names that it has registered.

The gateway sends the ids of workers once, and of each adapter the set of their places there: adapters with equal sets
share one here, too, so 256 adapters on 1,000 workers are 256 numbers. Gateways of former releases send a list for each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlencode

import httpx
import msgspec

from tandem_operator.planning.adapters import MAX_FAILED, MAX_MESSAGE, Command, HeldAdapter, Load
from tandem_operator.telemetry.pods import ADMIN_PORT, ANSWER_S, PodSeen
from tandem_operator.telemetry.worker_control import ModelAt, OrderFailedError, get_with_token, post_order

LIST, LOAD, UNLOAD = "/operator/adapters", "/operator/adapters/load", "/operator/adapters/unload"
ANNOUNCE = "/operator/adapters/announce"

COMMAND_S = 1900.0
"""More than a gateway gives its workers: a large adapter may come from a slow disk."""

MAX_NAMES = 2048
MAX_TEXT = 512
MAX_WORKERS = 1 << 16

_Text = Annotated[str, msgspec.Meta(max_length=8192)]
_Workers = Annotated[list[_Text], msgspec.Meta(max_length=MAX_WORKERS)]
_Bits = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]*$", max_length=MAX_WORKERS // 4)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_WORKERS)]


class _Registered(msgspec.Struct):
    name: _Text
    digest: _Text
    folder: _Text
    workers: _Workers = []
    held: _Bits = ""
    """Places in the table, in place of `workers`."""
    failed: dict[_Text, _Text] = {}
    """None from gateways of former releases, as all that follows."""
    failures: _Count = 0


class _Names(msgspec.Struct):
    adapters: Annotated[list[_Registered], msgspec.Meta(max_length=MAX_NAMES)]
    table: _Workers = []
    announced: Annotated[list[_Text], msgspec.Meta(max_length=MAX_NAMES)] | None = None


class _Report(msgspec.Struct):
    done: bool
    message: str = ""
    failed: dict[str, str] = {}
    failures: _Count = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayAdapters:
    """What a gateway has registered."""

    held: Mapping[str, HeldAdapter]
    """By name."""
    announced: frozenset[str] | None
    """Names that its requests wait for; None: it takes no announcements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """What became of a command."""

    done: bool
    message: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Reason by pod; at most `MAX_FAILED`."""
    failures: int = 0
    """Number of pods that have failed."""


async def registered_adapters(
    client: httpx.AsyncClient, gateway: PodSeen, token: str, *, model: ModelAt | None = None
) -> GatewayAdapters:
    """`model`: one of several that the gateway serves. Raises `OrderFailedError`."""
    fields = {"workers": "table"} | ({} if model is None else model.fields)
    path = f"{LIST}?{urlencode(fields)}"
    answer = await get_with_token(client, gateway, ADMIN_PORT, path, token=token, within_s=ANSWER_S)
    try:
        names = msgspec.convert(answer, _Names)
    except msgspec.ValidationError as error:
        raise OrderFailedError(f"pod {gateway.name} answered {LIST} with something else: {error}") from error
    sets: dict[str, frozenset[str]] = {}
    held = {
        one.name: HeldAdapter(
            digest=one.digest,
            folder=one.folder,
            workers=_workers(one, names.table, sets),
            failed=_some(one.failed),
            failures=max(one.failures, len(one.failed)),
        )
        for one in names.adapters
    }
    return GatewayAdapters(held=held, announced=None if names.announced is None else frozenset(names.announced))


def _workers(one: _Registered, table: Sequence[str], sets: dict[str, frozenset[str]]) -> frozenset[str]:
    """Ids; `sets` has those of equal places, so that adapters which all workers have share one set."""
    if not one.held:
        return frozenset(one.workers)
    if one.held not in sets:
        bits = reversed(f"{int(one.held, 16):b}")
        sets[one.held] = frozenset(worker for worker, bit in zip(table, bits, strict=False) if bit == "1")
    return sets[one.held]


def _some(failed: Mapping[str, str]) -> dict[str, str]:
    return {name: reason[:MAX_TEXT] for name, reason in sorted(failed.items())[:MAX_FAILED]}


async def announce(
    client: httpx.AsyncClient, gateway: PodSeen, token: str, names: Iterable[str], *, model: ModelAt | None = None
) -> None:
    """Requests of these names, and of no others that are not registered, wait. Raises `OrderFailedError`."""
    body: dict[str, Any] = {"lora_names": sorted(names)}
    body |= {} if model is None else model.fields
    await post_order(client, gateway, ADMIN_PORT, ANNOUNCE, body, token=token, within_s=ANSWER_S)


async def send_command(
    client: httpx.AsyncClient, gateway: PodSeen, token: str, command: Command, *, model: ModelAt | None = None
) -> CommandResult:
    """A gateway that is silent is a failure, too. May be repeated. `model`: as `registered_adapters`."""
    path, body = _request(command)
    body |= {} if model is None else model.fields
    try:
        answer = await post_order(client, gateway, ADMIN_PORT, path, body, token=token, within_s=COMMAND_S)
        report = msgspec.convert(answer, _Report)
    except (OrderFailedError, msgspec.ValidationError) as error:
        return CommandResult(done=False, message=str(error)[:MAX_TEXT])
    return CommandResult(
        done=report.done,
        message=report.message[:MAX_MESSAGE],
        failed=_some(report.failed),
        failures=max(report.failures, len(report.failed)),
    )


def _request(command: Command) -> tuple[str, dict[str, Any]]:
    if isinstance(command, Load):
        wanted = command.wanted
        body = {"lora_name": wanted.name, "lora_path": wanted.folder, "digest": command.digest}
        return LOAD, {**body, "pinned": wanted.pinned}
    return UNLOAD, {"lora_name": command.name}
