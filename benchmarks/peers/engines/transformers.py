"""transformers, in the project's own environment: `generate`, and its continuous batching."""

from peers.engines.base import LineEngine, Setting


def generate(setting: Setting) -> LineEngine:
    return LineEngine("transformers", "in_transformers", setting, continuous=False)


def continuous_batching(setting: Setting) -> LineEngine:
    return LineEngine("transformers CB", "in_transformers", setting, continuous=True)
