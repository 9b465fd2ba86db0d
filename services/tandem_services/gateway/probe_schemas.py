"""Answers of the routes for operators."""

from importlib.metadata import version
from typing import Literal

import msgspec


class Live(msgspec.Struct, kw_only=True):
    status: Literal["ok"] = "ok"


class Load(msgspec.Struct, kw_only=True):
    """vLLM's name for the requests that are being answered, those that wait for a worker among them."""

    server_load: int


class Version(msgspec.Struct, kw_only=True):
    version: str


VERSION = version("tandem")
