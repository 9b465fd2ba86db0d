"""The whole table of an engine's flags: each group of them makes one part of `EngineConfig`."""

import argparse

from tandem_engine.config import OPEN_SETTINGS, EngineConfig, LoadFormat, ModelImpl, Quantization
from tandem_engine.flags.argv import given_again
from tandem_engine.flags.cache import add_cache_flags, cache_config
from tandem_engine.flags.compute import add_compute_flags, cpus_of, graph_config
from tandem_engine.flags.grammar import add_grammar_flags, grammar_config
from tandem_engine.flags.host import add_host_flags
from tandem_engine.flags.operation import add_operation_flags, operation_config
from tandem_engine.flags.parallel import add_parallel_flags, parallel_config
from tandem_engine.flags.scheduler import add_scheduler_flags, scheduler_config
from tandem_engine.flags.speculative import add_speculative_flags, speculative_config
from tandem_engine.flags.transfer import add_transfer_flags, transfer_config


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of `EngineConfig` except the model and the role, in the order in which help shows them."""
    add_compute_flags(parser)
    add_parallel_flags(parser)
    add_cache_flags(parser)
    add_host_flags(parser)
    add_scheduler_flags(parser)
    add_operation_flags(parser)
    add_speculative_flags(parser)
    add_transfer_flags(parser)
    add_grammar_flags(parser)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Build the configuration from parsed flags, `args.model` and `args.role` included.

    Raises `ConfigError` for a combination that cannot work.
    """
    return EngineConfig(
        model_path=args.model,
        model_impl=ModelImpl(args.model_impl),
        load_format=LoadFormat(args.load_format),
        dtype=args.dtype,
        quantization=Quantization(args.quantization),
        device=args.device,
        threads=args.threads,
        cpus=cpus_of(args.cpu_affinity),
        context_length=args.context_length,
        left_open=tuple(name for name in OPEN_SETTINGS if getattr(args, name) is None),
        cache=cache_config(args),
        scheduler=scheduler_config(args),
        disagg=transfer_config(args),
        speculative=speculative_config(args),
        parallel=parallel_config(args),
        grammar=grammar_config(args),
        graphs=graph_config(args),
        operation=operation_config(args),
    )


def engine_argv(args: argparse.Namespace) -> list[str]:
    """The flags again, as arguments for a child process that uses the same table."""
    return given_again(args, add_engine_flags)
