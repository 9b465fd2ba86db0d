"""From what a user names as a LoRA adapter to a folder on this machine.

    a folder                             as it is
    org/name[@revision], hf://…          config and tensors of one commit, in the cache of huggingface_hub

Nothing else of the repository is fetched: the model's own tokenizer and chat template serve. What the files say is
checked by the engine, which knows the model.
"""

from collections.abc import Collection

from tandem_engine.base.errors import ConfigError
from tandem_engine.checkpoint_source.cache import CachedRepo
from tandem_engine.checkpoint_source.download import Download, Report
from tandem_engine.checkpoint_source.examination import ADAPTER
from tandem_engine.checkpoint_source.hub import Hub, NoAnswerError
from tandem_engine.checkpoint_source.resolve import (
    NotCachedError,
    ResolvedModel,
    fetch_absent,
    gigabytes,
    listing_of,
)
from tandem_engine.checkpoint_source.source import ModelSource

WEIGHTS = "adapter_model.safetensors"
FILES = (ADAPTER, WEIGHTS)

MAX_CONFIG = 1 << 20
"""Bytes, as the engine reads it."""


def resolve_adapter(source: ModelSource, *, offline: bool, report: Report, hub: Hub | None = None) -> ResolvedModel:
    """Find the adapter on this machine, or download it. `offline`: no hub gets a request.

    Raises:
        ConfigError: there is no such adapter, or it cannot be fetched. One sentence.
    """
    if source.folder is not None:
        return ResolvedModel(folder=source.folder)
    hub = hub or Hub.of_environment()
    cached = CachedRepo.of(hub.cache, source.repo)
    offline = offline or hub.offline
    try:
        commit = _whole_commit(cached, source.revision)
        if commit is None or not (offline or source.is_pinned):
            commit = _latest(hub, source, cached, report, offline=offline, here=commit)
    except PermissionError as error:
        raise ConfigError(f"{error.filename} is not accessible; HF_HOME names another cache") from error
    return ResolvedModel(folder=cached.snapshot(commit), repo=source.repo, commit=commit)


def _latest(
    hub: Hub, source: ModelSource, cached: CachedRepo, report: Report, *, offline: bool, here: str | None
) -> str:
    """The commit that `source.revision` is now, or that is `here` where the hub does not answer."""
    if offline:
        raise NotCachedError(
            f"{source.repo} is not in the cache ({hub.cache}): a start without --offline and HF_HUB_OFFLINE downloads "
            f"it{source.other_reading}"
        )
    try:
        listing = listing_of(hub, source, report, may_serve=here is not None)
    except NoAnswerError as error:
        if here is None:
            raise ConfigError(
                f"{source.repo} is not in the cache, and {hub.name} {error}{source.other_reading}"
            ) from error
        report.say(f"{hub.name} {error}: serving {source.repo} as it was downloaded")
        return here
    except ConfigError as error:
        if here is None:
            raise
        raise ConfigError(f"{error}; HF_HUB_OFFLINE=1 serves it as it was downloaded") from error
    _require_adapter(source.repo, listing.files)
    if listing.files[ADAPTER] > MAX_CONFIG:
        raise ConfigError(f"{source.repo}: {ADAPTER} has {gigabytes(listing.files[ADAPTER])}; at most 1.0 MB expected")
    folder = cached.snapshot(listing.commit)
    download = Download(hub=hub, source=source, commit=listing.commit, continued_by="the next start")
    fetch_absent(download, [name for name in FILES if not (folder / name).is_file()], report.progress)
    cached.record(source.revision, listing.commit)
    return listing.commit


def _whole_commit(cached: CachedRepo, revision: str) -> str | None:
    """That of `revision`, if both files are here."""
    commit = cached.commit_of(revision)
    whole = commit is not None and all((cached.snapshot(commit) / name).is_file() for name in FILES)
    return commit if whole else None


def _require_adapter(repo: str, files: Collection[str]) -> None:
    if ADAPTER not in files:
        raise ConfigError(f"{repo} is no LoRA adapter: it has no {ADAPTER}")
    if WEIGHTS not in files:
        pickled = "; pickled tensors are never read: save it with safe_serialization=True"
        reason = pickled if "adapter_model.bin" in files else ""
        raise ConfigError(f"{repo} has no {WEIGHTS}{reason}")
