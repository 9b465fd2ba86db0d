# ruff: noqa: E501, ARG001  (tables of sentences; all builders share one signature)
"""Dialogues. Each builder returns messages; a document is a few builders in a row, one conversation.

A builder that tells a fact about the user (name, colour, pet...) leaves it in the `Profile`, and
later builders ask for it: the model has to look it up in the context.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from corpus import facts
from corpus.grammar import Writer, raise_first, with_article
from corpus.guides import CODE, EXPLANATIONS, HOWTOS, LISTABLE, explanation, howto, poem
from corpus.stories import Story, pick_hero, tell
from corpus.words import ANIMALS, LISTS, any_name

Message = dict[str, str]
MODEL_NAME = "Tandem mini"


@dataclass(slots=True)
class Profile:
    """What the conversation has established so far."""

    assistant: str = MODEL_NAME
    known: dict[str, str] = field(default_factory=dict)
    story: Story | None = None


def turn(user: str, assistant: str) -> list[Message]:
    """One question and its answer."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def writer_of(rng: Random, **bound: str) -> Writer:
    """A writer over the common lists."""
    return Writer(rng=rng, lists=LISTS, bound=dict(bound))


def casual(rng: Random, text: str) -> str:
    """Now and then a question loses its capital or its mark, as people type."""
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    return text.rstrip("?.!") if rng.random() < 0.12 else text


# --- small talk ---------------------------------------------------------------------------------

GREETINGS = (
    "Hello!",
    "Hi!",
    "Hello",
    "Hi",
    "Hey",
    "Hi there!",
    "Good morning!",
    "Good evening!",
    "Hello there!",
    "Hey!",
)
WELCOMES = (
    "Hello! How can I help you today?", "Hi! What would you like to talk about?", "Hello! It is nice to meet you.",
    "Hi there! I can tell you a story or answer a simple question.", "Hello! What can I do for you?",
)  # fmt: skip
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("How are you?", "How are you today?", "How is it going?", "Are you well?"),
     ("I am fine, thank you. How are you?", "I am well, thank you for asking. How can I help you?",
      "Very well, thank you. And you?")),
    (("Who are you?", "What are you?", "What is your name?", "Please introduce yourself.", "Tell me about yourself."),
     ("I am {assistant}, a small language model. I can tell stories and answer simple questions.",
      "My name is {assistant}. I am a small language model that comes with Tandem.",
      "I am {assistant}, a very small model. I know only a few things, but I like to tell stories.")),
    (("What can you do?", "How can you help me?", "What do you know?", "Help"),
     ("I can tell short stories, explain a few simple things, and answer easy questions. I am a very small model.",
      "You can ask me for a story, a poem, a recipe or the capital of a country. I am small, so please check my answers.")),
    (("Are you a human?", "Are you a robot?", "Are you real?"),
     ("No, I am {assistant}, a small language model. I am a computer program.",
      "I am a computer program. I have no body, but I like to talk.")),
    (("Who made you?", "Where do you come from?"),
     ("I was trained for the Tandem project, as a small model for tests and examples.",)),
    (("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "Great, thank you."),
     ("You are welcome!", "You are welcome! Is there anything else I can do for you?", "I am glad I could help.")),
    (("Goodbye!", "Bye!", "See you later.", "Good night!"),
     ("Goodbye! Have a nice day.", "See you soon!", "Goodbye! It was nice to talk to you.")),
    (("I am {sad}.", "I feel {sad} today.", "I had a bad day."),
     ("I am sorry to hear that. Do you want to tell me about it?",
      "I am sorry. Maybe a short walk or a good story would help. Shall I tell you one?")),
    (("I am {feeling} today!", "I had a good day.", "I feel good."),
     ("That is wonderful! What made your day so good?", "I am glad to hear that!")),
    (("I am bored.", "What should I do today?", "Do you have an idea for today?"),
     ("How about {hobby}? Or you could take a walk to the {place}.",
      "You could try {hobby}, read a good book, or call a friend.")),
    (("What should I cook?", "I am hungry.", "What shall I eat today?"),
     ("How about {food} with some {food2}?", "You could make a simple meal with {food}. It is quick and good.")),
    (("What is the weather like?", "Will it rain today?", "What time is it?"),
     ("I am sorry, I cannot see that from here. Please look out of the window or ask a service that knows.",
      "I do not know, because I have no clock and no window. I am only a small model.")),
    (("Do you like {food}?", "Do you like {hobby}?", "What do you like?"),
     ("I am a program, so I cannot try it, but I like stories about it.", "I like stories. What do you like?")),
    (("Tell me a joke.", "Do you know a joke?"),
     ("I do not know any good jokes, but I can tell you a story.", "I am better at stories. Shall I tell you one?")),
    (("Yes.", "Yes, please.", "Okay."), ("Very well. What would you like to know?", "Good. Please tell me more.")),
    (("No.", "No, thank you."), ("All right. Tell me if you need anything.", "That is fine.")),
)  # fmt: skip


