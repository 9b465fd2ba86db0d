"""`tandem pull` and `tandem models`: models of the Hugging Face hub on this machine."""

import argparse

from tandem_engine.base.errors import ConfigError
from tandem_engine.config.flags import add_model_impl_flag
from tandem_services.cli.flags import NAME, bundled_model
from tandem_services.cli.models.download_view import megabytes
from tandem_services.cli.models.locate import locate, model_source

PULL_EXAMPLES = """\
examples:
  tandem pull Qwen/Qwen3-0.6B                 its newest commit
  tandem pull Qwen/Qwen3-0.6B@v1.0            a branch, a tag or a commit
  HF_TOKEN=… tandem pull org/private          one that needs a token
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
    pull.set_defaults(run=run_pull)
    models = commands.add_parser(
        "models",
        help="list models on this machine",
        description="List the bundled model and all models in the cache of huggingface_hub: commit, size, and whether "
        "`tandem serve` can serve them.",
    )
    models.set_defaults(run=run_models)


def run_pull(args: argparse.Namespace) -> int:
    from tandem_engine.checkpoint_source.hub import Hub
    from tandem_engine.checkpoint_source.resolve import Needs
    from tandem_engine.config import ModelImpl

    if Hub.of_environment().offline:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing is downloaded: unset it")
    source = model_source(args.model, {})
    if source.folder is not None:
        raise ConfigError(f"{args.model} is on this machine: `tandem serve {args.model}` serves it")
    model = locate(source, offline=False, needs=Needs(impl=ModelImpl(args.model_impl)))
    print(f"{model.root} is in {model.folder}")
    return 0


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
