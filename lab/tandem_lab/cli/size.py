"""`tandem size`: the cheapest fleet that keeps latency objectives on a trace, as a ModelService to apply."""

import argparse
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tandem_engine.base.errors import ConfigError
from tandem_engine.config.flags import positive_int
from tandem_services.cli.flags import add_local_prefill, fraction, positive_float
from tandem_services.common.errors import StartupError

if TYPE_CHECKING:
    from tandem_lab.sizing.model_figures import ModelFigures
    from tandem_lab.sizing.rates import Device, WorkerRates
    from tandem_lab.sizing.report import ServiceNames
    from tandem_lab.sizing.sizing import Result, Sizing

KEPT = 0.99
"""Share of the percentile asked for that the second half must reach for --check."""

EXAMPLES = """\
examples:
  tandem size --model ~/llama-70b --trace week.jsonl --ttft 2 --itl 0.03 --device H100 --gpu-price 3.5 > service.yaml
  tandem size --model ~/llama-70b --trace week.jsonl --ttft 2 --itl 0.03 --rates tp4.json --rates tp8.json --check
  kubectl apply -f service.yaml

Order of work:
  1. tandem size … --device H100           an estimate, to know what to start
  2. tandem ctl HOST:PORT rates --out r.json   measure one worker of each tensor-parallel size
  3. tandem size … --rates r.json          the same with measured rates
  4. kubectl apply -f service.yaml         spec.slo keeps the objectives from then on

Fleets are sized on the first half of the trace, by replaying it with the product's router and queue over modeled
workers (tandem simulate). The second half is the proof. The manifest goes to standard output or --out, the table
to standard error. With --check the exit status is 1 if the second half does not keep what was asked.
docs/sizing.md describes what is modeled.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "size",
        help="find the cheapest fleet that keeps latency objectives on a trace, as a ModelService",
        description="Search tensor-parallel size, chunk, batch limit and the numbers of prefill and decode workers for "
        "the cheapest fleet that keeps --ttft and --itl for --percentile of the requests of a trace.",
        epilog=EXAMPLES,
    )
    _add_load(parser)
    _add_rates(parser)
    _add_search(parser)
    _add_output(parser)
    parser.set_defaults(run=run)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load and objectives")
    load.add_argument("--trace", type=Path, required=True, metavar="FILE", help="trace: Mooncake .jsonl or Azure .csv")
    load.add_argument("--num-prompts", type=positive_int, metavar="N", help="the first N requests (default: all)")
    load.add_argument(
        "--trace-speed",
        type=positive_float,
        default=1.0,
        metavar="F",
        help="divisor of the gaps between arrivals: 2 is twice the load (default: 1)",
    )
    load.add_argument("--ttft", type=positive_float, required=True, metavar="S", help="time to first token, in seconds")
    load.add_argument(
        "--itl", type=positive_float, required=True, metavar="S", help="mean time between tokens, in seconds"
    )
    load.add_argument(
        "--percentile",
        type=fraction,
        default=0.95,
        metavar="F",
        help="share of requests that is to meet both, 0.5 to 0.999 (default: 0.95)",
    )

    load.add_argument(
        "--confidence",
        type=fraction,
        default=0.95,
        metavar="F",
        help="size for the rate that the load exceeds only with a probability of 1 - F, as the variation of the first "
        "half has it: 0.5 to 0.999, 0.5 is the rate of the first half itself (default: 0.95)",
    )


def _add_rates(parser: argparse.ArgumentParser) -> None:
    rates = parser.add_argument_group("workers", "measured with --rates, or estimated from --model and a device")
    rates.add_argument("--model", type=Path, required=True, metavar="PATH", help="checkpoint folder or its config.json")
    rates.add_argument(
        "--rates",
        type=Path,
        action="append",
        metavar="FILE",
        help="what tandem ctl HOST:PORT rates --out wrote; repeatable, one for each tensor-parallel size",
    )
    rates.add_argument("--device", metavar="NAME", help="GPU of the estimate: H100, H200, A100 or L40S")
    rates.add_argument("--device-tflops", type=positive_float, metavar="N", help="its dense 16-bit TFLOPS")
    rates.add_argument("--device-gb-per-s", type=positive_float, metavar="N", help="its memory bandwidth in GB/s")
    rates.add_argument("--device-gb", type=positive_float, metavar="N", help="its memory in GB")
    rates.add_argument(
        "--mfu", type=fraction, default=0.5, metavar="F", help="share of the FLOPS that prompts reach (default: 0.5)"
    )
    rates.add_argument(
        "--transfer-gb-per-s",
        type=positive_float,
        default=10.0,
        metavar="GB",
        help="bandwidth of each link in GB/s, where none was measured (default: 10)",
    )
    rates.add_argument(
        "--margin",
        type=positive_float,
        default=1.0,
        metavar="F",
        help="factor of all times, at least 1, for what is not modeled (default: 1)",
    )
    rates.add_argument(
        "--gpu-price", type=positive_float, default=1.0, metavar="P", help="price of a GPU per hour (default: 1)"
    )


def _add_search(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group("search")
    search.add_argument(
        "--tensor-parallel-sizes",
        default="1,2,4,8",
        metavar="LIST",
        help="GPUs of a worker to try with an estimate (default: 1,2,4,8)",
    )
    search.add_argument(
        "--chunked-prefill-sizes", default="2048,8192", metavar="LIST", help="chunks to try (default: 2048,8192)"
    )
    search.add_argument("--max-gpus", type=positive_int, default=256, metavar="N", help="largest fleet (default: 256)")
    search.add_argument("--seed", type=int, default=0, help="seed of every random choice (default: 0)")
    add_local_prefill(search)


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, metavar="FILE", help="write the manifest to FILE (default: standard output)"
    )
    output.add_argument("--name", metavar="NAME", help="metadata.name (default: from the name of the model)")
    output.add_argument(
        "--hugging-face", metavar="OWNER/NAME", help="spec.model is this model of the hub (default: path /models/NAME)"
    )
    output.add_argument("--claim", metavar="NAME", help="spec.model is the folder of the model on this volume claim")
    output.add_argument(
        "--check", action="store_true", help="exit with 1 if the second half of the trace does not keep the objectives"
    )
    output.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Everything that can be wrong with the input is found before Redis is started."""
    from tandem_lab.sizing.report import as_yaml, manifest, summary, table
    from tandem_lab.sizing.search import pareto

    sizing = sizing_of(args)
    names = _names(args)
    if args.out is not None and not args.out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: the folder {args.out.parent} does not exist")
    result = _search(args, sizing)
    best = result.best
    print(table(pareto(result.found.fleets), price=args.gpu_price), file=sys.stderr)
    comment = summary(best, sizing.wanted, result.proof, price=args.gpu_price, trace=args.trace.name, rate=sizing.rate)
    excluded = "".join(f"not with {gpus} GPUs a worker: {why}\n" for gpus, why in result.found.refused.items())
    print(f"{comment}\n{excluded}{result.found.runs} simulations", file=sys.stderr)
    document = manifest(best, sizing.wanted, names, context_length=sizing.context_length)
    text = as_yaml(document, comment)
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text, encoding="utf-8")
    kept = result.proof.attainment / sizing.wanted.percentile
    if kept < KEPT:
        print(
            f"tandem size: the second half reached {kept:.3f} of the percentile asked for: its load is another one; "
            "give a longer trace, or a higher --confidence",
            file=sys.stderr,
        )
    return 1 if args.check and kept < KEPT else 0


