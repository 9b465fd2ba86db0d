"""Answers of the routes for operators."""

from importlib.metadata import version
from typing import Literal

import msgspec


class Live(msgspec.Struct, kw_only=True):
    status: Literal["ok"] = "ok"


class Version(msgspec.Struct, kw_only=True):
    version: str


VERSION = version("tandem")
