"""`tandem accuracy`: the loss of accuracy from fewer bits, on a text. Runs the engine's own command in a process."""

import argparse
import subprocess
import sys

from tandem_engine.environment import set_default
from tandem_engine.flags import accuracy_argv, add_accuracy_flags
from tandem_services.cli.bundled import model_folder

EXAMPLES = """\
examples:
  tandem accuracy                                  the bundled model: float32, bfloat16, fp8 KV
  tandem accuracy --model ~/llama --device cuda --baseline-dtype bfloat16 --dtype bfloat16
  tandem accuracy --dtype bfloat16 --quantization auto int8 --kv-cache-dtype auto fp8
  tandem accuracy --model ~/llama --compare ~/llama-awq --kv-cache-dtype auto --text notes.txt
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "accuracy",
        help="measure the loss of accuracy from fewer bits of weights and KV",
        description="Predict every token of a text from the previous ones, with a model and with variants of it: "
        "weights and KV of other dtypes, quantized checkpoints. Report for each the perplexity, the KL divergence "
        "from the baseline (mean and maximum, in nats) and how often both have the same most likely token. Nothing "
        "is downloaded; the engine computes.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--model", metavar="PATH", help="checkpoint directory (default: the bundled model)")
    add_accuracy_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Each of many small engines would log the use of its memory.
    set_default("TANDEM_LOG_LEVEL", "warning")
    argv = [sys.executable, "-m", "tandem_engine.cli", "accuracy", "--model", str(model_folder(args.model))]
    return subprocess.run([*argv, *accuracy_argv(args)], check=False).returncode
