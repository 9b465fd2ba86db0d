"""`tandem kernels`: compile the kernels of CPU engines in advance, list them, delete what is not used."""

import argparse
import subprocess
import sys

from tandem_services.cli.flags import model_folder

EXAMPLES = """\
examples:
  tandem kernels build                                       for the bundled model
  tandem kernels build --model ~/qwen3-0.6b --dtype bfloat16
  tandem kernels list --missing                              what the next start would compile
  TANDEM_CACHE_DIR=/srv/cache tandem kernels build           into a folder that others read by TANDEM_KERNELS_PATH
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "kernels",
        help="compile kernels of CPU engines in advance",
        description="An engine on a CPU compiles kernels for the shapes of its model the first time. These commands "
        "compile them in advance, for images and shared folders, list them, and delete those that are not used.",
        epilog=EXAMPLES,
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    build = actions.add_parser("build", help="compile what is missing", description="Compile what is missing.")
    _add_engine(build)
    build.set_defaults(run=run, action="build")
    listed = actions.add_parser(
        "list", help="list a model's kernels", description="List a model's kernels. Status 1 if one is missing."
    )
    _add_engine(listed)
    listed.add_argument("--missing", action="store_true", help="only those that are in no file")
    listed.set_defaults(run=run, action="list")
    prune = actions.add_parser(
        "prune",
        help="delete what is not used",
        description="Delete kernels that were not used for 30 days, and the ones used longest ago beyond 512 MiB.",
    )
    prune.set_defaults(run=run, action="prune")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH", help="checkpoint directory (default: the bundled model)")
    parser.add_argument("--dtype", metavar="DTYPE", help="as of `tandem up` (default: float32 for the bundled model)")
    parser.add_argument("--kv-cache-dtype", metavar="DTYPE", help="as of `tandem up`")


def run(args: argparse.Namespace) -> int:
    """In a process of the engine, which has torch and numba."""
    command = [sys.executable, "-m", "tandem_engine.cli", "kernels", args.action]
    if args.action != "prune":
        dtype = args.dtype or ("float32" if args.model is None else None)
        command += ["--model", str(model_folder(args.model))]
        command += [] if dtype is None else ["--dtype", dtype]
        command += [] if args.kv_cache_dtype is None else ["--kv-cache-dtype", args.kv_cache_dtype]
        command += ["--missing"] if args.action == "list" and args.missing else []
    return subprocess.run(command, check=False).returncode
