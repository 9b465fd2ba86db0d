"""`tandem doctor`: whether Tandem can serve on this machine, and what to do where it cannot."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.release import product_version
from tandem_engine.config.flags import host_address
from tandem_services.cli.doctor import processor, resources, services, software
from tandem_services.cli.doctor.finding import Check, Finding, Machine, Status, run_all
from tandem_services.cli.flags import add_redis, port_number
from tandem_services.cli.run_dir import listed_logs
from tandem_services.cli.runs import state_folder
from tandem_services.common.errors import StartupError
from tandem_services.common.settings import all_variables

EXAMPLES = """\
examples:
  tandem doctor                                  what to mend before `tandem up`; status 1 if something must be
  tandem doctor --json | jq .checks
  tandem doctor --bundle report.tar.gz           for a report: findings, settings, ends of logs, no prompts or secrets
  tandem doctor --redis-url redis://10.0.0.5:6379/0
"""

_MARK = {Status.OK: "ok  ", Status.WARN: "warn", Status.FAIL: "FAIL"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="find what keeps Tandem from serving on this machine",
        description="Check Python, packages, CPU, kernels, memory, disks, limits, GPU, Redis, NIXL, port and model "
        "cache. Nothing is changed. Exit status 1 if a check fails.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="FILE",
        help="also write FILE (tar.gz): findings, settings and the ends of logs, without prompts and secrets",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="where `tandem up` keeps keys and logs (default: all of this user's)",
    )
    parser.add_argument(
        "--host", type=host_address, default=LOOPBACK, help="address that the API will have (default: %(default)s)"
    )
    parser.add_argument("--port", type=port_number, default=8000, help="port of the API (default: 8000)")
    add_redis(parser, required=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    variables = all_variables()
    checks = all_checks(args, Machine(variables=variables))
    findings = run_all(checks)
    document = as_json(checks, findings)
    print(document if args.json else as_text(checks, findings))
    if args.bundle is not None:
        _bundle(args, document, variables)
    return 1 if any(finding.status is Status.FAIL for finding in findings) else 0


def all_checks(args: argparse.Namespace, machine: Machine) -> list[Check]:
    """In the order in which they are shown."""
    from tandem_services.common.redis_client import RedisAddress

    redis = RedisAddress(url=args.redis_url, password_file=args.redis_password_file) if args.redis_url else None
    cache = machine.variables.get("XDG_CACHE_HOME") or str(Path(machine.variables.get("HOME", "/")) / ".cache")
    folders = (
        ("run folder", args.run_dir or state_folder(), "--run-dir DIR, or XDG_STATE_HOME"),
        ("cache folder", Path(cache), "XDG_CACHE_HOME=DIR with a folder of this user"),
        ("temporary folder", Path(tempfile.gettempdir()), "TMPDIR=DIR with a folder of this user"),
    )
    return [
        *software.checks(machine),
        *processor.checks(machine),
        *resources.checks(machine, folders),
        *services.checks(machine, host=args.host, port=args.port, redis=redis),
    ]


def as_json(checks: Sequence[Check], findings: Sequence[Finding]) -> str:
    rows = [{"name": check.name, **asdict(finding)} for check, finding in zip(checks, findings, strict=True)]
    return json.dumps({"version": product_version(), "checks": rows}, indent=1)


def as_text(checks: Sequence[Check], findings: Sequence[Finding]) -> str:
    lines = []
    for check, finding in zip(checks, findings, strict=True):
        lines.append(f"{_MARK[finding.status]}  {check.name:<16}  {finding.fact}")
        if finding.fix:
            lines.append(f"{'':<24}fix: {finding.fix}")
    return "\n".join(lines)


def _bundle(args: argparse.Namespace, document: str, variables: Mapping[str, str]) -> None:
    from tandem_services.cli.doctor.bundle import write_bundle

    folders = [args.run_dir] if args.run_dir is not None else sorted(state_folder().glob("*/"))
    logs = [log for folder in folders for log in listed_logs(folder) if os.access(log, os.R_OK)]
    try:
        write_bundle(args.bundle, findings=document, variables=variables, logs=logs)
    except OSError as error:
        raise StartupError(f"cannot write --bundle {args.bundle}: {error.strerror}") from error
    print(f"tandem: wrote {args.bundle}", file=sys.stderr)
