"""`python -m tandem_lab`: the commands of the lab that compute, each in a process of its own.

verify   compare with transformers, token by token
bench    offline throughput and latency against transformers
accuracy what fewer bits of weights and KV cost, on a text
"""

import argparse
import sys
from collections.abc import Sequence

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.environment import read_environment
from tandem_engine.base.errors import ConfigError, EngineError
from tandem_engine.base.extras import full_disk, missing_extra
from tandem_engine.base.logs import LogFormat, configure_logging
from tandem_engine.cli import exit_now
from tandem_engine.config import KvCacheDtype, ModelImpl, Quantization
from tandem_engine.config.flags import (
    add_device_flag,
    add_kv_cache_dtype_flag,
    add_model_impl_flag,
    host_address,
    non_negative_int,
    positive_int,
)
from tandem_lab.cli.accuracy import add_accuracy_flags


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tandem_lab", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_verify(commands)
    _add_bench(commands)
    _add_accuracy(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = build_parser().parse_args(argv)
    configure_logging(LogFormat.PLAIN, level=read_environment().level)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        return 3
    except (ModuleNotFoundError, OSError) as error:
        sentence = missing_extra(error) if isinstance(error, ModuleNotFoundError) else full_disk(error)
        if sentence is None:
            raise
        print(f"tandem: error: {sentence}", file=sys.stderr)
        return 3


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("verify", help="compare with transformers", allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="PATH")
    add_model_impl_flag(parser)
    add_device_flag(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_kv_cache_dtype_flag(parser)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", type=positive_int, metavar="N")
    parser.add_argument("--host", type=host_address, default=LOOPBACK)
    parser.add_argument("--adapter", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from tandem_lab.verify.command import run_verify

    return run_verify(
        args.model,
        impl=ModelImpl(args.model_impl),
        device=args.device,
        dtype=args.dtype,
        kv_dtype=KvCacheDtype(args.kv_cache_dtype),
        quick=args.quick,
        as_json=args.json,
        tp_size=args.tensor_parallel_size,
        host=args.host,
        adapters=args.adapter,
    )


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("bench", help="offline benchmark", allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="PATH")
    for name, default in (("num-prompts", 64), ("input-len", 256), ("output-len", 96), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=positive_int, default=default, metavar="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=non_negative_int, default=0, metavar="N")
    parser.add_argument("--skip-reference", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    from tandem_lab.bench.offline import BenchOptions, run_bench

    return run_bench(
        BenchOptions(
            model_path=args.model,
            num_prompts=args.num_prompts,
            input_len=args.input_len,
            output_len=args.output_len,
            rounds=args.rounds,
            dtype=args.dtype,
            threads=args.threads,
            skip_reference=args.skip_reference,
            as_json=args.json,
        )
    )


def _add_accuracy(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("accuracy", help="perplexity and KL divergence on a text", allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="PATH")
    add_accuracy_flags(parser)
    parser.set_defaults(run=_accuracy)


def _accuracy(args: argparse.Namespace) -> int:
    from tandem_lab.accuracy import AccuracyOptions, run_accuracy

    return run_accuracy(
        AccuracyOptions(
            model_path=args.model,
            baseline_dtype=args.baseline_dtype,
            dtypes=tuple(args.dtype),
            kv_dtypes=tuple(map(KvCacheDtype, args.kv_cache_dtype)),
            quantizations=tuple(map(Quantization, args.quantization)),
            compared=tuple(args.compare),
            text=args.text,
            tokens=args.tokens,
            window=args.window,
            device=args.device,
            threads=args.threads,
            as_json=args.json,
        )
    )


if __name__ == "__main__":
    exit_now(main())
