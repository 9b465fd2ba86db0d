"""From a `ModelSource` to a folder and, for a repository of a hub, to one commit.

    one request to the hub ─▶ commit, names ─▶ small files ─▶ can it run? ─▶ names of weights ─▶ room on disk ─▶ weights
      no answer in 3 s, or offline ─▶ a whole snapshot of the cache, or an error

The reference of a branch is written when its snapshot is whole. A whole snapshot of a commit needs no hub.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.checkpoint_source.cache import TOKENIZER, CachedRepo
from tandem_engine.checkpoint_source.download import Download, Report
from tandem_engine.checkpoint_source.examination import (
    CONFIG,
    examine_config,
    examine_folder,
    require_checkpoint,
    require_fallback,
    require_weights,
)
from tandem_engine.checkpoint_source.hub import Hub, Listing, ListingRequest, NoAnswerError
from tandem_engine.checkpoint_source.source import ModelSource
from tandem_engine.config import ModelImpl
from tandem_engine.model.checkpoint_folder import INDEX, SINGLE, read_weight_map, shown

SMALL_FILES = (CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", "chat_template.jinja")
"""All that is read but weights."""

MAX_SMALL = 1 << 27
"""Bytes of one of them, and of an index."""


class NotCachedError(ConfigError):
    """A repository that is not whole in the cache, when no hub may get a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """A folder on this machine and, if it is from a hub, what it is there."""

    folder: Path
    repo: str = ""
    commit: str = ""

    @property
    def name(self) -> str:
        """For clients, unless the user chooses another one."""
        return self.repo or self.folder.name

    @property
    def root(self) -> str:
        """What `name` stands for: repository and commit; empty for a folder."""
        return f"{self.repo}@{self.commit}" if self.repo else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a checkpoint is resolved for."""

    impl: ModelImpl = ModelImpl.AUTO
    weights: bool = True


def resolve(
    source: ModelSource, *, offline: bool, report: Report, needs: Needs | None = None, hub: Hub | None = None
) -> ResolvedModel:
    """Find the model on this machine, or download it. `offline`: no hub gets a request.

    Raises:
        ConfigError: there is no such model, it cannot be served, or it cannot be fetched. One sentence.
    """
    needs = needs or Needs()
    if source.folder is not None:
        examine_folder(source.folder, impl=needs.impl, weights=needs.weights)
        return ResolvedModel(folder=source.folder.resolve())
    hub = hub or Hub.of_environment()
    try:
        return _Resolution(
            source=source,
            offline=offline or hub.offline,
            report=report,
            needs=needs,
            hub=hub,
            cached=CachedRepo.of(hub.cache, source.repo),
        ).run()
    except CheckpointError as error:
        raise ConfigError(f"{source.repo}: {error}") from error
    except PermissionError as error:
        raise ConfigError(f"{error.filename} is not accessible; HF_HOME names another cache") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Resolution:
    source: ModelSource
    offline: bool
    report: Report
    needs: Needs
    hub: Hub
    cached: CachedRepo

    def run(self) -> ResolvedModel:
        whole = self._whole()
        if whole is not None and (self.offline or self.source.is_pinned):
            return self._from_cache(whole)
        if self.offline:
            raise self._absent()
        try:
            listing = listing_of(self.hub, self.source, self.report, may_serve=whole is not None)
        except ConfigError as error:
            if whole is None:
                raise
            date = self.cached.date(whole)
            raise ConfigError(f"{error}; HF_HUB_OFFLINE=1 serves it as it was downloaded on {date}") from error
        except NoAnswerError as error:
            if whole is None:
                raise ConfigError(
                    f"{self.source.repo} is not in the cache, and {self.hub.name} {error}{self.source.other_reading}"
                ) from error
            date = self.cached.date(whole)
            self.report.say(f"{self.hub.name} {error}: serving {self.source.repo} as it was downloaded on {date}")
            return self._from_cache(whole)
        return self._from_hub(listing)

    def _whole(self) -> str | None:
        return self.cached.whole_commit(self.source.revision, weights=self.needs.weights)

    def _from_cache(self, commit: str) -> ResolvedModel:
        folder = self.cached.snapshot(commit)
        examine_config(folder, impl=self.needs.impl)
        return self._resolved(commit)

    def _resolved(self, commit: str) -> ResolvedModel:
        return ResolvedModel(folder=self.cached.snapshot(commit), repo=self.source.repo, commit=commit)

    def _absent(self) -> NotCachedError:
        """The error of a start without a hub."""
        repo, way_out = self.source.repo, f"`tandem pull {self.source.text}` downloads it"
        commit = self.cached.commit_of(self.source.revision) or next(iter(self.cached.commits()), None)
        if commit is None or not self.cached.snapshot(commit).is_dir():
            return NotCachedError(
                f"{repo} is not in the cache ({self.hub.cache}): {way_out}{self.source.other_reading}"
            )
        missing = self.cached.missing(commit, weights=self.needs.weights)
        if missing is not None:
            return NotCachedError(f"{repo} is only partly in the cache, without {missing}: {way_out}")
        return NotCachedError(
            f"{repo} is in the cache, but not its revision {self.source.revision}: {way_out}, or name {repo}@{commit}"
        )

    def _from_hub(self, listing: Listing) -> ResolvedModel:
        repo, files, commit = self.source.repo, listing.files, listing.commit
        require_checkpoint(files, where=repo, made_of=listing.base_model)
        if self.needs.weights:
            require_weights(files, where=repo)
        download = Download(hub=self.hub, source=self.source, commit=commit)
        self._fetch_small(download, [name for name in SMALL_FILES if name in files], files)
        if TOKENIZER not in files:
            self.cached.record_absence(commit, TOKENIZER)
        # [config-before-weights]
        ours = examine_config(self.cached.snapshot(commit), impl=self.needs.impl)
        if self.needs.weights:
            weights = self._weights(download, files)
            if not ours and self._absent_files(commit, weights):
                require_fallback(self.cached.snapshot(commit))
            self._fetch(download, weights, self.report.progress)
        missing = self.cached.missing(commit, weights=self.needs.weights)
        if missing is not None:  # [half-snapshot]
            raise ConfigError(f"{repo}: {missing} did not arrive")
        if self.needs.weights:
            self.cached.record(self.source.revision, commit)
        return self._resolved(commit)

    def _weights(self, download: Download, files: Mapping[str, int]) -> list[str]:
        """Names of the files with weights: as in the engine, a single file wins over an index."""
        if SINGLE in files:
            return [SINGLE]
        self._fetch_small(download, [INDEX], files)
        shards = sorted(set(read_weight_map(self.cached.snapshot(download.commit) / INDEX).values()))
        for name in shards:
            if name not in files or Path(name).name != name or not name.isprintable():
                raise ConfigError(f"{self.source.repo}: {INDEX} names {shown(name)}, which the repository lacks")
        return shards

    def _fetch_small(self, download: Download, names: list[str], files: Mapping[str, int]) -> None:
        for name in names:
            if files[name] > MAX_SMALL:
                raise ConfigError(
                    f"{self.source.repo}: {name} has {gigabytes(files[name])}; at most {gigabytes(MAX_SMALL)} expected"
                )
        self._fetch(download, names, lambda _done, _total: None)

    def _fetch(self, download: Download, names: list[str], progress: Callable[[int, int], None]) -> None:
        fetch_absent(download, self._absent_files(download.commit, names), progress)

    def _absent_files(self, commit: str, names: list[str]) -> list[str]:
        folder = self.cached.snapshot(commit)
        return [name for name in names if not (folder / name).is_file()]


def listing_of(hub: Hub, source: ModelSource, report: Report, *, may_serve: bool) -> Listing:
    """What the hub has now. `may_serve`: without its answer there is a snapshot to serve.

    Raises `NoAnswerError`, `ConfigError`.
    """
    request = ListingRequest(hub, source)
    listing = request.answer(hub.wait_s)
    if listing is None and not may_serve:
        report.say(f"waiting for {hub.name}")
        listing = request.answer(hub.give_up_s - hub.wait_s)
    if listing is None:
        seconds = hub.wait_s if may_serve else hub.give_up_s
        raise NoAnswerError(f"did not answer within {seconds:g} s")
    return listing


def fetch_absent(download: Download, absent: Sequence[str], progress: Callable[[int, int], None]) -> None:
    """Download the files `absent`, if the disk has room for them. Raises `ConfigError`."""
    if absent:
        total = download.missing_bytes(absent)
        _require_room(download.hub.cache, download.source.repo, total)
        download.fetch(absent, total=total, progress=progress)


def _require_room(cache: Path, repo: str, needed: int) -> None:
    place = next(path for path in (cache, *cache.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"{repo} needs {gigabytes(needed)} more, and {place} has {gigabytes(free)}: free some, or set HF_HOME to a "
            "folder on another disk"
        )


def gigabytes(size: int) -> str:
    """`size` in bytes, for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
