"""`tandem bench`: measure a running server (`serve`) or the engine alone (`offline`)."""

import argparse
import asyncio
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem_engine.base.errors import ConfigError
from tandem_engine.config.flags import non_negative_int, positive_int
from tandem_services.cli.chat.conversation import error_message
from tandem_services.cli.flags import (
    add_api_key,
    fraction,
    key_headers,
    model_folder,
    non_negative_float,
    positive_float,
)
from tandem_services.common.errors import RemoteError

if TYPE_CHECKING:
    from tandem_lab.bench.load import Slo


def add_slo(group: "argparse._ArgumentGroup") -> None:
    """Bounds that make a request a good one; see `slo_of`."""
    group.add_argument("--slo-ttft-ms", type=positive_float, metavar="MS", help="SLO of the time to first token, in ms")
    group.add_argument(
        "--slo-itl-ms", type=positive_float, metavar="MS", help="SLO of the mean inter-token latency, in ms"
    )
    group.add_argument("--slo-e2e-ms", type=positive_float, metavar="MS", help="SLO of the whole request, in ms")


def slo_of(args: argparse.Namespace) -> "Slo | None":
    """None when no bound was given."""
    from tandem_lab.bench.load import Slo

    slo = Slo(ttft_ms=args.slo_ttft_ms, itl_ms=args.slo_itl_ms, e2e_ms=args.slo_e2e_ms)
    return None if slo == Slo() else slo


SERVE_EXAMPLES = """\
examples:
  tandem bench serve --num-prompts 64 --concurrency 16
  tandem bench serve --request-rate 4 --slo-ttft-ms 200 --slo-itl-ms 50
  tandem bench serve --request-rate 8 --slo-ttft-ms 500 --send-slo --retry-within 30
  tandem bench serve --trace conversation_trace.jsonl --trace-scale 64 --trace-speed 10
  tandem bench serve --reference-url http://127.0.0.1:8001     compare texts with that server

With temperature 0 every stream is compared with the reference text of the same prompt. A difference or a failed
request sets the exit status to 1. Reference requests to the same server use a separate cache_salt, so they leave no
prompt of the run in a prefix cache. The comparison requires float32 servers: in bfloat16 the rounding of a batch
depends on its size, on every engine, and near ties may differ.
"""

