"""Steps that a GPU replays as graphs."""

from dataclasses import dataclass

from tandem_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig:
    """Decode steps that a GPU runs again without being told each operation. Names follow SGLang flags."""

    enabled: bool = True
    max_rows: int = 0
    """Of the largest graph, a token of output each; 0 is what `--max-running-requests` can need, within bounds."""
    sizes: tuple[int, ...] = ()
    """Rows of each graph; () is a few up to the largest."""

    def __post_init__(self) -> None:
        if self.max_rows < 0:
            raise ConfigError(f"--cuda-graph-max-bs must be at least 1, got {self.max_rows}")
        if self.sizes and min(self.sizes) < 1:
            raise ConfigError(f"--cuda-graph-bs must be numbers of at least 1, got {min(self.sizes)}")
        if self.sizes and self.max_rows and min(self.sizes) > self.max_rows:
            raise ConfigError(
                f"--cuda-graph-max-bs {self.max_rows} leaves none of --cuda-graph-bs {' '.join(map(str, self.sizes))}"
            )
