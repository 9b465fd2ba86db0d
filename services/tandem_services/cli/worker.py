"""`tandem worker`: one worker of a deployment; `tandem up` and the worker pods start this."""

import argparse
import asyncio
from pathlib import Path

from tandem_engine.config import Role
from tandem_engine.flags import add_engine_flags, engine_argv, engine_config, non_negative_int
from tandem_services.cli.bundled import model_folder

EXAMPLES = """\
examples:
  tandem worker --role prefill --redis-url redis://127.0.0.1:6379
  tandem worker --role decode --model ~/llama --dtype bfloat16 --host 10.0.0.7 --curve-keys keys.json
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "worker",
        help="run one prefill, decode or both worker",
        description="Load a checkpoint, register in Redis and serve requests that gateways send. The engine runs in a "
        "child process; this one registers it, sends heartbeats, publishes KV events and answers health checks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="PATH", help="checkpoint folder (default: the bundled model)")
    parser.add_argument("--served-model-name", metavar="NAME", help="name clients use (default: the folder's)")
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=Role.BOTH.value,
        help="what routers use it for (default both)",
    )
    parser.add_argument(
        "--worker-id", metavar="ID", help="stable name, unique in the deployment (default: host name and pid)"
    )
    parser.add_argument("--redis-url", required=True, metavar="URL", help="redis://[user:password@]host:port/db")
    parser.add_argument(
        "--cluster",
        default="default",
        metavar="NAME",
        help="separates deployments in one Redis (default default)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address that gateways and peers reach (default 127.0.0.1)")
    parser.add_argument(
        "--health-port",
        type=non_negative_int,
        default=0,
        metavar="PORT",
        help="/live /ready /metrics /audit; 0 picks a free one",
    )
    parser.add_argument(
        "--curve-keys",
        type=Path,
        metavar="FILE",
        help="key file of the deployment; without it only loopback is served",
    )
    add_engine_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from tandem_services.worker.main import WorkerConfig, run_worker

    args.model = str(model_folder(args.model))
    engine_config(args)  # refuses impossible combinations before a process is started
    return asyncio.run(run_worker(WorkerConfig.from_args(args, engine_argv=tuple(engine_argv(args)))))
