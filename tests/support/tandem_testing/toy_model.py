"""A causal language model small enough to reason about, for tests of what runs around a model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.config import ModelConfig, RopeConfig
from tandem_engine.model.attention.backend import Attend, AttentionSpec
from tandem_testing.forward_builders import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, PLAIN

VOCAB_SIZE = 97


@dataclass
class ToyModel:
    """Random embeddings, attention in every layer, a random head: the next token depends on the whole history."""

    embedding: Tensor
    position: Tensor
    head: Tensor

    @classmethod
    def random(cls) -> "ToyModel":
        generator = torch.Generator().manual_seed(3)
        rows = NUM_HEADS + 2 * NUM_KV_HEADS
        return cls(
            embedding=torch.randn(VOCAB_SIZE, rows, HEAD_DIM, generator=generator),
            position=torch.randn(1024, rows, HEAD_DIM, generator=generator),
            head=torch.randn(NUM_HEADS * HEAD_DIM, VOCAB_SIZE, generator=generator),
        )

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            family="llama",
            vocab_size=VOCAB_SIZE,
            hidden_size=NUM_HEADS * HEAD_DIM,
            intermediate_size=1,
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            max_position=1024,
            rms_eps=1e-6,
            rope=RopeConfig(),
            tie_embeddings=False,
        )

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        return PLAIN

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        qkv = self.embedding[input_ids] + self.position[positions]
        q, k, v = qkv.split_with_sizes((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
        hidden = sum((attend(layer, q, k, v) for layer in range(NUM_LAYERS)), start=torch.zeros(()))
        return hidden[wanted]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head
