"""One way in which a token can come to be computed, and what must have happened for it to count."""

from dataclasses import dataclass, field

from tandem_engine.config import CacheConfig, SchedulerConfig, SpecConfig
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.kv_events import Tier


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
