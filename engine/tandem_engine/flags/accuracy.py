"""Flags of `tandem accuracy`."""

import argparse
from pathlib import Path

from tandem_engine.config import KvCacheDtype, Quantization
from tandem_engine.flags.argv import given_again
from tandem_engine.flags.shared import add_device_flag
from tandem_engine.flags.values import non_negative_int, positive_int


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