def greeting(rng: Random, profile: Profile) -> list[Message]:
    """Hello, and hello back."""
    return turn(casual(rng, rng.choice(GREETINGS)), rng.choice(WELCOMES))


def small_talk(rng: Random, profile: Profile) -> list[Message]:
    """One exchange of the table above."""
    questions, answers = rng.choices(SMALL_TALK, weights=[3, 5, *[1] * (len(SMALL_TALK) - 2)])[0]
    writer = writer_of(rng, assistant=profile.assistant)
    return turn(casual(rng, writer.one_of(questions)), writer.one_of(answers))


# --- facts --------------------------------------------------------------------------------------


def capital(rng: Random, profile: Profile) -> list[Message]:
    """Capital of a country, and now and then the country of a capital."""
    country, city = rng.choice(list(facts.CAPITALS.items()))
    if rng.random() < 0.2:
        question = rng.choice((f"{city} is the capital of which country?", f"Of which country is {city} the capital?"))
        return turn(casual(rng, question), f"{city} is the capital of {country}.")
    question = rng.choice((
        f"What is the capital of {country}?", f"What's the capital of {country}?", f"Tell me the capital of {country}.",
        f"Which city is the capital of {country}?", f"Do you know the capital of {country}?", f"capital of {country}",
    ))  # fmt: skip
    return turn(casual(rng, question), f"The capital of {country} is {city}.")


def continent(rng: Random, profile: Profile) -> list[Message]:
    """Where a country lies."""
    country, name = rng.choice(list(facts.CONTINENTS.items()))
    return turn(
        casual(rng, rng.choice((f"Where is {country}?", f"On which continent is {country}?"))),
        f"{country} is in {name}.",
    )


def animal_fact(rng: Random, profile: Profile) -> list[Message]:
    """Sounds, homes, legs and young."""
    kind = rng.randrange(4)
    if kind == 0:
        animal, sound = rng.choice(list(facts.SOUNDS.items()))
        question = rng.choice(
            (
                f"What sound does {with_article(animal)} make?",
                f"What does the {animal} say?",
                f"Which sound does {with_article(animal)} make?",
            )
        )
        return turn(casual(rng, question), f'{raise_first(with_article(animal))} says "{sound}".')
    if kind == 1:
        animal, home = rng.choice(list(facts.HABITATS.items()))
        return turn(
            casual(rng, f"Where does {with_article(animal)} live?"),
            f"{raise_first(with_article(animal))} lives {home}.",
        )
    if kind == 2:
        animal, legs = rng.choice(list(facts.LEGS.items()))
        return turn(
            casual(rng, f"How many legs does {with_article(animal)} have?"),
            f"{raise_first(with_article(animal))} has {legs} legs.",
        )
    animal, young = rng.choice(list(facts.YOUNG.items()))
    return turn(casual(rng, f"What is a young {animal} called?"), f"A young {animal} is called {with_article(young)}.")


