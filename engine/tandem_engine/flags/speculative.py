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
        help="source of draft tokens. NGRAM: what followed the same tokens earlier (best where outputs quote their "
        "input); DRAFT: a smaller model; EAGLE: a head trained on this model's hidden states (default: no "
        "speculative decoding)",
    )
    group.add_argument(
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        default=spec.draft_model_path,
        metavar="PATH",
        help="checkpoint directory of the draft model (DRAFT, with the same tokenizer) or of the head (EAGLE)",
    )
    group.add_argument(
        "--speculative-num-draft-tokens",
        type=positive_int,
        default=spec.num_draft_tokens,
        metavar="N",
        help="maximum number of draft tokens per request and step; fewer while few are accepted (default: "
        f"{spec.num_draft_tokens})",
    )
    group.add_argument(
        "--ngram-prompt-lookup-min",
        type=positive_int,
        default=spec.prompt_lookup_min,
        metavar="N",
        help=f"minimum number of repeated tokens for NGRAM to draft (default: {spec.prompt_lookup_min})",
    )
    group.add_argument(
        "--ngram-prompt-lookup-max",
        type=positive_int,
        default=spec.prompt_lookup_max,
        metavar="N",
        help="longest repetition, in tokens, that NGRAM compares to select among matches "
        f"(default: {spec.prompt_lookup_max})",
    )
    group.add_argument(
        "--speculative-disable-by-batch-size",
        type=non_negative_int,
        default=spec.disable_by_batch_size,
        metavar="N",
        help="disable drafts in steps with more than N running requests; 0 never disables them (default: 0)",
    )
    group.add_argument(
        "--speculative-disable-adaptive",
        action="store_true",
        help="always draft the maximum number of tokens, even if few are accepted",
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