def sizing_of(args: argparse.Namespace) -> "Sizing":
    """Raises `ConfigError` and `CheckpointError`."""
    from itertools import islice

    from tandem_lab.sizing.load import Objectives, faster, halves, load_figures, upper_rate
    from tandem_lab.sizing.model_figures import read_model_figures
    from tandem_lab.sizing.sizing import Sizing
    from tandem_lab.traces import read_trace

    if not 0.5 <= args.percentile <= 0.999:
        raise ConfigError(f"--percentile must be between 0.5 and 0.999, got {args.percentile:g}")
    if not 0.5 <= args.confidence <= 0.999:
        raise ConfigError(f"--confidence must be between 0.5 and 0.999, got {args.confidence:g}")
    wanted = Objectives(ttft_s=args.ttft, itl_s=args.itl, percentile=args.percentile)
    chunks = _integers(args.chunked_prefill_sizes, "--chunked-prefill-sizes")
    parts = halves(list(islice(read_trace(args.trace), args.num_prompts)), speed=args.trace_speed)
    rate = upper_rate(parts.sized, load_figures(parts.sized), args.confidence)
    sized = faster(parts.sized, rate)
    load = load_figures(sized)
    model = None if args.rates else read_model_figures(args.model)
    longest = max(each.prompt_tokens + each.output_tokens for each in (*parts.sized, *parts.proof))
    if model is not None and longest > model.context_length:
        raise ConfigError(
            f"--trace: the longest request has {longest} tokens, and the context of --model is {model.context_length}"
        )
    return Sizing(
        sized=sized,
        proof=parts.proof,
        rate=rate,
        load=load,
        wanted=wanted,
        rates=_rates(args, model, load.context),
        chunks=chunks,
        context_length=longest,
        most_gpus=args.max_gpus,
        local_prefill_tokens=args.local_prefill_tokens,
        seed=args.seed,
    )


