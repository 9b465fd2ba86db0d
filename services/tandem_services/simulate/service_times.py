"""How long a modelled worker takes. The rates are those that workers publish in the registry."""

from bisect import bisect_left
from dataclasses import dataclass

from tandem_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceTimes:
    """One kind of worker."""

    prefill_rate: float = 10_000.0
    """Prompt tokens per second (`prefill_tokens_per_s`)."""
    chunk_tokens: int = 2048
    """Most prompt tokens of one step: who decodes beside a longer prompt waits for a chunk, not for all of it."""
    decode_steps: tuple[tuple[int, float], ...] = ((1, 0.010), (64, 0.030), (256, 0.080))
    """(Sequences, seconds) of a decode step (`decode_step_s`), ascending; between and beyond them linear."""
    token_bytes: float = 131_072.0
    """KV bytes of one token."""
    transfer_rate: float = 10e9
    """Bytes per second from a prefill to a decode worker (`transfer_bytes_per_s`)."""
    handoff_s: float = 0.002
    """Messages of one transfer, whatever its size."""
    fetch_s: float = 0.004
    """The same of one prefix fetch; half of them before its blocks move."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.decode_steps]
        if not sizes or sizes[0] < 1 or sizes != sorted(set(sizes)):
            raise ConfigError("--decode-step-ms: batch sizes must ascend from at least 1, e.g. 1:10,64:30")

    def decode_step_s(self, sequences: int) -> float:
        """Of a step in which `sequences` get a token each; 0 for none."""
        if sequences == 0:
            return 0.0
        if len(self.decode_steps) == 1:
            return self.decode_steps[0][1]
        right = bisect_left(self.decode_steps, (sequences, 0.0))
        right = min(max(right, 1), len(self.decode_steps) - 1)
        (low, low_s), (high, high_s) = self.decode_steps[right - 1 : right + 1]
        return max(1e-6, low_s + (high_s - low_s) * (sequences - low) / (high - low))

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.prefill_rate

    def exposed_transfer_s(self, tokens: int, prefill_s: float) -> float:
        """What is left after `tokens` were computed within `prefill_s`: chunks leave while others are computed."""
        total = tokens * self.token_bytes / self.transfer_rate
        last = min(tokens, self.chunk_tokens) * self.token_bytes / self.transfer_rate
        return self.handoff_s + max(last, total - prefill_s)
