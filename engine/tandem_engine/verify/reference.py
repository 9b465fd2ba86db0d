"""What transformers generates: the truth that every path of Tandem must reproduce."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceOutput:
    """Greedy continuation of one prompt, with the logprob of each chosen token."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ignore_eos: bool


class TransformersReference:
    """`AutoModelForCausalLM` in float32, eager attention, one prompt at a time."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], max_tokens: int, eos_token_ids: frozenset[int], *, ignore_eos: bool
    ) -> ReferenceOutput:
        """Greedy tokens up to and including the first EOS unless that is ignored, at most `max_tokens`."""
        tokens: list[int] = []
        logprobs: list[float] = []
        inputs, cache = torch.tensor([list(prompt)]), None
        while len(tokens) < max_tokens:
            out = self._model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            row = torch.log_softmax(out.logits[0, -1].float(), dim=-1)
            token = int(row.argmax())
            tokens.append(token)
            logprobs.append(float(row[token]))
            if token in eos_token_ids and not ignore_eos:
                break
            inputs, cache = torch.tensor([[token]]), out.past_key_values
        return ReferenceOutput(
            prompt=tuple(prompt), token_ids=tuple(tokens), logprobs=tuple(logprobs), ignore_eos=ignore_eos
        )
