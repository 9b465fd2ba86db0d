"""Speculative decoding: who guesses, how many tokens, and when not."""

import argparse

from tandem_engine.config import SpecAlgorithm, SpecConfig
from tandem_engine.flags.values import non_negative_int, positive_int


def add_speculative_flags(parser: argparse.ArgumentParser) -> None:
    spec = SpecConfig()
    group = parser.add_argument_group(
        "speculative decoding", "Guess tokens cheaply and verify several in one step. Never changes an output."
    )
    group.add_argument(
        "--speculative-algorithm",
        choices=[algorithm.value for algorithm in SpecAlgorithm],
        help="who guesses: NGRAM repeats what followed the same words before (best where outputs quote their "
        "input); DRAFT asks a smaller model; EAGLE a head trained on this model's hidden states (default: nobody)",
    )
    group.add_argument(
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        default=spec.draft_model_path,
        metavar="PATH",
        help="checkpoint folder for DRAFT, a model with the same tokenizer, or for EAGLE, a head",
    )
    group.add_argument(
        "--speculative-num-draft-tokens",
        type=positive_int,
        default=spec.num_draft_tokens,
        metavar="N",
        help=f"guesses per request and step at most (default {spec.num_draft_tokens}); fewer where few are right",
    )
    group.add_argument(
        "--ngram-prompt-lookup-min",
        type=positive_int,
        default=spec.prompt_lookup_min,
        metavar="N",
        help=f"tokens that must repeat before NGRAM guesses (default {spec.prompt_lookup_min})",
    )
    group.add_argument(
        "--ngram-prompt-lookup-max",
        type=positive_int,
        default=spec.prompt_lookup_max,
        metavar="N",
        help=f"tokens by which NGRAM picks the best of several repetitions (default {spec.prompt_lookup_max})",
    )
    group.add_argument(
        "--speculative-disable-by-batch-size",
        type=non_negative_int,
        default=spec.disable_by_batch_size,
        metavar="N",
        help="no guesses in steps with more running requests than this; 0 is no bound (default 0)",
    )
    group.add_argument(
        "--speculative-disable-adaptive",
        action="store_true",
        help="always guess the greatest number, however few are right",
    )


def speculative_config(args: argparse.Namespace) -> SpecConfig:
    algorithm = args.speculative_algorithm
    return SpecConfig(
        algorithm=None if algorithm is None else SpecAlgorithm(algorithm),
        draft_model_path=args.speculative_draft_model_path,
        num_draft_tokens=args.speculative_num_draft_tokens,
        prompt_lookup_min=args.ngram_prompt_lookup_min,
        prompt_lookup_max=args.ngram_prompt_lookup_max,
        disable_by_batch_size=args.speculative_disable_by_batch_size,
        adaptive=not args.speculative_disable_adaptive,
    )
