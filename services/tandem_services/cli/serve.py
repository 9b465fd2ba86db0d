"""`tandem serve [MODEL]`: `tandem up` with what suits one machine.

One worker that does both prefill and decode, so that weights are in memory once. With two GPUs a prefill and a decode
worker, each on its own.
"""

import argparse
import sys
from pathlib import Path

from tandem_engine.config.flags import add_engine_flags
from tandem_services.cli import up
from tandem_services.cli.entry import teach
from tandem_services.cli.parsing.flag_table import Sources
from tandem_services.common.settings import read_settings

COMMON = (
    *("--served-model-name", "--host", "--port", "--api-keys", "--offline"),
    *("--dtype", "--quantization", "--device", "--context-length", "--kv-cache-gib", "--config", "--print-config"),
)
"""Flags that `--help` shows."""

EXAMPLES = """\
examples:
  tandem serve                                the bundled model
  tandem serve Qwen/Qwen3-0.6B                a model of the Hugging Face hub, downloaded once
  tandem serve Qwen/Qwen3-0.6B@v1.0 --offline a branch, tag or commit, from the cache alone
  tandem serve ~/my-model --dtype bfloat16    a checkpoint directory
  tandem serve --prefill 1 --decode 1         prefill and decode in separate workers
"""

GPU_FILES = "nvidia[0-9]*"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model on this machine",
        description="Download MODEL if it is not on this machine, and serve it by an OpenAI-compatible API until "
        "Ctrl-C: as `tandem up`, with one worker, or with two on two GPUs.",
        epilog=EXAMPLES,
    )
    up.add_up_flags(parser, operand=True, workers=(None, None, None))
    add_engine_flags(parser)
    teach(parser, common=COMMON, check=check, plan=describe, sources=Sources(names_models=True))
    parser.set_defaults(run=run, devices=())


def check(args: argparse.Namespace) -> None:
    """As `up.check`, after workers and devices are chosen. Raises `ConfigError`."""
    choose_workers(args, gpus=visible_gpus())
    up.check(args)


def describe(args: argparse.Namespace) -> str:
    """For --dry-run. Raises `ConfigError`, `StartupError`."""
    choose_workers(args, gpus=visible_gpus())
    return up.describe(args)


def run(args: argparse.Namespace) -> int:
    gpus = visible_gpus()
    choose_workers(args, gpus=gpus)
    if gpus and args.device == "cpu":
        print("tandem: a GPU is here: --device cuda uses it", file=sys.stderr, flush=True)
    return up.run(args)


def choose_workers(args: argparse.Namespace, *, gpus: int) -> None:
    """Complete the numbers of workers, and give each of two its own GPUs."""
    counts = (args.prefill, args.decode, args.both)
    if any(count is not None for count in counts):
        args.prefill, args.decode, args.both = (count or 0 for count in counts)
        return
    ranks = args.tensor_parallel_size
    if args.device == "cuda" and gpus >= 2 * ranks:
        args.prefill, args.decode, args.both = 1, 1, 0
        args.devices = ("cuda:0", f"cuda:{ranks}")
        return
    args.prefill, args.decode, args.both = 0, 0, 1


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that a process started here sees, from the files of the driver and CUDA_VISIBLE_DEVICES."""
    present = sum(1 for _ in devices.glob(GPU_FILES))
    visible = read_settings().cuda_visible_devices
    return present if visible is None else min(present, len([name for name in visible.split(",") if name.strip()]))
