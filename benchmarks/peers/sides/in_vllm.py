"""vLLM's `LLM` in a process of its own, asked in lines (`peers.lines`)."""

from typing import Any

from peers.lines import Batch, Generate, serve


def load(start: dict[str, Any]) -> tuple[Generate, Any]:
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        start["model"],
        dtype=start["dtype"],
        max_model_len=start["context"],
        max_num_seqs=start["streams"],
        max_num_batched_tokens=2048,
        enforce_eager=True,  # compiled, it takes minutes to start here
        enable_prefix_caching=True,
        seed=0,
    )

    def generate(batch: Batch) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in batch]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in batch], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, lambda: {"vllm": vllm.__version__}


if __name__ == "__main__":
    serve(load)
