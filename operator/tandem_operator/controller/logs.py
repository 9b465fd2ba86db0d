"""Log lines, one event per line, as JSON with the field names of gateways and workers, or as text."""

import logging
import sys
from typing import Literal, TextIO

from pythonjsonlogger.json import JsonFormatter

LogFormat = Literal["json", "plain"]

_FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"
_NAMES = {"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "exception"}
_TIME = "%Y-%m-%dT%H:%M:%S%z"


def configure_logging(log_format: LogFormat, level: str, stream: TextIO | None = None) -> None:
    """Send everything to one handler (stderr by default). Call once, at process start."""
    handler = logging.StreamHandler(stream or sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(_FIELDS, rename_fields=_NAMES, datefmt=_TIME))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # kopf tells of each reconnection, httpx of each request.
    for chatty in ("kopf", "httpx"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
