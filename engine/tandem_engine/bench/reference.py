"""transformers `generate` on the same jobs: left-padded batches sorted by output length, its best case."""

from collections.abc import Sequence

import torch

from tandem_engine.bench.workload import Job


class TransformersBaseline:
    """`AutoModelForCausalLM` with its default (SDPA) attention."""

    def __init__(self, model_path: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, local_files_only=True).eval()
        # Output lengths are forced, so that both sides do the same work.
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        """Generate each job's tokens, in order; everything in one batch run to the longest output."""
        width = max(len(job.prompt) for job in jobs)
        longest = max(job.output_len for job in jobs)
        ids = torch.zeros(len(jobs), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
        return [tuple(row[width : width + job.output_len].tolist()) for row, job in zip(out, jobs, strict=True)]
