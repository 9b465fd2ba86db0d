"""The files of examples/ that run Tandem on one machine: the unit of systemd and the compose file."""

import configparser
import shlex
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
UNIT = EXAMPLES / "systemd/tandem.service"
COMPOSE = EXAMPLES / "compose/compose.yaml"


def unit() -> configparser.ConfigParser:
    """Keys keep their case."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(UNIT.read_text())
    return parser


def unit_command(state: Path) -> list[str]:
    """Words of ExecStart after the program, with `state` for %S."""
    return shlex.split(unit()["Service"]["ExecStart"].replace("%S", str(state)))[1:]


def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())
