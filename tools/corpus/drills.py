"""Copying drills: word sequences that repeat, and pairs that are looked up again.

A small model learns the wording of the templates long before it learns to look back in its context.
These documents can be predicted in no other way, so they bring that ability forward.
"""

from random import Random

from corpus.words import LISTS, invented_name

VOCABULARY = tuple(sorted({word for words in LISTS.values() for word in words}))
SEPARATORS = (" ", ", ", "\n")
RELATIONS = ("{}: {}", "{} has {}", "{} likes {}", "The {} of {}", "{} - {}", '"{}": "{}"')


def item(rng: Random) -> str:
    """A listed word, or an invented one no template knows."""
    return invented_name(rng) if rng.random() < 0.35 else rng.choice(VOCABULARY)


def repetition(rng: Random) -> str:
    """A sequence, two to five times."""
    separator = rng.choice(SEPARATORS)
    sequence = separator.join(item(rng) for _ in range(rng.randint(4, 20)))
    return "\n".join([sequence] * rng.randint(2, 5))


def lookup(rng: Random) -> str:
    """Pairs in one order, then the same pairs in other orders."""
    relation = rng.choice(RELATIONS)
    pairs = list({item(rng): item(rng) for _ in range(rng.randint(2, 8))}.items())
    lines: list[str] = []
    for _ in range(rng.randint(2, 4)):
        lines += [relation.format(*pair) for pair in rng.sample(pairs, len(pairs))]
    return "\n".join(lines)


def drill(rng: Random) -> str:
    """Either kind."""
    return repetition(rng) if rng.random() < 0.5 else lookup(rng)