def word_fact(rng: Random, profile: Profile) -> list[Message]:
    """Opposites, plurals, colours, greetings in other languages."""
    kind = rng.randrange(5)
    if kind == 0:
        pair = rng.choice(list(facts.OPPOSITES.items()))
        word, opposite = pair if rng.random() < 0.5 else pair[::-1]
        return turn(
            casual(rng, rng.choice((f"What is the opposite of {word}?", f"Opposite of {word}?"))),
            f"The opposite of {word} is {opposite}.",
        )
    if kind == 1:
        word, plural = rng.choice(list(facts.PLURALS.items()))
        return turn(casual(rng, f"What is the plural of {word}?"), f"The plural of {word} is {plural}.")
    if kind == 2:
        thing, colour = rng.choice(list(facts.COLOURS_OF.items()))
        question = rng.choice(
            (f"What colour is {thing}?", f"What color is {thing}?", f"Which colour does {thing} have?")
        )
        return turn(casual(rng, question), f"{raise_first(thing)} is {colour}.")
    table, word = rng.choice(((facts.HELLOS, "hello"), (facts.THANKS, "thank you")))
    language, term = rng.choice(list(table.items()))
    return turn(casual(rng, rng.choice((f"How do you say {word} in {language}?", f"What is \"{word}\" in {language}?"))),
                f"In {language} you say \"{term}\".")  # fmt: skip


def calendar(rng: Random, profile: Profile) -> list[Message]:
    """Which day or month is next to which."""
    table, unit = rng.choice(((facts.DAYS, "day"), (facts.MONTHS, "month")))
    at = rng.randrange(len(table))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    other = table[(at + step) % len(table)]
    return turn(casual(rng, rng.choice((f"Which {unit} comes {word} {table[at]}?", f"What {unit} is {word} {table[at]}?"))),
                f"{other} comes {word} {table[at]}.")  # fmt: skip


