"""Memory and schedulers that the paths of the exactness matrix are made of, for prompts of a known size."""

from dataclasses import dataclass, replace

from tandem_engine.config import CacheConfig, SchedulerConfig

CHOICES = 3
"""Answers to a prompt, where a path asks for several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setups:
    """Each property is one setup; a path takes one of memory and one of schedulers."""

    context_length: int
    longest: int
    """Tokens of a prompt and its output."""
    num_prompts: int

    # Memory

    def pages_of(self, page_size: int) -> CacheConfig:
        """Room for all at once, with a prefix cache."""
        return self._cache(page_size, self.num_prompts)

    @property
    def warm(self) -> CacheConfig:
        return self.pages_of(16)

    @property
    def cold(self) -> CacheConfig:
        """Without a prefix cache."""
        return replace(self.warm, enable_prefix_cache=False)

    @property
    def crowd(self) -> CacheConfig:
        """Room for several choices of each."""
        return self._cache(16, CHOICES * self.num_prompts)

    @property
    def tight(self) -> CacheConfig:
        """Room for the longest request and a half."""
        return replace(self.warm, num_pages=2 + (3 * self.longest // 2) // 16)

    def _cache(self, page_size: int, sequences: int) -> CacheConfig:
        return CacheConfig(page_size=page_size, num_pages=1 + sequences * (self.longest // page_size + 2))

    # Schedulers

    @property
    def plain(self) -> SchedulerConfig:
        """Whole prompts, one step after the other."""
        return SchedulerConfig(
            context_length=self.context_length,
            chunked_prefill_size=4096,
            max_prefill_tokens=8192,
            enable_overlap=False,
            enable_mixed_chunk=False,
            audit_every_step=True,
        )

    @property
    def overlap(self) -> SchedulerConfig:
        return replace(self.plain, enable_overlap=True)

    @property
    def mixed(self) -> SchedulerConfig:
        """Small chunks, in steps that decode too."""
        return replace(self.overlap, enable_mixed_chunk=True, chunked_prefill_size=16, max_prefill_tokens=48)

    @property
    def mixed_without_overlap(self) -> SchedulerConfig:
        return replace(self.mixed, enable_overlap=False)

    @property
    def retracting(self) -> SchedulerConfig:
        """The newest request gives its pages back every third step."""
        return replace(self.mixed, force_retract_every=3, max_retractions=10_000)

    @property
    def eager(self) -> SchedulerConfig:
        """Admission expects next to no output: with too few pages requests must give them back again and again."""
        return replace(self.mixed, init_new_token_ratio=0.01, min_new_token_ratio=0.01, max_retractions=10_000)
