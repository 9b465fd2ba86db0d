"""What `tandem up` and `tandem serve` print when everything is ready."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from tandem_engine.base.addresses import Address, is_loopback, loopback_beside
from tandem_services.cli.ending import how_to_end


def greeting(args: argparse.Namespace, *, url: str, model: str, workers: Mapping[str, int], run_dir: Path) -> str:
    """`url`: of the API, as this machine reaches it; `workers`: health port by name."""
    keyed = args.api_keys is not None
    header = " -H 'Authorization: Bearer KEY'" if keyed else ""
    chat = f"{'TANDEM_API_KEY=KEY ' if keyed else ''}tandem chat{'' if url.endswith(':8000') else f' --url {url}'}"
    name, port = next(iter(workers.items()))
    address = Address(loopback_beside(args.host), port)
    return f"""
Tandem serves {model} at {url}

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{{"model": "{model}", \
"stream": true, "messages": [{{"role": "user", "content": "Tell me a story about a fox who lives near a river."}}]}}'

  {chat}          chat in the terminal
  {url}/metrics   numbers; GET /v1/requests/ID/explain shows where a request ran
{_console_line(args, url)}  tandem ctl {address} links   commands to {name}{_others(workers)}
  {run_dir}   logs

{how_to_end()} stops everything.
"""


def _console_line(args: argparse.Namespace, url: str) -> str:
    guarded = args.api_keys is not None or is_loopback(args.host)
    served = guarded if args.console is None else args.console
    return f"  {url}/console   the fleet, requests' timelines and a playground, in a browser\n" if served else ""


def _others(workers: Mapping[str, int]) -> str:
    rest = [f"{name} {port}" for name, port in list(workers.items())[1:]]
    return f"; others: {', '.join(rest)}" if rest else ""
