"""transformers in a process of its own, asked in lines (`peers.lines`).

`generate`: one left-padded batch run to its longest output, as its users do. `continuous`: its continuous batching,
with a manager for each batch, as `generate_batch` makes one.
"""

import os
from typing import Any

from peers.lines import Batch, Generate, serve

os.environ["HF_HUB_OFFLINE"] = "1"


def load(start: dict[str, Any]) -> tuple[Generate, Any]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(start["threads"])
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(start["model"], dtype=getattr(torch, start["dtype"])).eval()
    model.generation_config.eos_token_id = None

    def generate(batch: Batch) -> list[list[int]]:
        with torch.inference_mode():
            return continuous(model, batch) if start["continuous"] else padded(model, batch)

    return generate, lambda: {"transformers": transformers.__version__, "torch": torch.__version__}


def padded(model: Any, batch: Batch) -> list[list[int]]:
    import torch

    width, longest = max(len(prompt) for prompt, _ in batch), max(length for _, length in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(batch):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    forced = {"max_new_tokens": longest, "min_new_tokens": longest, "do_sample": False, "pad_token_id": 0}
    out = model.generate(input_ids=ids, attention_mask=mask, **forced)
    return [row[width : width + length].tolist() for row, (_, length) in zip(out, batch, strict=True)]


def continuous(model: Any, batch: Batch) -> list[list[int]]:
    from transformers import GenerationConfig

    longest = max(length for _, length in batch)
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        for number, (prompt, length) in enumerate(batch):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=length)
        outputs: dict[int, list[int]] = {}
        while len(outputs) < len(batch):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the manager stopped")
            if result is not None and result.is_finished():
                outputs[int(result.request_id)] = list(result.generated_tokens)
    finally:
        manager.stop(block=True)
    return [outputs[number] for number in range(len(batch))]


if __name__ == "__main__":
    serve(load)
