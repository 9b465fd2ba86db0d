"""Models files of a gateway under test, and fleets of mock engines that open for their entries."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem_services.gateway.config import ModelConfig
from tandem_services.gateway.models.service import Fleet
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, script
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS


@dataclass(eq=False)
class OpenedFleet:
    parts: Fleet
    chooser: FakeChooser
    outdated: bool = False


@dataclass
class Door:
    """Fleets of one mock engine each, which answers with its model's name."""

    rack: Any
    """Of mock engines."""
    tokenizer: object
    refusal: Exception | None = None
    """Of the next fleets."""
    refused: int = 0
    closed: list[str] = field(default_factory=list)

    async def open(self, model: ModelConfig) -> OpenedFleet:
        if self.refusal is not None and model.name.startswith("bad"):
            self.refused += 1
            raise self.refusal
        text = f"I am {model.name}."
        says = MockBehavior(token=scripted_tokens(script(self.tokenizer, text, eos=EOS)), eos=EOS)
        engine = self.rack.add(f"{model.name}-{len(self.rack.engines)}", says)
        engine.model = model.name
        chooser = FakeChooser([engine.view])
        parts = Fleet(
            config=model,
            chooser=chooser,
            sessions=SessionShelf(),
            context=self.rack.context,
            tokenizer=self.tokenizer,
        )
        return OpenedFleet(parts, chooser)

    async def close(self, fleet: OpenedFleet) -> None:
        self.closed.append(fleet.parts.config.name)


def entry(names: str | tuple[str, ...], **changes) -> dict:
    first = names if isinstance(names, str) else names[0]
    return {"model": ".", "served_model_name": names, "cluster": first, **changes}


def replace_file(path: Path, text: str) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text)
    os.replace(fresh, path)
