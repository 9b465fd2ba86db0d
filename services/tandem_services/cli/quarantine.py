"""`tandem quarantine`: requests that gateways refuse because they kill workers; see and clear them."""

import argparse
import asyncio
import json

from tandem_services.cli.flags import add_cluster, add_curve_keys, add_redis
from tandem_services.common.errors import StartupError

TIMEOUT_S = 5.0

EXAMPLES = """\
examples:
  tandem quarantine list                       digests and remaining seconds
  tandem quarantine clear 5f0c…                serve this one again
  tandem quarantine clear --all

A digest stands for a prompt and its parameters; the gateway's log has it with the request id.
Gateways follow within a second.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "quarantine",
        help="list or clear requests that are rejected because workers crashed on them",
        description="List or clear requests that the gateways of a deployment reject: two workers crashed on them.",
        epilog=EXAMPLES,
    )
    add_redis(parser, required=True)
    add_cluster(parser)
    add_curve_keys(parser, "without it, the quarantine of a deployment without a key file is shown")
    orders = parser.add_subparsers(dest="order", metavar="ORDER", required=True)
    orders.add_parser("list", help="print a JSON object: digest → seconds left")
    clear = orders.add_parser("clear", help="serve requests again; exit status 1 if there was none")
    which = clear.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "digest", nargs="?", metavar="DIGEST", help="digest of the request, as in `list` and the gateway's log"
    )
    which.add_argument("--all", action="store_true", help="every one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from tandem_engine.ipc.keys import KeyPair
    from tandem_services.common.redis_client import RedisAddress, RedisClient, RedisUnavailableError
    from tandem_services.router.deployment import Deployment
    from tandem_services.router.keys import Keys
    from tandem_services.router.shared_state import QuarantineBoard

    address = RedisAddress(url=args.redis_url, password_file=args.redis_password_file)
    client = RedisClient(address, timeout_s=TIMEOUT_S)
    keys = None if args.curve_keys is None else KeyPair.load(args.curve_keys)
    board = QuarantineBoard(client=client, keys=Keys(args.cluster, Deployment.of(keys).namespace))
    try:
        if args.order == "list":
            print(json.dumps({digest: round(left) for digest, left in (await board.digests()).items()}))
            return 0
        cleared = await board.clear(None if args.all else args.digest)
        print(json.dumps({"cleared": cleared}))
        return 0 if cleared else 1
    except RedisUnavailableError as error:
        raise StartupError(f"cannot use Redis at {address}: {error}") from error
    finally:
        await client.close()
