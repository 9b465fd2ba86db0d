"""A hub as this machine reaches it, and its listing of a repository.

If there is no answer (no network, too slow, status 5xx), a cached snapshot may serve; if the answer is no, nothing may.
Messages of huggingface_hub are never repeated, because its URLs can hold secrets.
"""

import contextlib
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tandem_engine.base.addresses import Address
from tandem_engine.base.environment import set_default
from tandem_engine.base.errors import ConfigError
from tandem_engine.checkpoint_source.source import ModelSource, is_commit, is_repo

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoSibling

WAIT_S = 3.0
"""Without an answer for so long, a whole snapshot in the cache serves."""

GIVE_UP_S = 30.0
"""For an answer without which nothing can be served."""

REQUEST_S = 60.0
"""Timeout of a request, of which nothing is visible: `ListingRequest` gives up before."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """Where repositories are, and where their files are kept."""

    endpoint: str
    cache: Path
    offline: bool = False
    """It gets no request."""
    wait_s: float = WAIT_S
    give_up_s: float = GIVE_UP_S

    @classmethod
    def of_environment(cls) -> "Hub":
        """As the environment variables of huggingface_hub have it."""
        _without_telemetry()
        from huggingface_hub import constants

        return cls(
            endpoint=constants.ENDPOINT,
            cache=Path(constants.HF_HUB_CACHE).expanduser().absolute(),
            offline=constants.HF_HUB_OFFLINE,
        )

    @property
    def name(self) -> str:
        """For messages: without credentials."""
        parts = urlsplit(self.endpoint)
        return (
            str(Address(parts.hostname, parts.port)) if parts.hostname and parts.port else parts.hostname or "the hub"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """One commit of a repository."""

    commit: str
    files: Mapping[str, int]
    """Size by name; 0 where the hub has none."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """By name, `sha256:` of its content or `git:` of its blob; files of which the hub has none are left out."""
    base_model: str = ""
    """The repository of the model that this one was made of."""


class NoAnswerError(Exception):
    """The hub did not answer. The message is a clause whose subject is the hub."""


def list_files(hub: Hub, source: ModelSource) -> Listing:
    """What the hub has at `source.revision` now.

    Raises:
        ConfigError: it has no such repository or revision, or does not give it.
        NoAnswerError: it cannot be reached or is broken.
    """
    _without_telemetry()
    from httpx2 import HTTPError
    from huggingface_hub import HfApi

    try:
        with quiet_hub():
            info = HfApi(endpoint=hub.endpoint).model_info(
                source.repo, revision=source.revision, files_metadata=True, timeout=REQUEST_S
            )
    except (HTTPError, OSError) as error:
        raise read_error(error, hub, source) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _no_hub(hub) from error
    return _listing(info, hub, source)


def _without_telemetry() -> None:
    """Unless the user has enabled it: huggingface_hub sends the version of torch and the coding agent that runs it."""
    set_default("HF_HUB_DISABLE_TELEMETRY", "1")


def _listing(info: "ModelInfo", hub: Hub, source: ModelSource) -> Listing:
    if info.sha is None or not is_commit(info.sha) or info.siblings is None:
        raise _no_hub(hub)
    if info.id != source.repo and is_repo(info.id):
        raise ConfigError(f"{source.repo} is called {info.id} on {hub.name} now: name that")
    return Listing(
        commit=info.sha,
        files={file.rfilename: file.size or 0 for file in info.siblings},
        digests={file.rfilename: digest for file in info.siblings if (digest := _digest(file))},
        base_model=_base_model(info),
    )


def _digest(file: "RepoSibling") -> str:
    """Of a large file its SHA-256, of another that of the git blob; empty where the hub has neither."""
    if file.lfs is not None and _SHA256.fullmatch(str(file.lfs.sha256)):
        return f"sha256:{file.lfs.sha256}"
    return f"git:{file.blob_id}" if file.blob_id is not None and is_commit(file.blob_id) else ""


def _base_model(info: "ModelInfo") -> str:
    base = None if info.card_data is None else info.card_data.get("base_model")
    first = base[0] if isinstance(base, list) and base else base
    return first if isinstance(first, str) and is_repo(first) else ""


def _no_hub(hub: Hub) -> ConfigError:
    return ConfigError(f"{hub.name} does not answer as a Hugging Face hub does: check HF_ENDPOINT and proxies")


def read_error(error: Exception, hub: Hub, source: ModelSource) -> ConfigError | NoAnswerError:
    """What an error of huggingface_hub means."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, errors.HfHubHTTPError):
        return _read_answer(error, hub, source)
    if isinstance(error, errors.FileMetadataError):
        return _no_hub(hub)
    if isinstance(error, OSError) and error.errno is not None:
        place = error.filename or hub.cache
        return ConfigError(f"{place} cannot be written: {error.strerror}; HF_HOME names another cache")
    return NoAnswerError(_clause(error))


def _read_answer(error: "HfHubHTTPError", hub: Hub, source: ModelSource) -> ConfigError | NoAnswerError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{source.repo} is gated: accept its terms on {hub.name}, then set HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{source.repo} has no revision {source.revision} on {hub.name}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"{hub.name} has no repository {source.repo}, or it is private and HF_TOKEN must name a token that may "
            f"read it{source.other_reading}"
        )
    return _read_status(error.response.status_code, hub, source)


def _clause(error: Exception) -> str:
    from httpx2 import HTTPError, TimeoutException

    if isinstance(error, TimeoutException):
        return "does not answer"
    if isinstance(error, HTTPError):
        return f"cannot be reached ({type(error).__name__})"
    return f"sent something else than announced ({type(error).__name__})"


def _read_status(status: int, hub: Hub, source: ModelSource) -> ConfigError | NoAnswerError:
    if status in (401, 403):
        return ConfigError(
            f"{hub.name} refuses {source.repo} (status {status}): HF_TOKEN must name a token that may read it"
        )
    if status == 404:
        return ConfigError(f"{hub.name} lacks a file of {source.repo} that it lists (status 404)")
    return NoAnswerError(f"answers with status {status}")


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Without log lines of huggingface_hub: they have URLs, and what the hub wrote into headers."""
    from huggingface_hub.utils import logging as hub_logging

    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)


class ListingRequest:
    """`list_files` in a thread, because a name server that is away blocks for longer than any timeout of a request."""

    def __init__(self, hub: Hub, source: ModelSource) -> None:
        self._hub, self._source = hub, source
        self._answered = threading.Event()
        self._answer: Listing | Exception | None = None
        threading.Thread(target=self._run, name="hub-listing", daemon=True).start()

    def answer(self, within_s: float) -> Listing | None:
        """None if there is none within that time; raises as `list_files` does."""
        if not self._answered.wait(within_s):
            return None
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = list_files(self._hub, self._source)
        except Exception as error:  # noqa: BLE001  raised where the answer is awaited
            self._answer = error
        finally:
            self._answered.set()
