"""Adapters that a command names, found once, before any process starts: all workers read one folder.

Without --lora-dir a path that is no folder may be a repository of a Hugging Face hub, as a model's may be.
"""

import argparse
import contextlib
import json
import sys

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import AdapterSource
from tandem_engine.config.flags.adapters import source_of


def locate_adapters(args: argparse.Namespace, *, offline: bool) -> None:
    """Replace repositories in `args.lora_modules` by folders, which are downloaded if they are not here.

    Raises `ConfigError`, naming the adapter.
    """
    args.lora_modules = [_located(text, args, offline=offline) for text in args.lora_modules]


def keep_adapters_here(args: argparse.Namespace) -> None:
    """As `locate_adapters` without a hub: those that are to be downloaded are left out."""
    from tandem_engine.checkpoint_source.resolve import NotCachedError

    here = []
    for text in args.lora_modules:
        with contextlib.suppress(NotCachedError):
            here.append(_located(text, args, offline=True))
    args.lora_modules = here


def _located(text: str, args: argparse.Namespace, *, offline: bool) -> str:
    """`text`, or the same adapter with its folder."""
    from tandem_engine.checkpoint_source.adapter import resolve_adapter
    from tandem_engine.checkpoint_source.resolve import NotCachedError
    from tandem_engine.checkpoint_source.source import SCHEME, parse
    from tandem_services.cli.models.download_view import download_view

    adapter = source_of(text)
    if args.lora_dir:
        if adapter.path.startswith(SCHEME):
            raise ConfigError(
                f"--lora-modules: {adapter.name}: {adapter.path} is outside --lora-dir: leave --lora-dir out, or "
                "download the adapter into it"
            )
        return text
    try:
        source = parse(adapter.path)
        if source.folder is not None:
            return text
        with download_view(source.repo, sys.stderr) as report:
            found = resolve_adapter(source, offline=offline, report=report)
    except NotCachedError as error:
        raise NotCachedError(_named(adapter, error)) from error
    except ConfigError as error:
        raise ConfigError(_named(adapter, error)) from error
    return json.dumps({"name": adapter.name, "path": str(found.folder)})


def _named(adapter: AdapterSource, error: ConfigError) -> str:
    return f"--lora-modules: {adapter.name}: {error}"
