"""Flags of vLLM and SGLang that have another name here, need none, or name what is not supported.

Flags that have the same name here are not listed. docs/from-vllm-and-sglang.md is the page about them.
"""

from collections.abc import Container

EQUIVALENT: dict[str, tuple[str, ...]] = {
    "--model-path": ("--model",),
    "--model-name": ("--served-model-name",),
    "--api-key": ("--api-keys",),
    "--admin-api-key": ("--api-keys",),
    "--tensor-parallel": ("--tensor-parallel-size",),
    "--max-seq-len": ("--context-length",),
    "--max-model-length": ("--context-length",),
    "--max-seq-len-to-capture": ("--cuda-graph-max-bs",),
    "--cudagraph-capture-sizes": ("--cuda-graph-bs",),
    "--cuda-graph-sizes": ("--cuda-graph-bs",),
    "--max-cudagraph-capture-size": ("--cuda-graph-max-bs",),
    "--enforce-eager": ("--disable-cuda-graph",),
    "--no-enable-prefix-caching": ("--disable-radix-cache",),
    "--no-enable-chunked-prefill": ("--chunked-prefill-size",),
    "--max-num-partial-prefills": ("--max-prefill-tokens",),
    "--max-total-tokens": ("--num-pages",),
    "--num-gpu-blocks-override": ("--num-pages",),
    "--kv-cache-memory-bytes": ("--kv-cache-gib",),
    "--cpu-offload-gb": ("--hicache-size", "--swap-space"),
    "--kv-offloading-size": ("--hicache-size", "--swap-space"),
    "--guided-decoding-backend": ("--grammar-backend",),
    "--structured-outputs-config": ("--grammar-backend",),
    "--speculative-config": ("--speculative-algorithm",),
    "--speculative-model": ("--speculative-draft-model-path",),
    "--num-speculative-tokens": ("--speculative-num-draft-tokens",),
    "--kv-transfer-config": ("--role", "--prefill"),
    "--disaggregation-mode": ("--role", "--prefill"),
    "--disaggregation-transfer-backend": ("--transport",),
    "--distributed-init-method": ("--dist-init-addr",),
    "--master-addr": ("--dist-init-addr",),
    "--data-parallel-size": ("--both",),
    "--dp-size": ("--both",),
    "--dp": ("--both",),
    "--allowed-host": ("--allowed-hosts",),
    "--admin-api-port": ("--admin-port",),
    "--collect-detailed-traces": ("--otlp-traces-endpoint",),
    "--enable-trace": ("--otlp-traces-endpoint",),
    "--oltp-traces-endpoint": ("--otlp-traces-endpoint",),
    "--profiler-config": ("--torch-profiler-dir",),
    "--crash-dump-folder-path": ("--crash-dump-folder",),
    "--dist-timeout-seconds": ("--dist-timeout",),
    "--load-balance-method": ("--router-policy",),
    "--policy": ("--router-policy",),
    "--max-queue-size": ("--max-waiting-requests",),
    "--numa-bind": ("--cpu-affinity",),
    "--numa-node": ("--cpu-affinity",),
}
"""Their flag → flags here with the same meaning; a parser has the first, or another command has it."""

_DETECTED = "is not needed: it is on"

NOT_NEEDED: dict[str, str] = {
    "--enable-auto-tool-choice": "is not needed: the format of tool calls is detected; --tool-call-parser overrides it",
    "--enable-reasoning": "is not needed: the format of reasoning is detected; --reasoning-parser overrides it",
    "--enable-prefix-caching": f"{_DETECTED}; --disable-radix-cache turns it off",
    "--enable-chunked-prefill": f"{_DETECTED}; --chunked-prefill-size is its size",
    "--enable-mixed-chunk": f"{_DETECTED}; --disable-mixed-chunk turns it off",
    "--enable-metrics": f"{_DETECTED}: /metrics",
    "--enable-cache-report": f"{_DETECTED}: usage has cached_tokens",
    "--enable-prompt-tokens-details": f"{_DETECTED}: usage has cached_tokens",
    "--async-scheduling": f"{_DETECTED}; --disable-overlap-schedule turns it off",
    "--tokenizer": "is not needed: a checkpoint's folder has its tokenizer",
    "--tokenizer-path": "is not needed: a checkpoint's folder has its tokenizer",
    "--chat-template": "is not needed: a checkpoint's folder has its chat template",
    "--worker-use-ray": "is not needed: there is no Ray; see --nnodes",
    "--distributed-executor-backend": "is not needed: ranks are processes; see --nnodes",
    "--uvicorn-log-level": "is not needed: TANDEM_LOG_LEVEL sets the level",
    "--log-level": "is not needed: TANDEM_LOG_LEVEL sets the level",
}

NOT_SUPPORTED: dict[str, str] = {
    **dict.fromkeys(
        (
            "--enable-lora",
            "--lora-modules",
            "--lora-paths",
            "--max-loras",
            "--max-lora-rank",
            "--max-cpu-loras",
            "--max-loras-per-batch",
            "--fully-sharded-loras",
            "--lora-dtype",
            "--lora-backend",
        ),
        "LoRA adapters",
    ),
    **dict.fromkeys(("--pipeline-parallel-size", "--pp-size", "--pp"), "pipeline parallelism"),
    **dict.fromkeys(
        ("--enable-expert-parallel", "--ep-size", "--ep", "--expert-parallel-size", "--enable-eplb", "--eplb-config"),
        "expert parallelism",
    ),
    **dict.fromkeys(
        ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--enable-multimodal", "--allowed-local-media-path"),
        "images and audio",
    ),
    **dict.fromkeys(("--trust-remote-code", "--logits-processors"), "code of checkpoints and clients"),
    "--enable-custom-logit-processor": "code of checkpoints and clients",
    "--is-embedding": "a server of embeddings alone: every model has /v1/embeddings",
    "--hf-overrides": "changes of config.json by a flag: edit the file",
    "--json-model-override-args": "changes of config.json by a flag: edit the file",
    "--rope-scaling": "changes of config.json by a flag: edit the file",
    "--enable-sleep-mode": "sleep",
    "--enable-memory-saver": "sleep",
    "--ssl-keyfile": "TLS of the API: put a proxy or an Ingress before it",
    "--ssl-certfile": "TLS of the API: put a proxy or an Ingress before it",
    "--root-path": "a path before the API's: a proxy can add it",
}

LISTED = frozenset((*EQUIVALENT, *NOT_NEEDED, *NOT_SUPPORTED))


def about_other_engine(flag: str, known: Container[str]) -> str | None:
    """What to write instead of a flag of vLLM or SGLang; "" where these flags have no equivalent; None: not theirs.

    `known`: the flags that the parser in question has.
    """
    if flag in NOT_NEEDED:
        return f"{flag} of vLLM and SGLang {NOT_NEEDED[flag]}"
    if flag in NOT_SUPPORTED:
        return f"{flag} of vLLM and SGLang: not supported here: {NOT_SUPPORTED[flag]}"
    if flag not in EQUIVALENT:
        return None
    ours = next((name for name in EQUIVALENT[flag] if name in known), None)
    return "" if ours is None else f"{flag} of vLLM and SGLang is {ours} here"
