"""`tandem verify`: compare with transformers, token by token. Runs the engine's own command in a process."""

import argparse
import subprocess
import sys

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.environment import set_default
from tandem_engine.config.flags import (
    add_device_flag,
    add_kv_cache_dtype_flag,
    add_model_impl_flag,
    host_address,
    positive_int,
)
from tandem_services.cli.flags import model_folder

EXAMPLES = """\
examples:
  tandem verify                      the bundled model, every path
  tandem verify --quick              a subset of one minute
  tandem verify --model ~/qwen3-0.6b --json
  tandem verify --dtype bfloat16     logprobs within a bound of those of transformers
  tandem verify --kv-cache-dtype fp8   compares paths with each other: transformers has no such KV
  tandem verify --adapter sql --adapter chat   two LoRA adapters next to the model alone
  TANDEM_LOG_LEVEL=info tandem verify   with the engines' logs
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "verify",
        help="verify that greedy output equals transformers on a checkpoint",
        description="Generate the same prompts with transformers and with Tandem on every path (whole, chunked, "
        "prefix-cached, mixed, retracted, overlap on and off, page sizes 1/16/64, disaggregated over NIXL, several "
        "ranks). In float32 compare token by token, and logprobs within 1e-4; if they differ, within twice the largest "
        "error of transformers in float32 against float64. In bfloat16 compare logprobs within "
        "twice the largest error of transformers in bfloat16 against float32. Exit status 1 at the first "
        "difference, 4 if a path was not exercised (the other paths run). Paths that engines of the model reject at "
        "start, such as a draft model that keeps states, are left out and named.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--model", metavar="PATH", help="checkpoint directory (default: the bundled model)")
    add_model_impl_flag(parser)
    add_device_flag(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of Tandem's computation (default: %(default)s)",
    )
    add_kv_cache_dtype_flag(parser)
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="FOLDER",
        help="LoRA adapter of the model, as PEFT saves it; repeat for several. Outputs of the model alone and of every "
        "adapter are computed in the same batches and compared with transformers",
    )
    parser.add_argument("--quick", action="store_true", help="fewer prompts and paths")
    parser.add_argument(
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
        type=positive_int,
        metavar="N",
        help="ranks in the tensor-parallel paths; 1 skips them (default: 2 if the model can be divided by 2)",
    )
    parser.add_argument(
        "--host",
        type=host_address,
        default=LOOPBACK,
        help="loopback address for engines that exchange KV; ::1 for IPv6 (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    argv = [sys.executable, "-m", "tandem_lab", "verify", "--model", str(model_folder(args.model))]
    argv += ["--model-impl", args.model_impl, "--device", args.device]
    argv += ["--dtype", args.dtype, "--kv-cache-dtype", args.kv_cache_dtype]
    argv += ["--tensor-parallel-size", str(args.tensor_parallel_size)] if args.tensor_parallel_size else []
    argv += ["--host", args.host]
    argv += [f"--adapter={folder}" for folder in args.adapter]
    argv += ["--quick"] if args.quick else []
    argv += ["--json"] if args.json else []
    # Steps are made to fail and memory to run short on purpose: what an engine logs of it does not matter here.
    set_default("TANDEM_LOG_LEVEL", "critical")
    return subprocess.run(argv, check=False).returncode
