"""Clients of a fleet: their requests, the responses, and how long they waited for these.

An `Ask` is a request; two equal asks have equal answers, whatever happens. A `Load` sends asks at once and
records every token and every silence.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any

import httpx

from tandem_lab.bench.load import StreamCheck, block_words

READ_TIMEOUT_S = 90.0
"""A stream that is silent for longer has hung."""


class Kind(Enum):
    """How the tokens are drawn and shown."""

    GREEDY = "greedy"
    PLAIN = "plain"
    """Greedy without logprobs: the fast path of everything."""
    SEEDED = "seeded"
    PENALIZED = "penalised"
    """Seeded, with three penalties on the tokens before."""
    CHOICES = "choices"
    """Four choices, seeded, with logprobs."""
    SCHEMA = "schema"
    REGEX = "regex"
    TOOL = "tool"
    """A structural tag, as a tool call is written."""


ANIMAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "story": {"type": "string", "maxLength": 200},
        "legs": {"type": "integer", "maximum": 9},
    },
    "required": ["name", "story", "legs"],
    "additionalProperties": False,
}
FIELDS: dict[Kind, dict[str, Any]] = {
    Kind.GREEDY: {"temperature": 0, "logprobs": 0, "ignore_eos": True},
    Kind.PLAIN: {"temperature": 0, "ignore_eos": True},
    Kind.SEEDED: {"temperature": 0.8, "seed": 7, "logprobs": 0, "ignore_eos": True},
    Kind.PENALIZED: {
        "temperature": 0.8,
        "seed": 5,
        "logprobs": 0,
        "ignore_eos": True,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    Kind.CHOICES: {"temperature": 0.8, "seed": 11, "logprobs": 1, "n": 4, "ignore_eos": True},
    Kind.SCHEMA: {
        "temperature": 0,
        "logprobs": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}},
    },
    Kind.REGEX: {"temperature": 0, "logprobs": 0, "structured_outputs": {"regex": "(fox|owl|bear)( [a-z]{1,8}){60}"}},
    Kind.TOOL: {
        "temperature": 0,
        "logprobs": 0,
        "structured_outputs": {
            "grammar": 'root ::= "<tool_call>{\\"name\\": \\"look\\", \\"arguments\\": {\\"at\\": \\"" '
            '[a-z ]{150} "\\"}}</tool_call>"'
        },
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request. `salt` keeps its prompt out of other scenarios' prefix caches and changes nothing else."""

    kind: Kind
    prompt: str
    max_tokens: int
    salt: str = ""
    adapter: str = ""
    """The model alone without."""

    @property
    def unsalted(self) -> "Ask":
        return replace(self, salt="")

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": self.adapter or model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": self.salt or "none",
            **FIELDS[self.kind],
        }


def asks(
    *kinds: Kind, count: int, prompt_words: int, max_tokens: int, salt: str = "", first: int = 0, spread: float = 0.3
) -> list[Ask]:
    """`count` asks, the kinds in turn, up to `spread` longer than asked for; a function of their number alone."""
    drawn = []
    for number in range(first, first + count):
        share = 1 + spread * (number % 7) / 6
        words = block_words(77_000 + number, max(1, round(prompt_words * share)))
        kind = kinds[number % len(kinds)]
        drawn.append(Ask(kind=kind, prompt=" ".join(words), max_tokens=max(1, round(max_tokens * share)), salt=salt))
    return drawn


