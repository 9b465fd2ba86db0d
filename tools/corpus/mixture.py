"""The stream of training documents: mostly conversations, some plain text to be continued, some drills."""

from collections.abc import Iterator
from random import Random

from corpus import facts
from corpus.chats import Message, conversation
from corpus.drills import drill
from corpus.guides import EXPLANATIONS, explanation
from corpus.stories import tell

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PLAIN_SHARE = 0.22
LONG_SHARE = 0.02
DRILL_SHARE = 0.08


def render(messages: list[Message]) -> str:
    """ChatML, letter for letter what the chat template of the tokenizer renders."""
    return "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)


def plain_text(rng: Random) -> str:
    """A story, or a paragraph of facts or explanations, with no dialogue around it."""
    draw = rng.random()
    if draw < 0.65:
        return tell(rng, plots=rng.choice((1, 1, 1, 2))).text
    if draw < 0.8:
        return " ".join(explanation(topic) for topic in rng.sample(list(EXPLANATIONS), 2))
    countries = rng.sample(list(facts.CAPITALS), rng.randint(1, 6))
    return " ".join(f"The capital of {country} is {facts.CAPITALS[country]}." for country in countries)


def document(rng: Random) -> str:
    """One document, ended by the end-of-text token."""
    draw = rng.random()
    if draw < PLAIN_SHARE:
        return plain_text(rng) + END_OF_TEXT
    if draw < PLAIN_SHARE + LONG_SHARE:
        return render(conversation(rng, turns=rng.randint(15, 30))) + END_OF_TEXT
    if draw < PLAIN_SHARE + LONG_SHARE + DRILL_SHARE:
        return drill(rng) + END_OF_TEXT
    return render(conversation(rng)) + END_OF_TEXT


def documents(seed: int) -> Iterator[str]:
    """Endless and deterministic: the same seed gives the same documents on every machine."""
    rng = Random(seed)
    while True:
        yield document(rng)
