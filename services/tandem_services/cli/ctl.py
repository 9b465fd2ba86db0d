"""`tandem ctl`: sends an operator's command to one running worker, over its health port."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tandem_engine.base.addresses import Address, AddressError
from tandem_engine.base.logs import escape
from tandem_engine.config import Role
from tandem_engine.config.flags import positive_int
from tandem_services.cli.flags import positive_float
from tandem_services.cli.text.tables import table
from tandem_services.common.errors import StartupError
from tandem_services.common.settings import read_settings

if TYPE_CHECKING:
    import httpx

ADAPTERS_HEADER = ("ADAPTER", "DIGEST", "RANK", "STATE", "NOTE")
FLEET_HEADER = ("ADAPTER", "DIGEST", "RANK", "STATE", "IN MEMORY OF", "NOTE")


def adapters_table(report: Mapping[str, Any]) -> str:
    """`report` as `GET /adapters` of a worker answers it, or `GET /v1/adapters` of a gateway."""
    fleet = "data" in report
    if not fleet and report["memory"] is None:
        return "its engine is not ready: GET /ready says what it waits for"
    rows = list(_rows_of_fleet(report["data"]) if fleet else _rows(report))
    return table(FLEET_HEADER if fleet else ADAPTERS_HEADER, rows) if rows else "no adapters"


def _rows_of_fleet(adapters: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for each in adapters:
        failed = [f"{worker}: {escape(reason)}" for worker, reason in sorted(each.get("failed", {}).items())]
        state = (
            "registered" if each["registered"] and each["requested"] else "served" if each["requested"] else "former"
        )
        failed += _further(each, "failed")
        workers = ", ".join([*each["workers"], *_further(each, "workers")]) or "-"
        yield (each["name"], each["digest"], str(each["rank"]), state, workers, "; ".join(failed))


def _further(adapter: Mapping[str, Any], field: str) -> list[str]:
    """Workers that the gateway has counted and not named. A gateway of a former release names all."""
    more = adapter.get(f"num_{field}", 0) - len(adapter.get(field, ()))
    return [f"{more} more"] if more > 0 else []


def all_adapters(client: "httpx.Client", first: Mapping[str, Any]) -> dict[str, Any]:
    """The list of a gateway of which `first` is the first page. Raises what httpx raises."""
    data, page = [*first["data"]], first
    while page.get("has_more") and page["data"]:
        response = client.get(GATEWAY_ADAPTERS, params={"after": page["last_id"]})
        response.raise_for_status()
        page = response.json()
        data += page["data"]
    return {"object": "list", "data": data}


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    memory = report["memory"]
    resident, failed = set(memory["resident"]), memory["failed"]
    reasons = {failure["digest"]: escape(failure["reason"]) for failure in failed}
    named = sorted(report["adapters"], key=lambda adapter: adapter["name"])
    for adapter in named:
        digest = adapter["digest"]
        state = "in memory" if digest in resident else "failed" if digest in reasons else "not in memory"
        yield (adapter["name"], digest, str(adapter["rank"]), state, reasons.get(digest, ""))
    digests = {adapter["digest"] for adapter in named}
    for digest in sorted(resident - digests):
        yield ("-", digest, "-", "in memory", "loaded for requests; this worker has no name for it")
    for failure in failed:
        if failure["digest"] not in digests:
            yield (failure["name"], failure["digest"], "-", "failed", reasons[failure["digest"]])


MEASUREMENT_SILENCE_S = 300.0
"""Longer than a whole measurement of rates."""


def measure_rates(client: "httpx.Client", *, out: Path | None, force: bool) -> int:
    """The exit status: 1 when the worker cannot be measured now. Raises `StartupError` and what httpx raises."""
    if out is not None and not out.parent.is_dir():
        raise StartupError(f"--out {out}: the folder {out.parent} does not exist")
    with client.stream("POST", "/rates", json={"force": force}, timeout=MEASUREMENT_SILENCE_S) as response:
        if not response.is_success:
            answer = json.loads(response.read())
            hint = "; --force measures all the same" if answer.get("code") == "busy" and not force else ""
            print(f"{answer['message']}{hint}", file=sys.stderr)
            return 1
        last = _followed(json.loads(line) for line in response.iter_lines() if line)
    if "rates" not in last:
        print(last.get("error", "the worker ended the measurement without figures"), file=sys.stderr)
        return 1
    text = json.dumps(last["rates"], indent=1) + "\n"
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
    return 0


def _followed(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The last item, after all that report progress."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    last: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring")
        for last in items:
            if "what" in last:
                progress.update(task, description=last["what"], completed=last["done"], total=last["total"])
            elif "rates" in last:
                progress.update(task, completed=progress.tasks[0].total)
    return last


LINKS_HEADER = ("PEER", "GB/s", "1 PAGE", "TRANSPORT", "AGE", "NOTE")


def links_table(links: Sequence[Mapping[str, Any]]) -> str:
    """`links` as `GET /links` answers them; fields that say nothing are absent there."""
    rows = [LINKS_HEADER, *sorted(map(_row, links))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(LINKS_HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(link: Mapping[str, Any]) -> tuple[str, ...]:
    rate, latency = link.get("bytes_per_s", 0.0), link.get("latency_s", 0.0)
    notes = (link.get("condition", ""), "broken" if link.get("broken") else "", link.get("problem", ""))
    return (
        link["peer"],
        f"{rate / 1e9:.2f}" if rate else "-",
        f"{latency * 1e3:.2f} ms" if latency else "-",
        link.get("transport", "unknown"),
        f"{link.get('age_s', 0.0):.0f} s" if rate else "-",
        "; ".join(note for note in notes if note),
    )


ORDER_TIMEOUT = 1830.0
"""A little more than the worker gives the engine to reload."""

EXAMPLES = """\
examples:
  tandem ctl 127.0.0.1:9101 pause --mode retract     stop computing; running requests give back their KV
  tandem ctl 127.0.0.1:9101 flush-cache              empty the prefix cache
  tandem ctl 127.0.0.1:9101 reload ~/llama-tuned     serve these weights (same architecture), without a restart
  tandem ctl 127.0.0.1:9101 resume
  tandem ctl 127.0.0.1:9101 abort --all              end every request
  tandem ctl 127.0.0.1:9101 role prefill             compute prompts from now on; running decodes move to others
  tandem ctl 127.0.0.1:9101 links                    the links to its peers, measured
  tandem ctl 127.0.0.1:9101 adapters                 its LoRA adapters, and failed loads with their reasons
  tandem ctl 127.0.0.1:9101 rates --out r.json       measure prompts and decode steps, for tandem size
  tandem ctl 127.0.0.1:9101 profile --steps 20       trace steps into --torch-profiler-dir

