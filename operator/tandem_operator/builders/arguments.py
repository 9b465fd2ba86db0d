"""`args` of a ModelService: flags of `tandem worker` and `tandem gateway` that no field of the spec sets.

    flag            set by                                       in `args`
    field           a field of the spec                          refused, with the field's name
    operator        the operator: addresses, keys, names         refused
    argument        `args` alone                                 passed on
    unusable        nothing in a pod: it ends the command,       refused
                    names a file of settings, or is for tests
    unknown         nothing that this release knows              passed on; the image may be newer than the operator

Each is one word, `--flag` or `--flag=value`, at the end of a command. So neither an order nor a merge of lists can
separate a flag from its value. Words with `$(` or `$$` are refused, because kubelets replace them: a value from a
Secret would be part of the command, and of the error that the status shows. An init container of the same image checks
the whole command before the main container starts (`check_container`), because only the image knows its own flags.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem_operator.api.pods import Resources
from tandem_operator.api.types import RoleName
from tandem_operator.builders.containers import Manifest, resources_of
from tandem_operator.builders.served import Served

CHECK = "check-arguments"
"""The init container."""

CHECK_ONLY = "--check-args"
"""The last argument of that container."""

OF_MODELS = ("servedModelName", "engine.", "autoscaling.", "slo.", "cells")
"""Beginnings of fields of a ModelService that a ModelGateway does not have."""

UNUSABLE = frozenset({"--help", "--help-all", "--config", "--print-config", CHECK_ONLY})
"""Of both commands."""

REPLACED = ("$(", "$$")
"""What kubelets replace in arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagTable:
    """Every flag of one command and what sets it; a test compares it with the command's parser."""

    fields: Mapping[str, str]
    """Field of the spec by flag."""
    operator: frozenset[str]
    """Set by the operator, or not for pods."""
    arguments: frozenset[str]
    aliases: Mapping[str, str]
    """Other names of a flag."""
    unusable: frozenset[str]
    """They end the command, name a file of settings, or are for tests."""
    weights: frozenset[str] = frozenset()
    """Of the arguments: those that decide what weights and KV are. They are part of a revision."""
    repeatable: frozenset[str] = frozenset()
    """Of the arguments: those that add to each other, so that a list may have one several times."""

    def flag_of(self, word: str) -> str:
        """The flag that a word of `args` sets, by its first name. `--no-x` sets `--x`."""
        name = word.partition("=")[0]
        name = self.aliases.get(name, name)
        positive = f"--{name.removeprefix('--no-')}"
        known = positive in self.fields or positive in self.operator or positive in self.arguments
        return positive if name.startswith("--no-") and known else name

    def knows(self, flag: str) -> bool:
        return flag in self.fields or flag in self.operator or flag in self.arguments


