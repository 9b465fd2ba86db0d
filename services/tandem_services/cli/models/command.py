"""`tandem pull` and `tandem models`: models of the Hugging Face hub on this machine."""

import argparse

from tandem_engine.base.errors import ConfigError
from tandem_engine.config.flags import add_model_impl_flag, positive_int
from tandem_services.cli.flags import NAME, bundled_model
from tandem_services.cli.models.download_view import megabytes
from tandem_services.cli.models.locate import locate, model_source

PULL_EXAMPLES = """\
examples:
  tandem pull Qwen/Qwen3-0.6B                 its newest commit
  tandem pull Qwen/Qwen3-0.6B@v1.0            a branch, a tag or a commit
  HF_TOKEN=… tandem pull org/private          one that needs a token
  tandem pull Qwen/Qwen3-0.6B --into /models  to /models/COMMIT, for machines that share /models
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    pull = commands.add_parser(
        "pull",
        help="download a model",
        description="Download a model of the Hugging Face hub into the cache of huggingface_hub: exactly the files "
        "that serving needs. `tandem serve` does the same if a model is absent.",
        epilog=PULL_EXAMPLES,
    )
    pull.add_argument("model", metavar="MODEL", help="org/name or org/name@revision")
    add_model_impl_flag(pull)
    _add_volume_flags(pull.add_argument_group("download to a volume"))
    pull.set_defaults(run=run_pull)
    models = commands.add_parser(
        "models",
        help="list models on this machine",
        description="List the bundled model and all models in the cache of huggingface_hub: commit, size, and whether "
        "`tandem serve` can serve them.",
    )
    models.set_defaults(run=run_models)


def _add_volume_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--into",
        metavar="DIR",
        help="download to DIR/COMMIT instead of the cache: resumed where it was interrupted, each file compared with "
        "its digest on the hub, and there only when it is whole. DIR is for this repository alone",
    )
    group.add_argument("--max-bytes", type=positive_int, metavar="N", help="size of the volume (default: as it says)")
    group.add_argument(
        "--prune",
        action="store_true",
        help="then remove all other commits from DIR, but those of --keep",
    )
    group.add_argument(
        "--keep", action="append", default=[], metavar="COMMIT", help="with --prune: a commit that stays; repeatable"
    )
    group.add_argument(
        "--progress-port", type=int, metavar="PORT", help="serve GET /progress as JSON on this port (default: none)"
    )
    group.add_argument(
        "--result", metavar="FILE", help="write the result as JSON: commit, size and fingerprint, or reason and message"
    )


def run_pull(args: argparse.Namespace) -> int:
    from tandem_engine.checkpoint_source.hub import Hub
    from tandem_engine.checkpoint_source.resolve import Needs
    from tandem_engine.config import ModelImpl

    if Hub.of_environment().offline:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing is downloaded: unset it")
    _check_volume_flags(args)
    source = model_source(args.model, {})
    if source.folder is not None:
        raise ConfigError(f"{args.model} is on this machine: `tandem serve {args.model}` serves it")
    if args.into is not None:
        from tandem_services.cli.models.volume import pull_into

        return pull_into(args, source)
    model = locate(source, offline=False, needs=Needs(impl=ModelImpl(args.model_impl)))
    print(f"{model.root} is in {model.folder}")
    return 0


def _check_volume_flags(args: argparse.Namespace) -> None:
    from tandem_engine.checkpoint_source.source import is_commit

    given = (args.max_bytes, args.prune, args.keep, args.progress_port, args.result)
    if args.into is None and any(given):
        raise ConfigError("--max-bytes, --prune, --keep, --progress-port and --result are for a volume: add --into DIR")
    if args.keep and not args.prune:
        raise ConfigError("--keep says what --prune leaves: add --prune, or leave --keep out")
    for commit in args.keep:
        if not is_commit(commit):
            raise ConfigError(f"--keep {commit!r}: a commit has 40 hexadecimal digits")


def run_models(args: argparse.Namespace) -> int:
    del args
    from tandem_engine.checkpoint_source.cached_models import cached_models
    from tandem_engine.checkpoint_source.hub import Hub

    print(f"{NAME}  bundled, {bundled_model()}")
    for model in cached_models(Hub.of_environment().cache):
        revisions = f" ({', '.join(model.revisions)})" if model.revisions else ""
        state = f"cannot be served: {model.problem}" if model.problem else "can be served"
        print(f"{model.repo}@{model.commit[:12]}{revisions}  {megabytes(model.size)} MB  {state}")
    return 0
