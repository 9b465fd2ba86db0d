"""`GET /v1/adapters` of the admin port: what workers have under which names, page by page.

GET /v1/adapters?limit=N&after=LAST_ID ─▶ {object: "list", data: [...], last_id, has_more}

In the order of model, name and digest, so pages are consistent while adapters come and go. A page is bounded in
adapters, and each adapter in the workers that it names: a fleet may have hundreds of either.
"""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem_services.common.errors import bad_request
from tandem_services.gateway.http.monitoring_routes import json_response
from tandem_services.gateway.models.adapters import HeldAdapter
from tandem_services.gateway.models.catalog import ModelCatalog

MAX_LIMIT = 100
"""Adapters of a page, also by default."""

MAX_WORKERS = 64
"""That are named of an adapter."""

MAX_FAILED = 8
"""The same with failed loads, whose reasons may be long."""

DIGEST_CHARACTERS = 32


class AdapterPage(msgspec.Struct, kw_only=True):
    """A part of the list."""

    data: list[HeldAdapter]
    last_id: str
    """Of the page's last adapter; "" of an empty page."""
    has_more: bool
    object: Literal["list"] = "list"


def adapter_list(models: ModelCatalog, request: Request) -> Response:
    """Raises `ApiError` 400 for a `limit` or an `after` that is none."""
    limit, after = _limit(request.query_params.get("limit")), _place(request.query_params.get("after"))
    held = [each for service in models for each in service.model.adapters.held(service.model.name)]
    rest = sorted((each for each in held if after is None or each.place > after), key=lambda each: each.place)
    page = [_shortened(each) for each in rest[:limit]]
    return json_response(
        AdapterPage(data=page, last_id=page[-1].id if page else "", has_more=len(rest) > limit),
    )


def _shortened(adapter: HeldAdapter) -> HeldAdapter:
    """With the first `MAX_WORKERS` and `MAX_FAILED` workers, by id."""
    failed = dict(sorted(adapter.failed.items())[:MAX_FAILED])
    return msgspec.structs.replace(adapter, workers=adapter.workers[:MAX_WORKERS], failed=failed)


def _limit(text: str | None) -> int:
    if text is None:
        return MAX_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LIMIT)) and 1 <= int(text) <= MAX_LIMIT):
        raise bad_request(f"limit: expected a number from 1 to {MAX_LIMIT}", "limit")
    return int(text)


def _place(text: str | None) -> tuple[str, str, str] | None:
    """In the list, of an id."""
    if text is None:
        return None
    named, _, digest = text.rpartition("@")
    model, colon, name = named.rpartition(":")
    if not colon or len(digest) != DIGEST_CHARACTERS:
        raise bad_request("after: expected the last_id of a page", "after")
    return model, name, digest
