"""Flags that several commands have in common."""

import argparse


def add_log_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format", choices=("plain", "json"), default="plain", help="log lines for people or for machines"
    )