@dataclass(kw_only=True, slots=True)
class ChoiceText:
    """Output of one choice."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    """Empty without logprobs."""
    logprobs: list[float] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)

    @property
    def units(self) -> list[str]:
        return self.tokens or self.text.split()


@dataclass(kw_only=True, slots=True)
class Answer:
    """One finished request. Times are seconds on this process's monotonic clock."""

    ask: Ask
    began: float
    received_at: list[float] = field(default_factory=list)
    """When each piece of text came."""
    ended: float = 0.0
    choices: dict[int, ChoiceText] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    gateway: str = ""
    """Whose URL was asked."""
    status: int = 0
    error: str | None = None
    error_events: int = 0

    def longest_silence(self, after: float) -> float:
        """Seconds without a word, of which only those after `after` count. A silence before the first word is one."""
        moments = [self.began, *self.received_at, *([] if self.error is None else [self.ended])]
        spans = pairwise(moments)
        return max((end - max(start, after) for start, end in spans if end > after), default=0.0)

    def take(self, chunk: dict[str, Any]) -> None:
        for piece in chunk["choices"]:
            choice = self.choices.setdefault(piece["index"], ChoiceText())
            choice.text += piece["text"]
            if piece["text"]:
                self.received_at.append(time.monotonic())
            if piece["logprobs"]:
                choice.tokens += piece["logprobs"]["tokens"]
                choice.logprobs += [logprob or 0.0 for logprob in piece["logprobs"]["token_logprobs"]]
            if piece["finish_reason"]:
                choice.finishes.append(piece["finish_reason"])


@dataclass(kw_only=True, slots=True)
class Load:
    """Asks under way, spread over the gateways in turn."""

    urls: Sequence[str]
    model: str
    answers: dict[Ask, Answer] = field(default_factory=dict)
    _http: httpx.AsyncClient = field(
        default_factory=lambda: httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx.Timeout(READ_TIMEOUT_S, pool=None),
        )
    )
    _tasks: "list[asyncio.Task[Answer]]" = field(default_factory=list)

    async def __aenter__(self) -> "Load":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()
        await self._http.aclose()

    def send(self, wanted: Sequence[Ask]) -> None:
        for ask in wanted:
            url = self.urls[len(self._tasks) % len(self.urls)]
            self._tasks.append(asyncio.create_task(self._ask(url, ask)))

    @property
    def under_way(self) -> list[Answer]:
        """Those that have begun and not ended."""
        return [answer for answer in self.answers.values() if answer.received_at and not answer.ended]

    @property
    def speaking(self) -> int:
        return len(self.under_way)

    @property
    def begun(self) -> int:
        return sum(bool(answer.received_at) for answer in self.answers.values())

    @property
    def finished(self) -> bool:
        return all(task.done() for task in self._tasks)

    async def gathered(self) -> list[Answer]:
        """Wait for all of them."""
        return list(await asyncio.gather(*self._tasks))

    async def leave(self) -> None:
        """Every client hangs up, whatever it was waiting for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, url: str, ask: Ask) -> Answer:
        answer = self.answers[ask] = Answer(ask=ask, began=time.monotonic(), gateway=url)
        try:
            async with self._http.stream("POST", f"{url}/v1/completions", json=ask.body(self.model)) as response:
                answer.status = response.status_code
                if response.status_code == 200:
                    await _read(response, answer)
                else:
                    await response.aread()
                    answer.error = f"HTTP {response.status_code}: {response.text[:300]}"
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.monotonic()
        return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    whole = StreamCheck()
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        answer.error_events += data.startswith('{"error"')
        chunk = whole.take(data)
        answer.id = answer.id or next(iter(whole.ids), "")
        if chunk is not None:
            answer.take(chunk)
    answer.usage = whole.usage
    answer.error = _fault(whole, answer)


def _fault(check: StreamCheck, answer: Answer) -> str | None:
    """What is corrupted about a stream, None when nothing is."""
    finishes = {len(choice.finishes) for choice in answer.choices.values()}
    faults = (
        (check.error is not None, check.error),
        (not check.done, "the stream ended without [DONE]"),
        (len(check.ids) != 1, f"{len(check.ids)} response ids in one stream"),
        (finishes != {1}, "a choice without exactly one finish_reason"),
        (not check.usage, "no usage, although it was requested"),
    )
    return next((text for wrong, text in faults if wrong), None)
