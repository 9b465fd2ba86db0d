"""Flags of vLLM and SGLang that have another name here, are not needed, or have no equivalent.

Names and meanings are those of vLLM 0.33 and SGLang 0.5.23, and some of older releases of vLLM, which are marked. Flags
that have the same name here are not listed. docs/from-vllm-and-sglang.md is the page about them.
"""

import re
from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Equivalent:
    """What to write in place of a flag, for the commands that have `flag`."""

    flag: str
    text: str = ""
    """A clause that follows "is"; "": the flag alone."""

    def __str__(self) -> str:
        return self.text or f"{self.flag} here"


_REPLICAS = Equivalent("--both", "a number of workers here: --prefill, --decode or --both")
_ROLES = (
    Equivalent("--role", "--role here"),
    Equivalent("--prefill", "not needed here: --prefill and --decode are numbers of workers, with KV transfer"),
)
_TRANSPORT = "--transport here, nixl or none"

EQUIVALENT: dict[str, tuple[Equivalent, ...]] = {
    "--model-path": (Equivalent("--model"),),
    "--api-key": (Equivalent("--api-keys", "--api-keys FILE here, with the entries that `tandem keys create` prints"),),
    "--admin-api-key": (Equivalent("--api-keys", "an entry with admin in the file of --api-keys here"),),
    "--cudagraph-capture-sizes": (Equivalent("--cuda-graph-bs"),),
    "--cuda-graph-bs-decode": (Equivalent("--cuda-graph-bs"),),
    "--max-cudagraph-capture-size": (Equivalent("--cuda-graph-max-bs"),),
    "--cuda-graph-max-bs-decode": (Equivalent("--cuda-graph-max-bs"),),
    "--prefill-attention-backend": (Equivalent("--attention-backend"),),
    "--enforce-eager": (Equivalent("--disable-cuda-graph"),),
    "--disable-decode-cuda-graph": (Equivalent("--disable-cuda-graph"),),
    "--no-enable-prefix-caching": (Equivalent("--disable-radix-cache"),),
    "--no-async-scheduling": (Equivalent("--disable-overlap-schedule"),),
    "--max-total-tokens": (Equivalent("--num-pages", "--num-pages here, in pages of --page-size tokens"),),
    "--num-gpu-blocks-override": (Equivalent("--num-pages"),),
    "--device-memory-utilization": (Equivalent("--mem-fraction-static"),),
    "--kv-cache-memory-bytes": (Equivalent("--kv-cache-gib", "--kv-cache-gib here, in GiB or as in 4GiB"),),
    "--kv-offloading-size": (Equivalent("--hicache-size", "--enable-hierarchical-cache with --hicache-size here"),),
    "--enable-hicache": (Equivalent("--enable-hierarchical-cache"),),
    "--hicache-storage-backend": (Equivalent("--hicache-storage-dir", "--hicache-storage-dir DIR here, for files"),),
    "--guided-decoding-backend": (Equivalent("--grammar-backend"),),  # older
    "--structured-outputs-config": (Equivalent("--grammar-backend"),),
    "--speculative-config": (Equivalent("--speculative-algorithm", "--speculative-algorithm and related flags here"),),
    "--spec-method": (Equivalent("--speculative-algorithm"),),
    "--spec-model": (Equivalent("--speculative-draft-model-path"),),
    "--speculative-model": (Equivalent("--speculative-draft-model-path"),),  # older
    "--spec-tokens": (Equivalent("--speculative-num-draft-tokens"),),
    "--num-speculative-tokens": (Equivalent("--speculative-num-draft-tokens"),),  # older
    "--enable-priority-scheduling": (Equivalent("--schedule-policy", "--schedule-policy priority here"),),
    "--lora-paths": (Equivalent("--lora-modules"),),
    "--max-loras-per-batch": (Equivalent("--max-loras"),),
    "--max-loaded-loras": (Equivalent("--max-cpu-loras"),),
    "--base-gpu-id": (Equivalent("--device", "--device cuda:N here"),),
    "--distributed-timeout-seconds": (Equivalent("--dist-timeout"),),
    "--master-addr": (Equivalent("--role", "--dist-init-addr HOST:PORT here"),),
    "--master-port": (Equivalent("--role", "--dist-init-addr HOST:PORT here"),),
    "--shutdown-timeout": (Equivalent("--drain-timeout"), Equivalent("--grace")),
    "--load-balance-method": (Equivalent("--router-policy"),),
    "--profiler-config": (Equivalent("--torch-profiler-dir"),),
    "--data-parallel-size": (_REPLICAS,),
    "--dp-size": (_REPLICAS,),
    "--kv-transfer-config": _ROLES,
    "--disaggregation-mode": _ROLES,
    "--disaggregation-transfer-backend": (Equivalent("--role", _TRANSPORT), Equivalent("--prefill", _TRANSPORT)),
    "--enable-trace": (Equivalent("--otlp-traces-endpoint", "not needed here: --otlp-traces-endpoint enables traces"),),
    "--no-enable-chunked-prefill": (
        Equivalent("--chunked-prefill-size", "not possible here: --chunked-prefill-size is the size of a chunk"),
    ),
    "--enable-auto-tool-choice": (
        Equivalent("--tool-call-parser", "not needed here: --tool-call-parser is auto by default"),
    ),
    "--enable-prefix-caching": (
        Equivalent("--disable-radix-cache", "not needed here: it is on without --disable-radix-cache"),
    ),
    "--enable-chunked-prefill": (
        Equivalent("--chunked-prefill-size", "not needed here: it is on, and --chunked-prefill-size is its size"),
    ),
    "--enable-mixed-chunk": (
        Equivalent("--disable-mixed-chunk", "not needed here: it is on without --disable-mixed-chunk"),
    ),
    "--speculative-adaptive": (
        Equivalent(
            "--speculative-disable-adaptive", "not needed here: it is on without --speculative-disable-adaptive"
        ),
    ),
    "--async-scheduling": (
        Equivalent("--disable-overlap-schedule", "not needed here: it is on without --disable-overlap-schedule"),
    ),
}
"""Their flag → what to write here; the first counts whose flag the command has."""

