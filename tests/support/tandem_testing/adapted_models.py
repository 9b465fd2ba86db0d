"""Models with adapters in slots, computed densely: one step, without pages or a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem_engine.config import AdapterConfig
from tandem_engine.forward.adapter_rows import NO_ADAPTER, AdapterRows, SlotRows
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.base import CausalLM
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.loader import load_model
from tandem_engine.parallel.group import SingleRank
from tandem_testing.dense_attention import DenseAttend, with_states


@dataclass
class Adapted:
    """A tiny model with adapters in slots."""

    ours: CausalLM
    adapters: LoadedAdapters

    def logits(self, prompts: Sequence[Tensor], slots: Sequence[int], wanted: Tensor | None = None) -> Tensor:
        """Of one step."""
        return step_logits(self.ours, self.adapters, prompts, slots, wanted)


def step_logits(
    model: CausalLM,
    adapters: LoadedAdapters,
    prompts: Sequence[Tensor],
    slots: Sequence[int],
    wanted: Tensor | None = None,
) -> Tensor:
    """Of one step, [T, vocab] or of the `wanted` tokens."""
    lens = [len(prompt) for prompt in prompts]
    every = torch.arange(sum(lens))
    wanted = every if wanted is None else wanted
    by_token = np.repeat(np.array(slots), lens)
    step = StepAdapters(
        rows=AdapterRows(tokens=rows_of(by_token), wanted=rows_of(by_token[wanted.numpy()])),
        slots=adapters.weights,
    )
    positions = torch.cat([torch.arange(length) for length in lens])
    attend = with_states(DenseAttend(specs=model.attention, extend_lens=lens), model)
    with torch.inference_mode():
        return model.logits(model.forward(torch.cat([*prompts]), positions, attend, wanted, step))


def rows_of(slots: "np.ndarray[Any, Any]") -> tuple[SlotRows, ...]:
    return tuple(
        SlotRows(int(slot), torch.from_numpy(np.flatnonzero(slots == slot)))
        for slot in np.unique(slots)
        if slot != NO_ADAPTER
    )


def load_adapted(path: Path, *folders: Path, group: Any = None) -> Adapted:
    """The checkpoint in `path` with adapters, in float32. Raises `CheckpointError`."""
    base, group = read_model_config(path), group or SingleRank()
    return Adapted(
        ours=load_model(path, base, torch.float32, progress=False, group=group),
        adapters=load_adapters(path, *folders, group=group),
    )


def load_adapters(path: Path, *folders: Path, group: Any = None) -> LoadedAdapters:
    """Of the checkpoint in `path`, in float32. Raises `CheckpointError`."""
    config, base = AdapterConfig.of({folder.name: folder for folder in folders}), read_model_config(path)
    return LoadedAdapters.load(config, base, dtype=torch.float32, device="cpu", group=group or SingleRank())