OFFLINE_EXAMPLES = """\
examples:
  tandem bench offline                       bundled model, against transformers generate
  tandem bench offline --num-prompts 16 --json
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("bench", help="measure a running server, or the engine alone")
    kinds = parser.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    _add_serve(kinds)
    _add_offline(kinds)


def _add_serve(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "serve",
        help="measure an OpenAI-compatible server under load and check its responses",
        description="Send streamed completions at a fixed concurrency or rate and report TTFT, ITL and E2E "
        "percentiles, throughput and goodput.",
        epilog=SERVE_EXAMPLES,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server (default: http://127.0.0.1:8000)")
    parser.add_argument("--model", metavar="NAME", help="model name (default: the first one served)")
    add_api_key(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=positive_int, default=64, metavar="N", help="requests (default: 64)")
    pace = load.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency", type=positive_int, default=8, metavar="N", help="requests in flight (default: 8)"
    )
    pace.add_argument(
        "--request-rate", type=positive_float, metavar="R", help="Poisson arrivals per second, instead of --concurrency"
    )
    load.add_argument(
        "--input-len", type=positive_int, default=128, metavar="N", help="words per prompt (default: 128)"
    )
    load.add_argument("--output-len", type=positive_int, default=64, metavar="N", help="max_tokens (default: 64)")
    load.add_argument(
        "--spread", type=fraction, default=0.0, metavar="S", help="lengths uniform in [(1-S)n, n] (default: 0)"
    )
    load.add_argument(
        "--shared-prefix", type=non_negative_int, default=0, metavar="N", help="number of words that all prompts share"
    )
    load.add_argument("--trace", type=Path, metavar="FILE", help="lengths and times from a Mooncake or Azure trace")
    load.add_argument(
        "--trace-scale",
        type=positive_float,
        default=1.0,
        metavar="F",
        help="divisor of the trace's lengths (default: 1)",
    )
    load.add_argument(
        "--trace-speed", type=positive_float, default=1.0, metavar="F", help="divisor of the trace's gaps (default: 1)"
    )
    load.add_argument(
        "--ignore-eos", action="store_true", help="generate output-len tokens and ignore the end-of-sequence token"
    )
    load.add_argument(
        "--temperature",
        type=non_negative_float,
        default=0.0,
        help="sampling temperature; 0 is greedy, and texts are checked (default: 0)",
    )
    load.add_argument("--seed", type=int, default=0, help="seed of prompts, arrivals and sampling (default: 0)")
    report = parser.add_argument_group("check and report")
    report.add_argument("--no-check", action="store_true", help="do not compare texts with a reference run")
    report.add_argument("--reference-url", metavar="URL", help="server of the reference texts (default: --url)")
    add_slo(report)
    report.add_argument(
        "--send-slo", action="store_true", help="send the SLOs of TTFT and ITL as the objectives of each request"
    )
    report.add_argument(
        "--retry-within",
        type=non_negative_float,
        default=0.0,
        metavar="S",
        help="send a rejected request again, once, after a Retry-After of at most S seconds (default: 0, never)",
    )
    report.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run_serve)


def _add_offline(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "offline",
        help="throughput and single-stream latency of the engine against transformers",
        description="Run the same greedy workload on Tandem's engine and on transformers generate in one process, "
        "in turn, and print both with their ratio.",
        epilog=OFFLINE_EXAMPLES,
    )
    parser.add_argument("--model", metavar="PATH", help="checkpoint directory (default: the bundled model)")
    parser.add_argument("--num-prompts", type=positive_int, default=64, metavar="N", help="requests (default: 64)")
    parser.add_argument(
        "--input-len", type=positive_int, default=256, metavar="N", help="longest prompt, tokens (default: 256)"
    )
    parser.add_argument(
        "--output-len", type=positive_int, default=96, metavar="N", help="longest output, tokens (default: 96)"
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=3, metavar="N", help="repetitions; the result is the median (default: 3)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of both sides (default: float32)"
    )
    parser.add_argument(
        "--threads",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="CPU threads of both sides; 0 uses torch's default",
    )
    parser.add_argument("--skip-reference", action="store_true", help="measure only Tandem")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run_offline)


def run_offline(args: argparse.Namespace) -> int:
    argv = [sys.executable, "-m", "tandem_lab", "bench", "--model", str(model_folder(args.model))]
    for name in ("num_prompts", "input_len", "output_len", "rounds", "dtype", "threads"):
        argv += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    argv += ["--skip-reference"] if args.skip_reference else []
    argv += ["--json"] if args.json else []
    return subprocess.run(argv, check=False).returncode


def run_serve(args: argparse.Namespace) -> int:
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    import msgspec
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from tandem_lab.bench.load import Prompt, at_arrival_times, at_concurrency, reference_texts, summarize

    specs, objectives = _specs(args), _objectives(args)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    checking = args.temperature == 0 and not args.no_check
    with Progress(*columns, console=Console(stderr=True), disable=args.json) as progress:
        async with _client(args, args.url) as client, _client(args, args.reference_url or args.url) as other:
            plain = await _target(args, client)
            target = replace(plain, objectives=objectives, retry_within_s=args.retry_within)
            references: dict[Prompt, str] = {}
            if checking:
                task = progress.add_task("reference texts", total=len({spec.prompt for spec in specs}))
                # The run itself would else find each prompt in the prefix cache.
                salt = None if args.reference_url else uuid.uuid4().hex
                reference = replace(await _target(args, other), cache_salt=salt)
                references = await reference_texts(reference, specs, lambda _: progress.advance(task))
            task = progress.add_task("measuring", total=len(specs))
            if args.trace is not None or args.request_rate is not None:
                result = await at_arrival_times(target, specs, lambda _: progress.advance(task))
            else:
                result = await at_concurrency(target, specs, args.concurrency, lambda _: progress.advance(task))
    summary = summarize(result.measurements, result.seconds, slo=slo_of(args), references=references)
    print(msgspec.json.encode(summary).decode() if args.json else _table(msgspec.to_builtins(summary)))
    return 1 if summary.failed or summary.mismatched else 0


def _objectives(args: argparse.Namespace) -> dict[str, str]:
    """Raises `ConfigError` for --send-slo without an objective to send."""
    from tandem_lab.bench.load import objectives_of

    slo = slo_of(args)
    if not args.send_slo:
        return {}
    headers = {} if slo is None else objectives_of(slo)
    if not headers:
        raise ConfigError("--send-slo: needs --slo-ttft-ms or --slo-itl-ms")
    return headers


def _specs(args: argparse.Namespace) -> list[Any]:
    from tandem_lab.bench.load import Lengths, fixed_workload, trace_workload

    if args.trace is not None:
        return list(trace_workload(args.trace, args.num_prompts, scale=args.trace_scale, speed=args.trace_speed))
    lengths = Lengths(
        prompt=args.input_len, output=args.output_len, spread=args.spread, shared_prefix=args.shared_prefix
    )
    return list(fixed_workload(lengths, args.num_prompts, rate=args.request_rate, seed=args.seed))


def _client(args: argparse.Namespace, url: str) -> Any:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(120.0, connect=10.0)
    return httpx.AsyncClient(base_url=url, headers=key_headers(args), limits=limits, timeout=timeout)


async def _target(args: argparse.Namespace, client: Any) -> Any:
    import httpx

    from tandem_lab.bench.load import Target

    try:
        response = await client.get("/v1/models")
        if response.status_code != 200:
            raise RemoteError(f"{client.base_url}: {error_message(response.content, response.status_code)}")
        names = [card["id"] for card in response.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise RemoteError(f"{client.base_url} does not serve /v1/models ({error}): is `tandem up` running?") from error
    return Target(
        client=client,
        model=args.model or (names[0] if names else ""),
        temperature=args.temperature,
        seed=args.seed if args.temperature > 0 else None,
        ignore_eos=args.ignore_eos,
    )


def _table(summary: dict[str, Any]) -> str:
    """The summary as aligned lines."""
    lines = []
    for name, value in summary.items():
        if name in ("ttft_ms", "itl_ms", "e2e_ms") and value is not None:
            shown = "  ".join(f"{key} {figure:.1f}" for key, figure in value.items())
        elif name in ("ttft_over_predicted", "retries") and value is not None:
            shown = "  ".join(f"{key} {figure:.3g}" for key, figure in value.items())
        elif name == "errors":
            shown = "; ".join(f"{count}x {text}" for text, count in value.items()) or "none"
        else:
            shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{name.replace('_', ' '):<24} {shown}")
    return "\n".join(lines)