WORKER = FlagTable(
    fields={
        "--dtype": "engine.dtype",
        "--kv-cache-dtype": "engine.kvCacheDtype",
        "--quantization": "engine.quantization",
        "--model-impl": "engine.modelImpl",
        "--device": "engine.device",
        "--page-size": "engine.pageSize",
        "--context-length": "engine.contextLength",
        "--tensor-parallel-size": "engine.tensorParallelSize",
        "--nnodes": "engine.nodes",
        "--mem-fraction-static": "engine.memFractionStatic",
        "--kv-cache-gib": "engine.kvCacheGib",
        "--max-running-requests": "engine.maxRunningRequests",
        "--max-queued-requests": "engine.maxQueuedRequests",
        "--chunked-prefill-size": "engine.chunkedPrefillSize",
        "--max-prefill-tokens": "engine.maxPrefillTokens",
        "--max-tokens-per-step": "engine.maxTokensPerStep",
        "--long-prefill-token-threshold": "engine.longPrefillTokenThreshold",
        "--schedule-policy": "engine.schedulePolicy",
        "--preemption-mode": "engine.preemptionMode",
        "--threads": "engine.threads",
        "--speculative-algorithm": "engine.speculation.algorithm",
        "--speculative-draft-model-path": "engine.speculation.draftModelPath",
        "--speculative-num-draft-tokens": "engine.speculation.numDraftTokens",
        "--enable-hierarchical-cache": "engine.hostCache",
        "--hicache-size": "engine.hostCache.sizeGib",
        "--hicache-write-policy": "engine.hostCache.writePolicy",
        "--swap-space": "engine.hostCache.swapGib",
        "--hicache-storage-dir": "engine.storage",
        "--hicache-storage-size": "engine.storage.sizeGib",
        "--hicache-storage-prefetch-timeout": "engine.storage.waitSeconds",
        "--session-kv-gib": "engine.sessions.kvGib",
        "--session-ttl": "engine.sessions.ttlSeconds",
        "--max-sessions": "engine.sessions.max",
        "--max-lora-rank": "engine.lora.maxLoraRank",
        "--max-cpu-loras": "engine.lora.maxCpuLoras",
        "--lora-turn": "engine.lora.turnSeconds",
        "--kv-digest": "transfer.digest",
        "--expect-transport": "transfer.expect",
        "--served-model-name": "servedModelName",
        "--drain-timeout": "drainSeconds",
        "--otlp-traces-endpoint": "observability.otlpTracesEndpoint",
        "--otlp-traces-sample-ratio": "observability.traceSampleRatio",
    },
    operator=frozenset(
        {
            *("--model", "--role", "--worker-id", "--standby", "--await-links", "--peer-group"),
            *("--host", "--request-port", "--peer-port", "--health-port", "--health-host"),
            *("--allow-remote-orders", "--allowed-hosts", "--curve-keys", "--cluster"),
            *("--redis-url", "--redis-password-file", "--log-format"),
            *("--node-rank", "--dist-init-addr", "--dist-init-timeout"),
        }
    ),
    arguments=frozenset(
        {
            *("--load-format", "--cpu-affinity", "--dist-timeout", "--num-pages", "--mixed-prefill-tokens"),
            "--shared-prefill-tokens",
            *("--cuda-graph-max-bs", "--cuda-graph-bs", "--disable-cuda-graph", "--attention-backend"),
            *("--cuda-graph-max-bs-prefill", "--cuda-graph-bs-prefill", "--disable-prefill-cuda-graph"),
            *("--disable-radix-cache", "--disable-mixed-chunk", "--disable-overlap-schedule"),
            *("--hicache-ratio", "--prefix-fetch-timeout"),
            *("--policy-ageing-seconds", "--priority-preemption-threshold", "--scheduler-delay-factor"),
            *("--watermark", "--audit-every-step", "--watchdog-timeout", "--crash-dump-folder"),
            *("--torch-profiler-dir", "--ngram-prompt-lookup-min", "--ngram-prompt-lookup-max"),
            *("--speculative-disable-by-batch-size", "--speculative-disable-adaptive"),
            *("--transport", "--grant-timeout", "--hold-timeout", "--kv-push-layers", "--link-probe-mib"),
            *("--grammar-backend", "--grammar-compile-timeout", "--grammar-cache-size"),
            *("--enable-lora", "--lora-modules", "--lora-dir", "--max-loras", "--allow-runtime-lora-updating"),
        }
    ),
    aliases={
        "--tp-size": "--tensor-parallel-size",
        "--tp": "--tensor-parallel-size",
        "--block-size": "--page-size",
        "--gpu-memory-utilization": "--mem-fraction-static",
        "--max-model-len": "--context-length",
        "--max-num-seqs": "--max-running-requests",
        "--max-num-batched-tokens": "--max-tokens-per-step",
        "--scheduling-policy": "--schedule-policy",
        "--priority-scheduling-preemption-threshold": "--priority-preemption-threshold",
        "--speculative-draft-model": "--speculative-draft-model-path",
    },
    unusable=UNUSABLE | {"--progress-file", "--force-retract-every", "--force-fault-every"},
    weights=frozenset({"--load-format"}),
    repeatable=frozenset({"--lora-modules"}),
)

