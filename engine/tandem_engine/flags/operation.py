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
        help="seconds after which a step that has not come back counts as hung: stacks, queues and pages are written "
        f"down and the worker falls silent, so that it is restarted (default {scheduler.watchdog_timeout:g})",
    )
    group.add_argument(
        "--crash-dump-folder",
        default="",
        metavar="DIR",
        help="where the state of a hang is written, one file per engine (default: to its log)",
    )
    group.add_argument(
        "--torch-profiler-dir",
        default="",
        metavar="DIR",
        help="allow traces of running steps on demand (`tandem ctl profile`), written here as Chrome traces",
    )


def operation_config(args: argparse.Namespace) -> OperationConfig:
    return OperationConfig(torch_profiler_dir=args.torch_profiler_dir, crash_dump_folder=args.crash_dump_folder)