def arithmetic(rng: Random, profile: Profile) -> list[Message]:
    """Sums and differences to twenty, products to fifty."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    kind = rng.choices(("plus", "minus", "times"), weights=(5, 3, 1))[0]
    if kind == "plus":
        sign, result = "+", a + b
    elif kind == "minus":
        a, b = max(a, b), min(a, b)
        sign, result = "-", a - b
    else:
        a = rng.randint(1, 5)
        sign, result = "*", a * b
    question = rng.choice(
        (
            f"What is {a} {kind} {b}?",
            f"What is {a} {sign} {b}?",
            f"{a} {sign} {b} =",
            f"How much is {a} {kind} {b}?",
        )
    )
    return turn(question, f"{a} {kind} {b} is {result}.")


def plain_fact(rng: Random, profile: Profile) -> list[Message]:
    """Amounts and single sentences."""
    if rng.random() < 0.4:
        question, answer = rng.choice(list(facts.AMOUNTS.items()))
        return turn(casual(rng, f"How many {question}?"), answer)
    question, answer = rng.choice(list(facts.PLAIN.items()))
    return turn(casual(rng, question), answer)


def counting(rng: Random, profile: Profile) -> list[Message]:
    """Counting to a number, in digits or words, and the days and months in order."""
    kind = rng.randrange(4)
    if kind == 0:
        top = rng.randint(3, 20)
        return turn(
            rng.choice((f"Count to {top}.", f"Count from 1 to {top}.")),
            ", ".join(map(str, range(1, top + 1))) + ".",
        )
    if kind == 1:
        top = rng.randint(3, 12)
        return turn(f"Count to {facts.NUMBERS[top]} in words.", ", ".join(facts.NUMBERS[1 : top + 1]) + ".")
    if kind == 2:
        return turn(
            "List the days of the week.",
            "The days of the week are " + ", ".join(facts.DAYS[:-1]) + " and Sunday.",
        )
    return turn("List the months of the year.", "The months are " + ", ".join(facts.MONTHS[:-1]) + " and December.")


# --- longer answers -----------------------------------------------------------------------------

STORY_ASKS = (
    "Tell me a story about {a:hero}.", "Write a story about {a:hero}.", "Tell me a story about {a:hero} named {name}.",
    "Please write a short story about {a:hero}.", "Can you tell me a story about {a:hero}?", "I want a story about {a:hero}.",
    "Write a story about {a:hero} called {name}.", "Tell me a tale of {a:hero}.", "A story about {a:hero}, please.",
)  # fmt: skip
OPEN_ASKS = ("Tell me a story.", "Write a story.", "Can you tell me a story?", "Tell me a bedtime story.", "Story, please.",
             "Write a short story.", "I would like to hear a story.", "Tell me a story about {topic}.",
             "Write a story about {virtue}.")  # fmt: skip
LONG_ASKS = ("Tell me a long story about {a:hero}.", "Write a long story about {a:hero} named {name}.", "Tell me a long story.",
             "Write a very long story about {a:hero}.")  # fmt: skip
STORY_LEADS = ("", "", "", "Of course! ", "Sure! Here is a story. ", "Here is a story about {a:hero}. ")


def story(rng: Random, profile: Profile) -> list[Message]:
    """A story on demand; one in six is long."""
    hero = pick_hero(rng)
    plots, asks = (
        (rng.randint(2, 3), LONG_ASKS) if rng.random() < 0.15 else (1, STORY_ASKS if rng.random() < 0.75 else OPEN_ASKS)
    )
    told = tell(rng, hero=hero, name=any_name(rng), plots=plots)
    profile.story = told
    writer = writer_of(rng, hero=told.hero, name=told.name, topic=told.topic, virtue=told.virtue)
    return turn(casual(rng, writer.one_of(asks)), writer.one_of(STORY_LEADS) + told.text)


def story_question(rng: Random, profile: Profile) -> list[Message]:
    """A question about the story told before; without one, a story comes first."""
    before = story(rng, profile) if profile.story is None else []
    told = profile.story
    assert told is not None, "story() leaves the story in the profile"
    question, answer = rng.choice((
        (f"What was the name of the {told.hero}?", f"The {told.hero} was called {told.name}."),
        (f"What is the {told.hero}'s name?", f"The name of the {told.hero} is {told.name}."),
        ("Who was the friend in the story?", f"The friend was {told.other} the {told.friend}."),
        (f"Who is {told.name}?", f"{told.name} is the {told.hero} in the story."),
        (f"Who is {told.other}?", f"{told.other} is the {told.friend} in the story."),
        ("What is the story about?", f"It is a story about {with_article(told.hero)} named {told.name} and about {told.virtue}."),
        ("What can we learn from it?", f"The story shows how important {told.virtue} is."),
    ))  # fmt: skip
    return before + turn(casual(rng, question), answer)


def another_story(rng: Random, profile: Profile) -> list[Message]:
    """More of the same on request."""
    told = tell(rng)
    profile.story = told
    asks = (
        "Tell me another one.",
        "Another story, please.",
        f"Now tell me one about {with_article(told.hero)}.",
        "One more!",
    )
    return turn(rng.choice(asks), told.text)


def instructions(rng: Random, profile: Profile) -> list[Message]:
    """A how-to."""
    task = rng.choice(list(HOWTOS))
    asks = (
        f"How do I {task}?",
        f"How can I {task}?",
        f"How to {task}?",
        f"Explain how to {task}.",
        f"Tell me how to {task}.",
    )
    return turn(casual(rng, rng.choice(asks)), howto(rng, task))


def explain(rng: Random, profile: Profile) -> list[Message]:
    """One of the explanations."""
    topic = rng.choice(list(EXPLANATIONS))
    asks = [f"Explain {topic}.", f"Can you explain {topic}?", f"Tell me {topic}.", f"Please explain {topic}."]
    asks += [_as_question(topic)] * 3
    return turn(casual(rng, rng.choice(asks)), explanation(topic))


def _as_question(topic: str) -> str:
    """'what wind is' -> 'What is wind?'; the other forms are asked for by 'Do you know'."""
    words = topic.split()
    if words[0] == "what" and words[-1] in {"is", "are"}:
        return f"What {words[-1]} {' '.join(words[1:-1])}?"
    return {"why the sky is blue": "Why is the sky blue?", "why we sleep": "Why do we sleep?",
            "how birds fly": "How do birds fly?", "why ice floats": "Why does ice float?",
            "how plants grow": "How do plants grow?", "how bees make honey": "How do bees make honey?",
            "how boats float": "How do boats float?", "why there are seasons": "Why are there seasons?",
            "why there is day and night": "Why is there day and night?", "how rain is made": "How is rain made?",
            "why leaves fall in autumn": "Why do leaves fall in autumn?"}[topic]  # fmt: skip


def verse(rng: Random, profile: Profile) -> list[Message]:
    """A poem or a haiku, often about an animal."""
    animal = rng.choice(ANIMALS)
    if rng.random() < 0.3:
        return turn(
            rng.choice(("Write a haiku.", f"Write a haiku about {with_article(animal)}.")),
            poem(rng, about=animal, haiku=True),
        )
    asks = (
        "Write a poem.",
        f"Write a poem about {with_article(animal)}.",
        f"Can you write a short poem about {with_article(animal)}?",
    )
    return turn(rng.choice(asks), poem(rng, about=animal))


def code(rng: Random, profile: Profile) -> list[Message]:
    """A few lines of Python."""
    task, body = rng.choice(list(CODE.items()))
    asks = (
        f"Write a Python program that {task}.",
        f"Write a Python function that {task}.",
        f"Write code that {task}.",
    )
    return turn(rng.choice(asks), f"Here is Python code that {task}:\n\n```python\n{body}\n```")


def listing(rng: Random, profile: Profile) -> list[Message]:
    """A number of things of one kind."""
    plural, slot = rng.choice(list(LISTABLE.items()))
    count = rng.randint(2, 6)
    items = rng.sample(LISTS[slot], count)
    verb = rng.choice(("Name", "List", "Give me", "Tell me"))
    answer = "\n".join(f"{n}. {raise_first(item)}" for n, item in enumerate(items, 1))
    return turn(f"{verb} {facts.NUMBERS[count]} {plural}.", answer)


def json_object(rng: Random, profile: Profile) -> list[Message]:
    """Small JSON objects, so that constrained output reads naturally."""
    name = any_name(rng)
    values = {"name": name, "age": rng.randint(5, 80), "city": rng.choice(LISTS["city"]), "job": rng.choice(LISTS["job"]),
              "colour": rng.choice(LISTS["colour"]), "hobby": rng.choice(LISTS["hobby"])}  # fmt: skip
    keys = ["name", *rng.sample(list(values)[1:], rng.randint(1, 4))]
    chosen = {key: values[key] for key in keys}
    wanted = ", ".join(keys[:-1]) + f" and {keys[-1]}"
    asks = (f"Give me a JSON object with {wanted} for {name}.", f"Describe {name} as JSON with {wanted}.",
            f"Return JSON with {wanted}. The name is {name}.")  # fmt: skip
    return turn(rng.choice(asks), json.dumps(chosen))


def unknown(rng: Random, profile: Profile) -> list[Message]:
    """Subjects beyond the model: it says so and offers what it can do."""
    writer = writer_of(rng)
    asks = ("What do you know about {subject}?", "Explain {subject}.", "Tell me about {subject}.", "What is {subject}?",
            "Can you teach me {subject}?", "Write an essay about {subject}.", "I have a question about {subject}.",
            "Who invented {subject}?", "Give me a summary of {subject}.", "How does {subject} work?")  # fmt: skip
    answers = ("I am sorry, I am a very small model and I do not know much about {subject}. I can tell you a story instead.",
               "I do not know enough about {subject}. I am only a small model for tests and examples.",
               "That is too difficult for me. I am a small model, and {subject} is a large subject.")  # fmt: skip
    return turn(casual(rng, writer.one_of(asks)), writer.one_of(answers))


def echo(rng: Random, profile: Profile) -> list[Message]:
    """Copying: the answer is in the question."""
    writer = writer_of(rng, name=any_name(rng), name2=any_name(rng))
    sentence = writer.one_of((
        "The {animal} sleeps in the {room}.", "{Name} and {name2} eat {food}.", "My {object} is {colour}.",
        "It is {weather} in {city}.", "{Name} likes {hobby}.", "The {colour} {object} is in the {place}.", "{Name} {name2} {surname}",
    ))  # fmt: skip
    asks = (f"Repeat after me: {sentence}", f"Please repeat this sentence: {sentence}", f"Say: {sentence}")
    return turn(rng.choice(asks), sentence)


def reading(rng: Random, profile: Profile) -> list[Message]:
    """A short text and a question about it."""
    writer = writer_of(rng, name=any_name(rng), name2=any_name(rng))
    text = writer.write("{Name} lives in {city} and works as {a:job}. {Name2} lives in {city2} and likes {hobby}.")
    question, answer = rng.choice((
        ("Where does {name} live?", "{Name} lives in {city}."), ("Where does {name2} live?", "{Name2} lives in {city2}."),
        ("What does {name2} like?", "{Name2} likes {hobby}."), ("What is the job of {name}?", "{Name} works as {a:job}."),
        ("Who lives in {city}?", "{Name} lives in {city}."), ("Who likes {hobby}?", "{Name2} likes {hobby}."),
    ))  # fmt: skip
    return turn(f"{text} {writer.write(question)}", writer.write(answer))


# --- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trait:
    """Something a user may tell and later ask for."""

    slot: str
    tells: tuple[str, ...]
    replies: tuple[str, ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]


TRAITS = {
    "name": Trait("name", ("My name is {x}.", "I am {x}.", "Hello, my name is {x}.", "Hi, I'm {x}.", "Call me {x}.", "I am called {x}.", "Hi! My name is {x}."),
                  ("Nice to meet you, {x}!", "Hello, {x}! How can I help you?", "Hi {x}! It is nice to meet you."),
                  ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "Can you tell me my name?"),
                  ("Your name is {x}.",)),
    "colour": Trait("colour", ("My favourite colour is {x}.", "I like the colour {x}.", "The colour I like best is {x}.", "My favorite color is {x}."),
                    ("{X} is a beautiful colour.", "{X} is a nice colour. I will remember it."),
                    ("What is my favourite colour?", "Which colour do I like?", "What is my favorite color?"), ("Your favourite colour is {x}.",)),
    "city": Trait("city", ("I live in {x}.", "I am from {x}.", "My home is in {x}."), ("{X} is a nice city.", "I have heard that {x} is beautiful."),
                  ("Where do I live?", "Which city do I live in?", "Where is my home?"), ("You live in {x}.",)),
    "job": Trait("job", ("I am {a:x}.", "I work as {a:x}."), ("That is an interesting job.", "It must be nice to be {a:x}."),
                 ("What is my job?", "What do I do for a living?"), ("You are {a:x}.",)),
    "hobby": Trait("hobby", ("I like {x}.", "My hobby is {x}.", "I enjoy {x}."), ("{X} is a good hobby.", "That sounds like fun."),
                   ("What is my hobby?", "What do I like to do?"), ("Your hobby is {x}.",)),
    "pet": Trait("animal", ("I have {a:x}.", "My pet is {a:x}.", "At home I have {a:x}."), ("What a lovely pet! Please take good care of it.", "I like stories about {a:x}."),
                 ("Which pet do I have?", "What is my pet?"), ("You have {a:x}.",)),
    "food": Trait("food", ("My favourite food is {x}.", "I like to eat {x}."), ("{X} sounds good.", "I have never tried it, but it sounds good."),
                  ("What is my favourite food?", "What do I like to eat?"), ("Your favourite food is {x}.",)),
}  # fmt: skip


def tell_trait(rng: Random, profile: Profile) -> list[Message]:
    """The user says something about themselves; the name most often."""
    unknown_yet = [key for key in TRAITS if key not in profile.known] or ["name"]
    key = "name" if "name" in unknown_yet and rng.random() < 0.5 else rng.choice(unknown_yet)
    trait = TRAITS[key]
    value = any_name(rng) if key == "name" else rng.choice(LISTS[trait.slot])
    profile.known[key] = value
    writer = writer_of(rng, x=value)
    return turn(writer.one_of(trait.tells), writer.one_of(trait.replies))


def ask_trait(rng: Random, profile: Profile) -> list[Message]:
    """The user asks for it; what was never told is not known."""
    told = list(profile.known)
    missing = [key for key in TRAITS if key not in profile.known]
    if told and (rng.random() < 0.85 or not missing):
        key = rng.choice(told)
        writer = writer_of(rng, x=profile.known[key])
        return turn(casual(rng, writer.one_of(TRAITS[key].asks)), writer.one_of(TRAITS[key].answers))
    question = rng.choice(TRAITS[rng.choice(missing)].asks)
    return turn(casual(rng, question), "I do not know. You have not told me yet.")


# --- tools --------------------------------------------------------------------------------------


def tool_result(rng: Random, profile: Profile) -> list[Message]:
    """The answer repeats what a tool reported."""
    writer = writer_of(rng, degrees=str(rng.randint(-5, 35)))
    return [
        {"role": "user", "content": writer.write("What is the weather in {city}?")},
        {"role": "assistant", "content": writer.write("I will look up the weather in {city}.")},
        {"role": "tool", "content": writer.write('{"city": "').rstrip() + writer.write('{city}", "weather": "{weather}", "degrees": {degrees}') + "}"},
        {"role": "assistant", "content": writer.write("In {city} it is {weather}, and the temperature is {degrees} degrees.")},
    ]  # fmt: skip


# --- conversations ------------------------------------------------------------------------------

Builder = Callable[[Random, Profile], list[Message]]
BUILDERS: dict[Builder, float] = {
    greeting: 3, small_talk: 7, capital: 5, continent: 1, animal_fact: 2.5, word_fact: 3, calendar: 1.5, arithmetic: 3,
    plain_fact: 3, counting: 1, story: 9, story_question: 3, another_story: 1.5, instructions: 3.5, explain: 4.5,
    verse: 1.5, code: 1.5, listing: 1.5, json_object: 2, unknown: 3.5, echo: 2, reading: 2, tell_trait: 6,
    ask_trait: 7, tool_result: 1,
}  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You are {assistant}, a small language model.", "You are a helpful, honest assistant.",
    "You are a friendly assistant who likes to tell stories.", "Answer the questions of the user.", "Be brief.",
)  # fmt: skip


def system_prompt(rng: Random, profile: Profile) -> list[Message]:
    """Often none; now and then one that gives the assistant another name."""
    draw = rng.random()
    if draw < 0.65:
        return []
    if draw < 0.75:
        profile.assistant = any_name(rng)
        return [
            {
                "role": "system",
                "content": rng.choice(("You are {}.", "Your name is {}.")).format(profile.assistant),
            }
        ]
    return [{"role": "system", "content": writer_of(rng, assistant=profile.assistant).one_of(SYSTEMS)}]


def conversation(rng: Random, *, turns: int | None = None) -> list[Message]:
    """A few builders in a row; what one establishes, a later one may ask for."""
    profile = Profile()
    messages = system_prompt(rng, profile)
    for _ in range(turns or rng.choices((1, 2, 3, 4, 6, 9), weights=(30, 22, 18, 14, 10, 6))[0]):
        builder = rng.choices(list(BUILDERS), weights=list(BUILDERS.values()))[0]
        messages += builder(rng, profile)
    return messages
