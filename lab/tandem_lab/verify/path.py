"""One way in which a token can be computed, and the effect that must have occurred for it to count."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem_engine.config import CacheConfig, SchedulerConfig, SpecConfig
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.kv_events import Tier
from tandem_engine.scheduler.counters import SchedulerStats


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """One configuration and one way to drive it."""

    name: str
    cache: CacheConfig
    scheduler: SchedulerConfig
    stagger: bool = False
    """Add requests while others run, instead of all at once."""
    repeat: bool = False
    """Run all prompts once before, so that the measured run finds its prefixes cached."""
    choices: int = 1
    """Ask for each prompt this many times at once, as choices of one answer."""
    resume: bool = False
    """Give the first half of the expected output as resume_ids."""
    sessions: bool = False
    """With `resume`: that half is generated in a first turn, and the rest in another of the same session."""
    appended: bool = False
    """Half of each prompt is a turn of a session that keeps no output; the rest is another turn."""
    edited: bool = False
    """Ask for penalties, biases and bad words, and for the logprobs of the prompt."""
    disaggregated: bool = False
    """One engine prefills, another decodes, NIXL between them."""
    drained: bool = False
    """One engine begins and leaves what runs to another, NIXL between them; some must have moved."""
    fetched: bool = False
    """One engine has computed all prompts, another fetches their prefixes over NIXL; some must have come."""
    push_layers: int | None = None
    """With `disaggregated`: so many layers are sent at once; None goes by bytes."""
    rising_priority: bool = False
    """Each request is more important than the one before."""
    twice: bool = False
    """Ask for everything again, of the same engine: tokens and logprobs must be the same to the bit."""
    restart: bool = False
    """With `repeat`: the measured run is another engine's, and only files survive from the first."""
    pause: PauseMode | None = None
    """Pause and resume every few turns."""
    threaded: bool = False
    """The engine turns on a thread of its own, as the asynchronous library has it."""
    tp_size: int = 1
    """Ranks that share the model."""
    receiver_tp_size: int = 1
    """The same of the engine that decodes, or that requests are left to."""
    graphs: bool = True
    """Decode by graphs, where the device has them."""
    expects_cached: bool = False
    expects_retraction: bool = False
    expects_faults: bool = False
    speculative: SpecConfig = field(default_factory=SpecConfig)
    expects_accepted: bool = False
    """Some draft must have been right."""
    expects_tier: Tier | None = None
    """Prompt tokens must have come from here."""
    expects_swap: bool = False


def missing_effect(path: Path, cached_tokens: int, stats: Sequence[SchedulerStats]) -> str | None:
    """What `path` should have done and its engines, of which these are the `stats`, have not; None when all was."""
    if path.expects_cached and cached_tokens == 0:
        return "no prompt token came from the prefix cache"
    if path.expects_retraction and not any(one.retracted_total for one in stats):
        return "no request was retracted"
    if path.expects_accepted and accepted_drafts(stats) == 0:
        return "no draft was accepted"
    if path.expects_faults and _faults(stats) == 0:
        return "no step raised"
    return _stayed(path, stats)


def unexpected_faults(path: Path, stats: Sequence[SchedulerStats]) -> str | None:
    """Steps that raised on a path without faults; None when there were none."""
    faults = _faults(stats)
    return f"{faults} steps raised; the log has the errors" if faults and not path.expects_faults else None


def _faults(stats: Sequence[SchedulerStats]) -> int:
    return sum(one.engine_errors_total for one in stats)


def accepted_drafts(stats: Sequence[SchedulerStats]) -> int:
    """Of all engines together."""
    return sum(one.speculation.accepted_total for one in stats if one.speculation is not None)


def _stayed(path: Path, stats: Sequence[SchedulerStats]) -> str | None:
    """KV that should have left the device and come back."""
    if path.expects_tier is Tier.HOST and not any(each.host_cached_tokens_total for each in stats):
        return "no prompt token came from host memory"
    if path.expects_tier is Tier.DISK and not any(each.disk_cached_tokens_total for each in stats):
        return "no prompt token came from files"
    if path.expects_swap and not any(each.swapped_in_total for each in stats):
        return "no request was swapped and came back"
    return None


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
