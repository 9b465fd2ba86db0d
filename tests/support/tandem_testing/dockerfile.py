"""A Dockerfile as its stages and their instructions, as far as ours needs it: no heredocs, no escapes but line ends."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One instruction, its continued lines joined."""

    name: str
    """In capitals."""
    text: str
    """What follows the name."""

    def words(self) -> list[str]:
        """Without flags; of the JSON form, its strings."""
        if self.text.startswith("["):
            return list(json.loads(self.text))
        return [word for word in self.text.split() if not word.startswith("--")]

    def flag(self, name: str) -> str | None:
        """Value of `--name=…`."""
        found = re.search(rf"(?:^|\s)--{name}=(\S+)", self.text)
        return found[1] if found else None


@dataclass(kw_only=True, slots=True)
class Stage:
    """From one FROM to the next."""

    name: str
    base: str
    """Another stage's name, or a reference with ARGs filled in."""
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, name: str) -> list[Instruction]:
        """Its instructions of that name."""
        return [one for one in self.instructions if one.name == name]

    def last(self, name: str) -> Instruction | None:
        """The one that holds."""
        return next(iter(reversed(self.of(name))), None)


def read_dockerfile(path: Path) -> dict[str, Stage]:
    """Stages by name, in their order."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for instruction in _instructions(path.read_text(encoding="utf-8")):
        if instruction.name == "FROM":
            base, _, name = instruction.words()
            stage = Stage(name=name, base=_filled_in(base, arguments))
            stages[name] = stage
        elif stage is None:
            name, _, value = instruction.text.partition("=")
            arguments[name] = value
        else:
            stage.instructions.append(instruction)
    return stages


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        Instruction(name=name.upper(), text=rest.strip())
        for name, _, rest in (line.partition(" ") for line in joined.splitlines())
    ]


def _filled_in(text: str, arguments: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], text)
