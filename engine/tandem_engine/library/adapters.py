"""Adapters of library callers: loaded with the model under a name, and named with a prompt.

    llm = LLM("models/tandem-mini", adapters={"sql": "adapters/sql"})
    llm.generate(["SELECT", "SELECT"], params, lora_request=[LoRARequest("sql"), None])

None is the model alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem_engine.base.errors import ConfigError, InvalidRequestError
from tandem_engine.config import AdapterConfig
from tandem_engine.library.prompts import Encoded
from tandem_engine.messages.requests import AdapterRef


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for a prompt, with vLLM's fields. Its name is what counts; it has been loaded with the model."""

    lora_name: str
    lora_int_id: int = 1
    """vLLM's number of the adapter; it has no effect."""
    lora_path: str = ""
    """If given, the folder that the name was loaded from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedAdapters:
    """What a `LoRARequest` can name."""

    refs: Mapping[str, AdapterRef] = field(default_factory=dict)
    config: AdapterConfig = field(default_factory=AdapterConfig)

    def ref_of(self, request: LoRARequest) -> AdapterRef:
        """Raises `InvalidRequestError` for one that is not loaded."""
        ref = self.refs.get(request.lora_name)
        if ref is None:
            known = ", ".join(self.refs) or "none"
            raise InvalidRequestError(
                f"adapter {request.lora_name!r} is not loaded (loaded: {known}); give its folder to the constructor, "
                f'adapters={{"{request.lora_name}": "FOLDER"}}',
                param="lora_request",
            )
        [path] = (source.path for source in self.config.sources if source.name == request.lora_name)
        if request.lora_path and Path(request.lora_path).resolve() != Path(path).resolve():
            raise InvalidRequestError(
                f"adapter {request.lora_name!r} was loaded from {path}, not from {request.lora_path}; load that one "
                "under another name",
                param="lora_request",
            )
        return ref

    def given(
        self, prompts: Sequence[Encoded], requests: LoRARequest | Sequence[LoRARequest | None] | None
    ) -> list[Encoded]:
        """`prompts`, each with the adapter that is to compute it: one for all, or one for each."""
        if requests is None:
            return [*prompts]
        each = [requests] * len(prompts) if isinstance(requests, LoRARequest) else requests
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"{len(each)} lora_request for {len(prompts)} prompts: give one, or one for each", param="lora_request"
            )
        return [
            prompt if request is None else replace(prompt, adapter=self.ref_of(request))
            for prompt, request in zip(prompts, each, strict=True)
        ]


NOT_NEEDED = ("enable_lora", "max_loras", "max_cpu_loras", "lora_modules", "lora_paths", "max_loras_per_batch")
"""Options of vLLM and SGLang. Here all adapters stay in memory, and a batch may have any number of them."""

OF_WORKERS = ("lora_dir", "lora_turn", "allow_runtime_lora_updating")
"""Flags about paths and names that others than the program choose."""


def adapter_config(adapters: Mapping[str, str | Path] | None, options: dict[str, object]) -> AdapterConfig:
    """Of the constructor's `adapters`, and `max_lora_rank` if it is among `options`, where it is taken out.

    Raises `ConfigError` for a value that cannot be.
    """
    theirs = next((name for name in NOT_NEEDED if name in options), None)
    if theirs is not None:
        raise ConfigError(f"{theirs} is not needed: leave it out; adapters={{name: folder}} loads adapters")
    workers = next((name for name in OF_WORKERS if name in options), None)
    if workers is not None:
        raise ConfigError(f"{workers} is a setting of workers: leave it out; adapters={{name: folder}} loads adapters")
    rank = options.pop("max_lora_rank", None)
    if rank is None:
        return AdapterConfig.of(adapters or {})
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ConfigError(f"max_lora_rank takes a number, got {rank!r}")
    return AdapterConfig.of(adapters or {}, max_rank=rank)