GATEWAY = FlagTable(
    fields={
        "--served-model-name": "servedModelName",
        "--tool-call-parser": "gateway.toolCallParser",
        "--reasoning-parser": "gateway.reasoningParser",
        "--processes": "gateway.processes",
        "--api-keys": "gateway.authSecret",
        "--allowed-hosts": "gateway.allowedHosts",
        "--strict-fields": "gateway.strictFields",
        "--parse-special-tokens": "gateway.parseSpecialTokens",
        "--max-body-memory": "gateway.limits.maxBodyMemoryMib",
        "--max-body-memory-per-client": "gateway.limits.maxBodyMemoryPerClientMib",
        "--max-waiting-requests": "gateway.limits.maxWaitingRequests",
        "--queue-timeout": "gateway.limits.queueTimeoutSeconds",
        "--console": "gateway.console",
        "--local-prefill-tokens": "gateway.localPrefillTokens",
        "--prefill-fallback": "gateway.prefillFallback",
        "--router-policy": "gateway.routerPolicy",
        "--router-exploration": "gateway.routerExploration",
        "--session-ttl": "engine.sessions.ttlSeconds",
        "--slo-ttft-ms": "slo.ttftSeconds",
        "--slo-itl-ms": "slo.itlSeconds",
        "--slo-percentile": "slo.percentile",
        "--slo-admission": "slo.admission",
        "--from-zero-timeout": "autoscaling.idleSecondsToZero",
        "--drain-timeout": "drainSeconds",
        "--otlp-traces-endpoint": "observability.otlpTracesEndpoint",
        "--otlp-traces-sample-ratio": "observability.traceSampleRatio",
        "--cells": "cells",
        "--cell-password-files": "cells",
    },
    operator=frozenset(
        {
            *(
                "--model",
                "--models",
                "--independent-models",
                "--model-root",
                "--host",
                "--port",
                "--admin-host",
                "--admin-port",
            ),
            *("--redis-url", "--redis-password-file", "--cluster", "--curve-keys", "--log-format", "--drain-notice"),
            "--replaced-workers",
        }
    ),
    arguments=frozenset({"--explain-candidates", "--worker-start-wait"}),
    aliases={},
    unusable=UNUSABLE | {"--process-place"},
)


def worker_arguments(service: Served, role: RoleName) -> list[str]:
    """The words for workers of a role: the common ones, unless the role sets the same flag, and then its own."""
    common, own = service.spec.engine.args, service.role(role).engine.args
    taken = {WORKER.flag_of(word) for word in own}
    return [*(word for word in common if WORKER.flag_of(word) not in taken), *own]


def lists_of(service: Served) -> dict[str, tuple[FlagTable, Sequence[str]]]:
    """Every list of words with the table it is judged by, by its place below `spec`."""
    spec = service.spec
    return {
        "engine.args": (WORKER, spec.engine.args),
        "prefill.engine.args": (WORKER, spec.prefill.engine.args),
        "decode.engine.args": (WORKER, spec.decode.engine.args),
        "gateway.args": (GATEWAY, spec.gateway.args),
    }


def argument_problems(service: Served) -> Iterator[str]:
    """One sentence for each word that has no place in `args`."""
    for place, (table, words) in lists_of(service).items():
        given: set[str] = set()
        for number, word in enumerate(words):
            flag, path = table.flag_of(word), f"spec.{place}[{number}]"
            if flag in table.operator:
                yield f"{path}: the operator sets {flag} itself; remove it"
            elif flag in table.fields:
                of = " of the ModelServices" if service.shared and table.fields[flag].startswith(OF_MODELS) else ""
                yield f"{path}: {flag} has a field; remove it and set spec.{table.fields[flag]}{of}"
            elif flag in table.unusable:
                yield f"{path}: {flag} is not for pods; remove it"
            elif any(mark in word for mark in REPLACED):
                yield f"{path}: Kubernetes replaces $(NAME) and $$ in arguments; write the value of {flag} itself"
            elif flag in given and flag not in table.repeatable:
                yield f"{path}: {flag} is given twice; remove one"
            given.add(flag)


def unknown_flags(service: Served) -> list[str]:
    """Flags in any list that this release does not know, each once."""
    flags = ((table, table.flag_of(word)) for table, words in lists_of(service).values() for word in words)
    return list(dict.fromkeys(flag for table, flag in flags if not table.knows(flag)))


def decisive(words: Iterable[str]) -> list[str]:
    """Of the words for workers: those that decide what weights and KV are, or may, for all that is known."""
    return sorted(word for word in words if (flag := WORKER.flag_of(word)) in WORKER.weights or not WORKER.knows(flag))


def accepts(accepted: Sequence[str], words: Sequence[str]) -> bool:
    """Whether the arguments of a check that has passed end with these words of a user."""
    return tuple(accepted[-len(words) - 1 :]) == (*words, CHECK_ONLY)


def check_container(container: Manifest) -> Manifest:
    """An init container that checks the command of `container`, in its image, and ends within seconds.

    Its exit message is the parser's sentence (`planning.pod_failure`). It reads no model, so it may run before the
    model is there.
    """
    kept = ("image", "imagePullPolicy", "command", "env", "securityContext")
    mounts = [one for one in container["volumeMounts"] if one["name"] == "tmp"]
    return {
        **{key: container[key] for key in kept if key in container},
        "name": CHECK,
        "args": [*container["args"], CHECK_ONLY],
        "resources": resources_of(Resources()),
        "volumeMounts": mounts,
    }
