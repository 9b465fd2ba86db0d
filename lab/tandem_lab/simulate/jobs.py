"""What a modelled worker does for a request, and the steps in which it does it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem_lab.simulate.prefix_fetch import WantedPrefix

Callback = Callable[[], None]


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """What one worker does for one request."""

    chain: Sequence[bytes]
    """Digests of the prompt's whole blocks; of a job that was retracted, of its output's as well."""
    prompt_tokens: int
    output_tokens: int
    """To decode here; 0 on a prefill worker."""
    on_prompt: Callback
    """The prompt is computed; where the job decodes, the first token is there."""
    on_end: Callback
    """The last token is there."""
    on_room: Callback | None = None
    """Pages are there: the prompt is computed elsewhere. None: it is computed here."""
    wanted: WantedPrefix | None = None
    """What to fetch before it joins the queue."""
    serial: int = 0
    """Which of the worker's jobs it is."""
    matched: int = 0
    """Blocks found in the cache on the first admission."""
    missing_tokens: int = 0
    """Prompt tokens to compute or to receive, as of the first admission."""
    generated: int = 0
    """Output tokens at the end of its prefill, or when it was retracted."""
    target: int = 0
    """Tokens of its prefill: the prompt, and what it generated before it was retracted."""
    computed: int = 0
    """Tokens of `target` whose KV is here."""
    held: int = 0
    """Leading blocks that it shares with the cache."""
    private: int = 0
    """Further pages."""
    joined: int | None = None
    """Number of the first step in which it decodes; None while it does not."""
    retractions: int = 0
    stopped_at: float | None = None
    """When it was retracted: its next token is late."""

    @property
    def pages(self) -> int:
        return self.held + self.private

    @property
    def left(self) -> int:
        """Tokens still to compute before it decodes."""
        return self.target - self.computed


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPart:
    """Tokens of one prompt in a step."""

    job: Job
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """`count` equal steps in a row; those with prompts are single."""

    count: int
    prompts: tuple[PromptPart, ...]
    rows: int
    """Sequences that get a token each."""

    @property
    def prompt_tokens(self) -> int:
        return sum(part.tokens for part in self.prompts)


@dataclass(kw_only=True, slots=True)
class StepEnd:
    """What a step changed."""

    prompts: list[Job] = field(default_factory=list)
    """Their prompts are computed: the next token is there, or the transfer can begin."""
    ended: list[Job] = field(default_factory=list)
    """They have their last token and hold nothing any more."""
