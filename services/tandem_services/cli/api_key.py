"""The API key that commands send: from the environment, or from a flag that is taken off the process's title.

`ps` shows everybody what is on a command line. So a key that came in on one is overwritten there as soon as it is read;
it was visible until then, and a shell may remember it. Better ways are the two variables.
"""

import argparse
import ctypes
import re
import sys
from pathlib import Path

from tandem_engine.errors import ConfigError
from tandem_services.common.settings import read_settings

_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_ARG_START, _ARG_END = 45, 46
"""Of the fields of /proc/PID/stat behind the name: 48 and 49 of proc(5)."""


def add_api_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="sent as a bearer token (default: TANDEM_API_KEY, then OPENAI_API_KEY, which no list of processes shows)",
    )


def key_headers(args: argparse.Namespace) -> dict[str, str]:
    """What requests carry; nothing without a key. Raises `ConfigError` for one that cannot be sent, not showing it."""
    if args.api_key is not None:
        hide_argument(args.api_key)
    key = args.api_key or read_settings().api_key
    if key is None:
        return {}
    if _KEY.fullmatch(key) is None:
        raise ConfigError("--api-key, TANDEM_API_KEY or OPENAI_API_KEY: a key has 1 to 512 visible ASCII characters")
    return {"Authorization": f"Bearer {key}"}


def hide_argument(secret: str) -> None:
    """Overwrite `secret` on the command line of this process, where Linux shows it to others. Elsewhere do nothing."""
    if not sys.platform.startswith("linux") or not secret:
        return
    fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    start, length = int(fields[_ARG_START]), int(fields[_ARG_END]) - int(fields[_ARG_START])
    if start == 0 or length <= 0:
        return
    sought = secret.encode(sys.getfilesystemencoding(), "surrogateescape")
    shown = ctypes.string_at(start, length)
    at = shown.find(sought)
    while at >= 0:
        ctypes.memset(start + at, ord("*"), len(sought))
        at = shown.find(sought, at + len(sought))
