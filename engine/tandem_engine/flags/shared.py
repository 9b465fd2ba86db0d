"""Flags that more than one command has: how a model is held, and where it runs."""

import argparse

from tandem_engine.config import DEVICES, KvCacheDtype, ModelImpl


def add_model_impl_flag(parser: argparse._ActionsContainer) -> None:
    """Add `--model-impl`, which `verify` has too."""
    parser.add_argument(
        "--model-impl",
        choices=[impl.value for impl in ModelImpl],
        default=ModelImpl.AUTO.value,
        help="model implementation. tandem: fast, for llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2 and "
        "gemma3_text; transformers: slower, for any causal model whose attention goes through transformers' "
        "attention interface; auto: tandem where it supports the architecture (default: auto)",
    )


def add_device_flag(parser: argparse._ActionsContainer) -> None:
    """Add `--device`, which `verify` has too."""
    parser.add_argument(
        "--device",
        type=device_name,
        default="cpu",
        metavar="{cpu,cuda,cuda:N}",
        help="device of the model: cuda is the first visible GPU; several ranks use consecutive GPUs, "
        "starting with this one (default: cpu)",
    )


def device_name(text: str) -> str:
    """argparse type: a device that engines run on."""
    if not DEVICES.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return text


def add_kv_cache_dtype_flag(parser: argparse._ActionsContainer) -> None:
    """`--kv-cache-dtype`, for every command that has a KV cache."""
    parser.add_argument(
        "--kv-cache-dtype",
        choices=[kind.value for kind in KvCacheDtype],
        default=KvCacheDtype.AUTO.value,
        help="dtype of KV pages; fp8, the same as fp8_e4m3, holds twice the tokens of bfloat16 and uses the scales of "
        "the checkpoint, if it has any; auto: the model's dtype (default: auto)",
    )
