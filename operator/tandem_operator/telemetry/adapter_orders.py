"""Commands about adapters to a gateway, and the names that it has registered."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlencode

import httpx
import msgspec

from tandem_operator.planning.adapters import Command, HeldAdapter, Load
from tandem_operator.telemetry.pods import ADMIN_PORT, ANSWER_S, PodSeen
from tandem_operator.telemetry.worker_control import ModelAt, OrderFailedError, get_with_token, post_order

LIST, LOAD, UNLOAD = "/operator/adapters", "/operator/adapters/load", "/operator/adapters/unload"

COMMAND_S = 1900.0
"""More than a gateway gives its workers: a large adapter may come from a slow disk."""

MAX_NAMES = 2048
MAX_TEXT = 512

_Text = Annotated[str, msgspec.Meta(max_length=8192)]


class _Registered(msgspec.Struct):
    name: _Text
    digest: _Text
    folder: _Text
    workers: list[_Text]
    failed: dict[_Text, _Text] = {}
    """None from gateways of former releases."""


class _Names(msgspec.Struct):
    adapters: Annotated[list[_Registered], msgspec.Meta(max_length=MAX_NAMES)]


class _Report(msgspec.Struct):
    done: bool
    message: str = ""
    failed: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """What became of a command."""

    done: bool
    message: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Reason by pod."""


async def registered_adapters(
    client: httpx.AsyncClient, gateway: PodSeen, token: str, *, model: ModelAt | None = None
) -> dict[str, HeldAdapter]:
    """By name. `model`: one of several that the gateway serves. Raises `OrderFailedError`."""
    path = LIST if model is None else f"{LIST}?{urlencode(model.fields)}"
    answer = await get_with_token(client, gateway, ADMIN_PORT, path, token=token, within_s=ANSWER_S)
    try:
        names = msgspec.convert(answer, _Names)
    except msgspec.ValidationError as error:
        raise OrderFailedError(f"pod {gateway.name} answered {LIST} with something else: {error}") from error
    return {
        one.name: HeldAdapter(digest=one.digest, folder=one.folder, workers=frozenset(one.workers), failed=one.failed)
        for one in names.adapters
    }


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
    return CommandResult(done=report.done, message=report.message, failed=report.failed)


def _request(command: Command) -> tuple[str, dict[str, Any]]:
    if isinstance(command, Load):
        wanted = command.wanted
        body = {"lora_name": wanted.name, "lora_path": wanted.folder, "digest": command.digest}
        return LOAD, {**body, "pinned": wanted.pinned}
    return UNLOAD, {"lora_name": command.name}
