"""Shapes of the models, and what they cost at least: bytes to read, operations to do."""

from collections.abc import Sequence
from dataclasses import dataclass

from peers.jobs import VOCABULARY, Job

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A Qwen3 with a head that is its embedding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def body_parameters(self) -> int:
        """Of the matrices that every token goes through."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        return VOCABULARY * self.hidden

    @property
    def parameters(self) -> int:
        return self.body_parameters + self.head_parameters

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    def kv_bytes(self, tokens: int, dtype: str) -> int:
        return tokens * self.kv_numbers_per_token * BYTES[dtype]

    def decode_bytes(self, context: int, dtype: str) -> int:
        """What one step of one stream has to read: all weights, and the KV of its context."""
        return self.parameters * BYTES[dtype] + self.kv_bytes(context, dtype)

    def operations(self, jobs: Sequence[Job]) -> int:
        """Floating-point operations that jobs need at least, without anything cached: every token but the last output
        through the body, every output from the head, causal attention."""
        total = 0
        for job in jobs:
            tokens = len(job.prompt) + job.output_len - 1
            total += 2 * self.body_parameters * tokens + 2 * self.head_parameters * job.output_len
            total += 2 * self.layers * self.heads * self.head_dim * tokens * tokens
        return total


SHAPES = {
    "q25m": Shape(hidden=384, intermediate=1152, layers=11, heads=6, kv_heads=2, head_dim=64),
    "q125m": Shape(hidden=768, intermediate=2304, layers=16, heads=12, kv_heads=4, head_dim=64),
    "q500m": Shape(hidden=1536, intermediate=4096, layers=19, heads=12, kv_heads=4, head_dim=128),
}
