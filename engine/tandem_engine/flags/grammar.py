"""Structured output."""

import argparse

from tandem_engine.config import GrammarConfig
from tandem_engine.flags.values import positive_int


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    grammar = GrammarConfig()
    group = parser.add_argument_group("structured output")
    group.add_argument(
        "--grammar-backend",
        choices=("llguidance", "none"),
        default=grammar.backend,
        help="backend that constrains outputs to a JSON schema, regex or grammar; none rejects such requests (default: "
        "llguidance)",
    )
    group.add_argument(
        "--grammar-compile-timeout",
        type=float,
        default=grammar.compile_timeout,
        metavar="S",
        help="CPU seconds that one grammar may take to compile before it is rejected (default: "
        f"{grammar.compile_timeout:g})",
    )
    group.add_argument(
        "--grammar-cache-size",
        type=positive_int,
        default=grammar.cache_size,
        metavar="N",
        help=f"compiled grammars kept for later requests (default: {grammar.cache_size})",
    )


def grammar_config(args: argparse.Namespace) -> GrammarConfig:
    return GrammarConfig(
        backend=args.grammar_backend,
        compile_timeout=args.grammar_compile_timeout,
        cache_size=args.grammar_cache_size,
    )
