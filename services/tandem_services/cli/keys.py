"""`tandem keys`: API keys and the entries of a key file that let them in. Needs no server."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tandem_engine.errors import ConfigError
from tandem_engine.flags import positive_int
from tandem_services.common.errors import StartupError

EXAMPLES = """\
examples:
  tandem keys create search --requests-per-minute 600 --tokens-per-minute 200000 --file keys.json
                                               a new key on stderr, once; its entry in the file
  tandem keys create search                    the entry on stdout, for a file that you write
  tandem keys hash < key.txt                   the digest of a key that you have
  tandem keys check /etc/tandem/keys           read a key file, or a mounted Secret, as a gateway would

The key file is JSON: {"keys": [ENTRY, …]}. docs/limits.md describes every field.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "keys",
        help="create, hash and check API keys",
        description="Make API keys for `tandem gateway --api-keys`, and check the file that lets them in.",
        epilog=EXAMPLES,
    )
    orders = parser.add_subparsers(dest="order", metavar="ORDER", required=True)
    create = orders.add_parser("create", help="make a key: it goes to stderr, its entry to --file or stdout")
    create.add_argument("name", metavar="NAME", help="of the tenant: in logs, metrics and Redis")
    create.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="key file that gets the entry; it is made where there is none (default: the entry goes to stdout)",
    )
    for limit, what in (
        ("requests-per-minute", "POST requests"),
        ("tokens-per-minute", "prompt and output tokens"),
        ("concurrency", "requests at once"),
    ):
        create.add_argument(f"--{limit}", type=positive_int, metavar="N", help=f"{what} (default: no limit)")
    create.add_argument(
        "--model",
        dest="models",
        action="append",
        metavar="NAME",
        help="that it may use; may be given several times (default: all)",
    )
    create.add_argument("--admin", action="store_true", help="it may use administrators' routes")
    orders.add_parser("hash", help="read a key from stdin and print its digest")
    check = orders.add_parser("check", help="list the tenants of a key file; exit status 1 when it is no good")
    check.add_argument("path", type=Path, metavar="PATH", help="file, or folder of .json files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    match args.order:
        case "create":
            return _create(args)
        case "hash":
            return _hash()
        case _:
            return _check(args.path)


def _create(args: argparse.Namespace) -> int:
    import msgspec

    from tandem_services.gateway.access.api_key import digest_of, new_key
    from tandem_services.gateway.access.tenants import Tenant

    key = new_key()
    asked = {name: getattr(args, name) for name in ("requests_per_minute", "tokens_per_minute", "concurrency")}
    asked |= {"models": args.models, "admin": args.admin or None}
    entry = {"name": args.name, "sha256": [digest_of(key)]} | {k: v for k, v in asked.items() if v is not None}
    try:
        msgspec.convert(entry, Tenant)
    except msgspec.ValidationError as error:
        raise ConfigError(f"no gateway would take this entry: {error}") from error
    if args.file is None:
        print(json.dumps(entry))
    else:
        _add_entry(args.file, entry)
    print(f"key of {args.name}, shown only now: {key}", file=sys.stderr)
    return 0


def _add_entry(path: Path, entry: dict[str, Any]) -> None:
    """All of the new file or none of it is there at any time: a gateway may follow it.

    Raises `ConfigError` for a file that cannot be read or written, or that no gateway would take afterwards.
    """
    from tandem_services.gateway.access.key_file import KeyFileError, parse_keys

    path = path.resolve()
    there = path.exists()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        before = path.read_bytes() if there else b'{"keys": []}'
        if there:
            parse_keys({path.name: before})
        content = json.dumps({"keys": [*json.loads(before)["keys"], entry]}, indent=1).encode() + b"\n"
        parse_keys({path.name: content})
        partial.write_bytes(content)
        partial.chmod(path.stat().st_mode & 0o777 if there else 0o600)
        partial.replace(path)
    except KeyFileError as error:
        raise ConfigError(f"--file {error}") from error
    except OSError as error:
        raise ConfigError(f"--file {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _hash() -> int:
    from tandem_services.gateway.access.api_key import digest_of

    key = sys.stdin.readline().strip()
    if not key:
        raise StartupError("no key on stdin")
    print(digest_of(key))
    return 0


def _check(path: Path) -> int:
    from tandem_services.gateway.access.key_file import KeyFileError
    from tandem_services.gateway.access.key_watch import read_keys

    try:
        ring = read_keys(path)
    except KeyFileError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    print(json.dumps({tenant.name: len(tenant.sha256) for tenant in ring.tenants}))
    return 0