The port is the worker's --health-port; its log names it, and the registry as health_endpoint.
Exit status 1: the worker answered that it cannot, and why.
"""

PATHS = {
    "abort": "/abort",
    "flush-cache": "/flush_cache",
    "pause": "/pause",
    "resume": "/resume",
    "reload": "/reload",
    "load-adapter": "/load_lora_adapter",
    "unload-adapter": "/unload_lora_adapter",
    "profile": "/profile",
    "stop-profile": "/profile/stop",
    "role": "/role",
    "drain": "/drain",
    "offer": "/offer",
}
GATEWAY_ADAPTERS = "/v1/adapters"
"""Of a gateway's --admin-port, where a worker has /adapters."""

QUESTIONS = {"audit": "/audit", "links": "/links", "adapters": "/adapters"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "ctl",
        help="operate a running worker: abort, pause, flush, reload, change role, profile",
        description="Send one command to one running worker and print its response as JSON.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "worker", metavar="HOST:PORT", help="health port of the worker, or of a gateway its --admin-port, or --port"
    )
    parser.add_argument(
        "--curve-keys",
        type=Path,
        metavar="FILE",
        help="key file of the deployment, from which the token for commands is derived (default: the token of the "
        "process at this address, if it runs on this machine as this user; else TANDEM_CURVE_KEYS)",
    )
    orders = parser.add_subparsers(dest="order", metavar="ORDER", required=True)
    abort = orders.add_parser("abort", help="end one request, or all")
    which = abort.add_mutually_exclusive_group(required=True)
    which.add_argument("rid", nargs="?", metavar="RID", help="exact id of the request, as in the worker's log")
    which.add_argument("--all", action="store_true", help="every request")
    orders.add_parser("flush-cache", help="empty the prefix cache; rejected while requests hold KV")
    pause = orders.add_parser("pause", help="run no steps until resume; the router sends no requests")
    pause.add_argument(
        "--mode",
        choices=("in_place", "retract", "abort"),
        default="in_place",
        help="running requests keep their KV, are retracted and recomputed, or are aborted (default: in_place)",
    )
    orders.add_parser("resume", help="run steps again after a pause")
    reload = orders.add_parser("reload", help="replace the weights with others of the same architecture")
    reload.add_argument(
        "path", nargs="?", metavar="PATH", help="directory on the worker's disk (default: the current one)"
    )
    load = orders.add_parser("load-adapter", help="load a LoRA adapter; the worker needs --allow-runtime-lora-updating")
    load.add_argument("name", metavar="NAME", help="that requests name it by")
    load.add_argument("path", metavar="PATH", help="folder on the worker's disk, relative to its --lora-dir if set")
    load.add_argument("--replace", action="store_true", help="replace the adapter of this name, if there is one")
    adapters = orders.add_parser("adapters", help="LoRA adapters, those in memory, and why others could not be loaded")
    adapters.add_argument("--json", action="store_true", help="print the worker's JSON instead of a table")
    unload = orders.add_parser("unload-adapter", help="serve no new request of an adapter; running ones continue")
    unload.add_argument("name", metavar="NAME")
    profile = orders.add_parser("profile", help="trace steps; the worker needs --torch-profiler-dir")
    profile.add_argument("--steps", type=positive_int, default=20, metavar="N", help="steps to trace (default: 20)")
    profile.add_argument("--seconds", type=positive_float, default=10.0, metavar="S", help="at most (default: 10)")
    orders.add_parser("stop-profile", help="end a trace early")
    rates = orders.add_parser(
        "rates",
        help="measure prompts and decode steps for tandem size, in less than 5 minutes; rejected while requests run",
    )
    rates.add_argument("--out", type=Path, metavar="FILE", help="write the rates to FILE (default: standard output)")
    rates.add_argument(
        "--force", action="store_true", help="measure while requests run: they wait, and the figures are less exact"
    )
    role = orders.add_parser("role", help="serve in another role, without a restart; running requests continue")
    role.add_argument("role", choices=[role.value for role in Role], help="new role of the worker")
    orders.add_parser("drain", help="accept no new requests, migrate or finish running ones, exit 0")
    orders.add_parser("offer", help="end the standby of a worker that was started with --standby")
    links = orders.add_parser("links", help="transport, bandwidth, latency and errors of the links to peers")
    links.add_argument("--json", action="store_true", help="print the worker's JSON instead of a table")
    orders.add_parser("token", help="print the token for commands, for Authorization: Bearer of other clients")
    orders.add_parser("audit", help="check page conservation and report errors")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import httpx

    url = _url(args.worker)
    token = _token(url, args.curve_keys)
    if args.order == "token":
        if token is None:
            raise StartupError(
                f"no token for {url}: set --curve-keys FILE, or run this command on its machine as its user"
            )
        print(token)
        return 0
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with httpx.Client(base_url=url, timeout=ORDER_TIMEOUT, trust_env=False, headers=headers) as client:
            if args.order == "rates":
                return measure_rates(client, out=args.out, force=args.force)
            if args.order in QUESTIONS:
                response = client.get(QUESTIONS[args.order])
                if args.order == "adapters" and response.status_code == 404:
                    response = client.get(GATEWAY_ADAPTERS)
            else:
                response = client.post(PATHS[args.order], json=_body(args))
            if args.order == "adapters" and response.status_code == 404:
                raise StartupError(
                    f"{url} has no list of adapters (HTTP 404): give the --health-port of a worker of this release, or "
                    f"the --admin-port of a gateway"
                )
            answer = response.json()
            if args.order == "adapters" and "data" in answer:
                answer = all_adapters(client, answer)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise StartupError(f"no worker answers at {url} ({error}): give the HOST:PORT of its --health-port") from error
    if args.order == "links" and response.is_success and not args.json:
        print(links_table(answer["links"]))
        return 0
    if args.order == "adapters" and response.is_success and not args.json:
        print(adapters_table(answer))
        return 0
    print(json.dumps(answer), file=sys.stdout if response.is_success else sys.stderr)
    return 0 if response.is_success else 1