def _rates(args: argparse.Namespace, model: "ModelFigures | None", context: float) -> "list[WorkerRates]":
    from tandem_lab.sizing.rates import estimated, measured, read_rates, slower

    transfer = args.transfer_gb_per_s * 1e9
    if model is None:
        found = [measured(read_rates(path), context=context, transfer_rate=transfer) for path in args.rates]
        return [slower(each, args.margin) for each in found]
    device = _device(args)
    if not args.mfu > 0.0:
        raise ConfigError("--mfu must be more than 0")
    sizes = _integers(args.tensor_parallel_sizes, "--tensor-parallel-sizes")
    fitting = [
        rates
        for gpus in sizes
        if model.heads % gpus == 0
        and (rates := estimated(model, device, gpus=gpus, context=context, mfu=args.mfu, transfer_rate=transfer))
    ]
    if not fitting:
        gib = model.parameters * model.weight_bits / 8 / (1 << 30)
        raise ConfigError(
            f"--tensor-parallel-sizes {args.tensor_parallel_sizes}: {gib:.0f} GiB of weights and KV of one sequence "
            f"fit into none of them, or none divides the {model.heads} attention heads"
        )
    return [slower(each, args.margin) for each in fitting]


def _device(args: argparse.Namespace) -> "Device":
    from tandem_lab.sizing.rates import DEVICES, Device

    figures = {
        "--device-tflops": args.device_tflops,
        "--device-gb-per-s": args.device_gb_per_s,
        "--device-gb": args.device_gb,
    }
    if args.device is not None:
        known = DEVICES.get(args.device.upper())
        if known is None:
            raise ConfigError(
                f"--device {args.device[:100]!r}: choose among {', '.join(DEVICES)}, or give {', '.join(figures)}"
            )
        return Device(
            flops=known.flops if args.device_tflops is None else args.device_tflops * 1e12,
            bandwidth=known.bandwidth if args.device_gb_per_s is None else args.device_gb_per_s * 1e9,
            memory=known.memory if args.device_gb is None else args.device_gb * 1e9,
        )
    missing = [flag for flag, value in figures.items() if value is None]
    if missing:
        raise ConfigError(
            f"give --rates FILE, --device NAME, or all of {', '.join(figures)}; missing: {', '.join(missing)}"
        )
    return Device(flops=args.device_tflops * 1e12, bandwidth=args.device_gb_per_s * 1e9, memory=args.device_gb * 1e9)


def _integers(text: str, flag: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= 1 << 20 for part in parts):
        raise ConfigError(f"{flag} {text[:100]!r}: expected numbers above 0, separated by commas")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _names(args: argparse.Namespace) -> "ServiceNames":
    from tandem_lab.sizing.report import ServiceNames

    folder = (args.model.parent if args.model.is_file() else args.model).resolve().name
    own = re.sub("[^a-z0-9]+", "-", folder.lower()).strip("-")[:40].strip("-")
    name = args.name or (own if own[:1].isalpha() else f"model-{own}"[:40].strip("-"))
    if not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ConfigError(f"--name {name[:100]!r}: a DNS label of at most 40 characters: a-z, 0-9 and '-'")
    if args.hugging_face is not None and args.claim is not None:
        raise ConfigError("give --hugging-face or --claim, not both")
    source: dict[str, object] = {"path": f"/models/{folder}"}
    if args.hugging_face is not None:
        source = {"huggingFace": {"id": args.hugging_face}}
    if args.claim is not None:
        source = {"claim": {"claimName": args.claim, "path": folder}}
    return ServiceNames(name=name, source=source)


def _search(args: argparse.Namespace, sizing: "Sizing") -> "Result":
    """With a Redis of its own, which ends with it."""
    import uvloop
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from tandem_services.cli.processes import Supervisor
    from tandem_services.cli.redis_process import start_redis
    from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    supervisor = Supervisor()
    with (
        TemporaryDirectory(prefix="tandem-size-") as folder,
        Progress(*columns, console=Console(stderr=True), disable=args.quiet) as progress,
    ):
        task = progress.add_task("starts", total=None)
        try:
            url = start_redis(supervisor, Path(folder))
            report = lambda text: progress.update(task, description=text)  # noqa: E731
            return uvloop.run(sizing.run(RedisAddress(url=url), report))
        except RedisUnavailableError as error:
            raise StartupError(f"the simulation's own Redis failed: {error}") from error
        finally:
            supervisor.stop(grace=5.0)
