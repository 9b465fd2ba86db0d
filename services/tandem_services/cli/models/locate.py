"""The model that a command names, found once, before any process starts.

A restarted worker gets the same folder, so it can have no other commit of a repository [one-commit].
"""

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import LoadFormat, ModelImpl
from tandem_services.cli.flags import NAME, bundled_model

if TYPE_CHECKING:
    from tandem_engine.checkpoint_source.resolve import Needs, ResolvedModel
    from tandem_engine.checkpoint_source.source import ModelSource

WHAT = (
    "checkpoint directory, a model of the Hugging Face hub (org/name or org/name@revision, docs/models.md), or a name "
    "from `models` of the file of --config (default: the bundled model)"
)


def add_model_source(parser: argparse._ActionsContainer, *, operand: bool) -> None:
    """The model, as --model or as an `operand`, and --offline."""
    if operand:
        parser.add_argument("model", nargs="?", metavar="MODEL", help=WHAT)
    else:
        parser.add_argument("--model", metavar="MODEL", help=WHAT)
    add_offline(parser)


def add_offline(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--offline",
        action="store_true",
        help="send no request to a hub: serve what has been downloaded (also HF_HUB_OFFLINE=1)",
    )


def is_bundled(text: str | None) -> bool:
    """Whether the model that a user named, or did not name, is the bundled one."""
    return text in (None, NAME)


def model_source(text: str | None, names: Mapping[str, str]) -> "ModelSource":
    """What `text` names; None is the bundled model. `names`: those of the settings file.

    Raises `ConfigError`; sends no request.
    """
    from tandem_engine.checkpoint_source.source import parse

    if NAME in names:
        raise ConfigError(f"models: {NAME} is the bundled model: choose another name")
    aliases = dict(names)
    if is_bundled(text):
        aliases[NAME] = str(bundled_model())
    return parse(NAME if text is None else text, aliases or None)


def needs_of(args: argparse.Namespace) -> "Needs":
    """What the flags of an engine require of a checkpoint."""
    from tandem_engine.checkpoint_source.resolve import Needs

    return Needs(impl=ModelImpl(args.model_impl), weights=args.load_format != LoadFormat.DUMMY.value)


def locate(source: "ModelSource", *, offline: bool, needs: "Needs | None" = None) -> "ResolvedModel":
    """Find or download the model, and show how it goes. Raises `ConfigError`."""
    from tandem_engine.checkpoint_source.resolve import resolve
    from tandem_services.cli.models.download_view import download_view

    with download_view(source.repo, sys.stderr) as report:
        return resolve(source, offline=offline, report=report, needs=needs)


def find_here(source: "ModelSource", *, needs: "Needs") -> "ResolvedModel | None":
    """As `locate`, without a hub; None for a repository that is not whole in the cache.

    Raises `ConfigError` for a model that is here and cannot be served.
    """
    from tandem_engine.checkpoint_source.resolve import NotCachedError

    try:
        return locate(source, offline=True, needs=needs)
    except NotCachedError:
        return None