def _url(worker: str) -> str:
    """Of the worker's health port. Raises `StartupError` for what is neither HOST:PORT nor a URL."""
    if "://" in worker:
        return worker
    try:
        return Address.parse(worker).url()
    except AddressError as error:
        raise StartupError(f"{error}: give the HOST:PORT of its --health-port") from error


def _token(url: str, keys: Path | None) -> str | None:
    """What orders to `url` need; None where it is not known here."""
    from tandem_engine.ipc.keys import KeyPair
    from tandem_services.common.tokens import order_token, token_of

    if keys is not None:
        return order_token(KeyPair.load(keys))
    parts = urlsplit(url)
    if parts.hostname is not None and parts.port is not None:
        known = token_of(Address(parts.hostname, parts.port))
        if known is not None:
            return known
    keys = read_settings().curve_keys
    return order_token(KeyPair.load(keys)) if keys is not None and keys.is_file() else None


BODIES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "abort": lambda args: {"all": True} if args.all else {"rid": args.rid},
    "pause": lambda args: {"mode": args.mode},
    "reload": lambda args: {"path": args.path},
    "load-adapter": lambda args: {"lora_name": args.name, "lora_path": args.path, "load_inplace": args.replace},
    "unload-adapter": lambda args: {"lora_name": args.name},
    "role": lambda args: {"role": args.role},
    "profile": lambda args: {"steps": args.steps, "seconds": args.seconds},
}
"""Of commands that have one."""


def _body(args: argparse.Namespace) -> dict[str, Any]:
    make = BODIES.get(args.order)
    return {} if make is None else make(args)
