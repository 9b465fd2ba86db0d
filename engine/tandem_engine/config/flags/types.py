"""Types of flags for argparse, and flags that several commands share. Invalid values are rejected by name."""

import argparse
import math
import re
from collections.abc import Callable
from fractions import Fraction

from tandem_engine.base.addresses import AddressError, bare_host
from tandem_engine.base.errors import ConfigError
from tandem_engine.config import DEVICES, KvCacheDtype, ModelImpl

GIB, MIB = 1 << 30, 1 << 20

_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 1 << 10, "Mi": MIB, "Gi": GIB, "Ti": 1 << 40}
"""Prefixes of SI and of IEC. There is no K, which is 1,000 to some programs and 1,024 to others."""

_SIZE = re.compile(r"(?P<number>[0-9]{1,15}(\.[0-9]{1,6})?)(?P<unit>[kMGT]|[KMGT]i)(?P<byte>B?)")


def positive_int(text: str) -> int:
    """argparse type: a whole number of at least 1."""
    value = non_negative_int(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1, got 0")
    return value


def non_negative_int(text: str) -> int:
    """argparse type: decimal digits only; Python's own int() would take ' 5 ' and '1_000'."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """argparse type: a whole number, or one with a suffix: 32k is 32,000 and 32Ki 32,768."""
    sized = _SIZE.fullmatch(text)
    if text.endswith("K"):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}: k is 1,000, Ki is 1,024")
    if sized is None:
        return non_negative_int(text)
    value = Fraction(sized["number"]) * _UNITS[sized["unit"]]
    if sized["byte"] or value.denominator != 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(value)


def positive_count(text: str) -> int:
    """argparse type: as `count`, and at least 1."""
    value = count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1, got 0")
    return value


def gib(text: str) -> float:
    """argparse type: a number of GiB, or a size with its unit such as 512MiB or 4GiB."""
    sized = _SIZE.fullmatch(text)
    if sized is not None:
        return float(_bytes(sized, text) / GIB)
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of GiB or a size such as 4GiB, got {text!r}") from None


def positive_gib(text: str) -> float:
    """argparse type: as `gib`, finite and above 0."""
    sized = _SIZE.fullmatch(text)
    return positive_float(text if sized is None else str(gib(text)))


def mib(text: str) -> int:
    """argparse type: a whole number of MiB, or a size with its unit such as 1GiB."""
    sized = _SIZE.fullmatch(text)
    if sized is None:
        return non_negative_int(text)
    value = _bytes(sized, text) / MIB
    if value.denominator != 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of MiB, got {text!r}")
    return int(value)


def positive_mib(text: str) -> int:
    """argparse type: as `mib`, and at least 1."""
    value = mib(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1, got 0")
    return value


def _bytes(sized: re.Match[str], text: str) -> Fraction:
    if not sized["byte"]:
        raise argparse.ArgumentTypeError(f"must have a unit of bytes, as in {text}B, got {text!r}")
    return Fraction(sized["number"]) * _UNITS[sized["unit"]]


def host_address(text: str) -> str:
    """argparse type: a name or an IP address; brackets around an IPv6 address are taken off."""
    try:
        return bare_host(text)
    except AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_float(text: str) -> float:
    """argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def bytes_of(flag: str, gib: float) -> int:
    """Bytes of a size in GiB. Raises `ConfigError` for what is no size."""
    if not math.isfinite(gib):
        raise ConfigError(f"{flag} must be a finite number of GiB, got {gib}")
    return int(gib * GIB)


def given_again(args: argparse.Namespace, add_flags: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """Arguments by which a parser with `add_flags` comes to what `args` has of it. Defaults are left out."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    argv: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value == action.default:
            continue
        argv.append(action.option_strings[0])
        if isinstance(value, list):
            argv += map(str, value)
        elif action.nargs != 0:
            argv.append(str(value))
    return argv


def add_model_impl_flag(parser: argparse._ActionsContainer) -> None:
    """Add `--model-impl`, which `verify` has too."""
    parser.add_argument(
        "--model-impl",
        choices=[impl.value for impl in ModelImpl],
        default=ModelImpl.AUTO.value,
        help="model implementation. tandem: fast, for the families in docs/models.md; transformers: slower, for any "
        "causal model whose attention goes through transformers' attention interface; auto: tandem where it supports "
        "the architecture (default: auto)",
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
