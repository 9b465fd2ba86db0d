"""What an operator may ask of a running engine, and what it leaves behind."""

import argparse

from tandem_engine.config import OperationConfig, SchedulerConfig
from tandem_engine.flags.values import positive_float


def add_operation_flags(parser: argparse.ArgumentParser) -> None:
    scheduler = SchedulerConfig()
    group = parser.add_argument_group("operation")
    group.add_argument(
        "--watchdog-timeout",
        type=positive_float,
        default=scheduler.watchdog_timeout,
        metavar="S",
        help="seconds after which a step counts as hung. The engine then writes stacks, queues and pages, and stops "
        f"responding, so that it is restarted (default: {scheduler.watchdog_timeout:g})",
    )
    group.add_argument(
        "--crash-dump-folder",
        default="",
        metavar="DIR",
        help="directory for the state of a hung engine, one file per engine (default: the engine's log)",
    )
    group.add_argument(
        "--torch-profiler-dir",
        default="",
        metavar="DIR",
        help="directory for Chrome traces of `tandem ctl profile` (default: profiling is disabled)",
    )


def operation_config(args: argparse.Namespace) -> OperationConfig:
    return OperationConfig(torch_profiler_dir=args.torch_profiler_dir, crash_dump_folder=args.crash_dump_folder)
