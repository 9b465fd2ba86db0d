"""`tandem accuracy`: the loss of accuracy from fewer bits, on a text. Runs the engine's own command in a process."""

import argparse
import subprocess
import sys
from pathlib import Path

from tandem_engine.base.environment import set_default
from tandem_engine.config import KvCacheDtype, Quantization
from tandem_engine.config.flags.types import add_device_flag, given_again, non_negative_int, positive_int
from tandem_services.cli.flags import model_folder


def add_accuracy_flags(parser: argparse.ArgumentParser) -> None:
    """All of `tandem accuracy` but the model."""
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="PATH",
        help="further checkpoints of the same vocabulary, such as a quantized one",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to predict (default: a bundled text)")
    parser.add_argument(
        "--tokens",
        type=positive_int,
        default=4096,
        metavar="N",
        help="maximum number of tokens of the text (default: 4096)",
    )
    parser.add_argument(
        "--window", type=positive_int, default=512, metavar="N", help="tokens of one context window (default: 512)"
    )
    parser.add_argument(
        "--baseline-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of weights and KV of the baseline, --model (default: float32)",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=("float32", "bfloat16"),
        default=["float32", "bfloat16"],
        help="dtypes of weights to measure (default: both)",
    )
    parser.add_argument(
        "--quantization",
        nargs="+",
        choices=[kind.value for kind in Quantization],
        default=[Quantization.AUTO.value],
        help="formats of the projections' weights to measure with each dtype: auto (as in the checkpoint, if the "
        "device supports it), dequantize, int8 (default: auto)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=[kind.value for kind in KvCacheDtype],
        default=[KvCacheDtype.AUTO.value, KvCacheDtype.FP8_E4M3.value, KvCacheDtype.FP8_E5M2.value],
        help="dtypes of KV pages to measure with each dtype of weights; auto is that of the weights (default: auto "
        "fp8_e4m3 fp8_e5m2)",
    )
    add_device_flag(parser)
    parser.add_argument(
        "--threads", type=non_negative_int, default=0, metavar="N", help="CPU threads; 0 uses torch's default"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def accuracy_argv(args: argparse.Namespace) -> list[str]:
    """As `engine_argv`."""
    return given_again(args, add_accuracy_flags)


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
    argv = [sys.executable, "-m", "tandem_lab", "accuracy", "--model", str(model_folder(args.model))]
    return subprocess.run([*argv, *accuracy_argv(args)], check=False).returncode