NOT_NEEDED: dict[str, str] = {
    "--enable-metrics": "/metrics is always there",
    "--enable-cache-report": "usage has cached_tokens",
    "--enable-prompt-tokens-details": "usage has cached_tokens",
    "--tokenizer": "the checkpoint's folder has its tokenizer",
    "--tokenizer-path": "the checkpoint's folder has its tokenizer",
    "--chat-template": "the checkpoint's folder has its chat template, in chat_template.jinja",
    "--use-ray": "ranks are processes",
    "--distributed-executor-backend": "ranks are processes",
    "--uvicorn-log-level": "TANDEM_LOG_LEVEL is the level of all logs",
    "--log-level": "TANDEM_LOG_LEVEL is the level of all logs",
}

_REMOTE_CODE = "Python code of checkpoints and clients"
_CONFIG_CHANGES = "changes of config.json by a flag (edit the file)"
_TLS = "TLS of the API (put a proxy or an Ingress before it)"
_PREFIX = "a path prefix of the API (a proxy can remove it)"

NOT_SUPPORTED: dict[str, str] = {
    "--cpu-offload-gb": "weights in host memory",
    "--pipeline-parallel-size": "pipeline parallelism",
    "--pp-size": "pipeline parallelism",
    "--trust-remote-code": _REMOTE_CODE,
    "--logits-processors": _REMOTE_CODE,
    "--enable-custom-logit-processor": _REMOTE_CODE,
    "--hf-overrides": _CONFIG_CHANGES,
    "--json-model-override-args": _CONFIG_CHANGES,
    "--rope-scaling": _CONFIG_CHANGES,  # older
    "--enable-sleep-mode": "sleep",
    "--enable-memory-saver": "sleep",
    "--root-path": _PREFIX,
    "--fastapi-root-path": _PREFIX,
    "--seed": "a seed of the server (a request has its own)",
    "--random-seed": "a seed of the server (a request has its own)",
    "--is-embedding": "a server of embeddings alone (every model has /v1/embeddings)",
}

NO_EQUIVALENT = frozenset(
    """
    --allowed-methods --attention-data-parallel-size --c128-page-size --config-format --cuda-graph-backend-prefill
    --decode-attention-backend --mm-attention-backend --speculative-draft-attention-backend
    --cuda-graph-max-seq-len-prefill --dbo-prefill-token-threshold --dcp-size --debug-cuda-graph --device-ids
    --disable-cuda-graph-padding --dwdp-size --enable-cudagraph-gc --enable-dbo --enable-profile-cuda-graph
    --hicache-storage-prefetch-policy --hicache-storage-prefetch-retry-max-attempts
    --long-prefill-token-threshold-adaptive --mamba-backend --mamba-block-size --mamba-cache-dtype --max-log-len
    --max-logprobs --max-num-active-seqs --max-num-queued-reqs --max-num-queued-tokens --max-num-scheduled-tokens
    --quantization-config --reasoning-parser-plugin --soft-watchdog-timeout --speculative-attention-mode
    --speculative-draft-model-quantization --speculative-draft-model-revision --speculative-draft-sink-size
    --speculative-draft-window-size --speculative-num-steps --trace-modules
    """.split()
)
"""Their flags that resemble flags here and mean something else: no hint is right for them."""

_FAMILIES = (
    (re.compile(r"\blora|-loras?\b"), "this setting of LoRA adapters"),
    (re.compile(r"^--(mm-|limit-mm-|enable-mm-|enable-multimodal$|allowed-local-media-path$)"), "images and audio"),
    (re.compile(r"^--(ep|ep-.+|(enable-)?expert-parallel(-size)?|(enable-)?eplb(-.+)?)$"), "expert parallelism"),
    (re.compile(r"^--(ssl-.+|enable-ssl-refresh)$"), _TLS),
)


def about_other_engine(flag: str, known: Container[str]) -> str | None:
    """What to write instead of a flag of vLLM or SGLang; "" where this command has no equivalent; None: not theirs.

    `known`: the flags of the command.
    """
    if flag in NO_EQUIVALENT:
        return ""
    flag = flag.partition(".")[0]  # vLLM takes --structured-outputs-config.backend, too
    if flag in EQUIVALENT:
        ours = next((str(each) for each in EQUIVALENT[flag] if each.flag in known), None)
        return "" if ours is None else f"{flag} of vLLM or SGLang is {ours}"
    if flag in NOT_NEEDED:
        return f"{flag} of vLLM or SGLang is not needed here: {NOT_NEEDED[flag]}"
    what = NOT_SUPPORTED.get(flag) or next((what for names, what in _FAMILIES if names.search(flag)), None)
    return None if what is None else f"{flag} of vLLM or SGLang is not supported here: {what}"
