# ruff: noqa: E501  (a table of sentences reads best with one sentence to a line)
"""Stories: an opening, a plot of four beats, an ending. Each beat is chosen from several wordings."""

from dataclasses import dataclass
from random import Random

from corpus.grammar import Writer
from corpus.words import ANIMALS, LISTS, PEOPLE, THINGS, invented_name

PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}
# People whose word already says which pronoun they take.
GENDERED = {
    "girl": "she", "boy": "he", "fisherman": "he", "king": "he", "queen": "she", "prince": "he",
    "princess": "she", "postman": "he", "wizard": "he", "grandmother": "she", "grandfather": "he",
}  # fmt: skip

OPENINGS = (
    "Once upon a time, there was {a:trait} {hero} named {name}. {Name} lived in a small [house|home] near the {place}.",
    "[Once|Long ago], in a {place} far away, there lived {a:trait} {hero} called {name}.",
    "{Name} was {a:trait} {hero} who lived [by the edge of|close to|not far from] the {place}.",
    "In a little {place} there lived {a:hero} whose name was {name}. Everybody knew that {name} was very {trait}.",
    "There was once {a:hero} named {name}. {He} was {trait}, and {he} [loved|liked] {food} more than anything else.",
    "At the edge of the {place} stood an old {treekind} tree, and under it lived {a:trait} {hero} named {name}.",
)
SCENES = (
    "One {weather} {time}, {name} woke up [early|late] and looked out of the window.",
    "It was a {weather} day in {season}, and the wind smelled of {food}.",
    "Every {time}, {name} walked along the path and greeted everyone {he} met.",
    "{His} best friend was {a:friend} named {other}, and the two of them did everything together.",
    "{Name} had a {colour} {object} that {he} carried everywhere.",
    "That {season} was [long|short] and {weather}, and there was [much|little] to do.",
    "{Name} liked the quiet of the {time}, when the sky turned {colour}.",
    "Most days were the same, but this day was going to be different.",
)


@dataclass(frozen=True, slots=True)
class Plot:
    """Beats in order, and the virtue the ending names."""

    topic: str
    virtue: str
    beats: tuple[tuple[str, ...], ...]


PLOTS = (
    Plot(
        "a lost {object}",
        "friendship",
        (
            (
                "One day {name} lost {his} {object}. {He} looked under the bed and behind the door, but it was gone.",
                "But one {time} the {object} was not in its place. {Name} had lost it, and {he} felt {sad}.",
                "Then, on a {weather} {time}, {name} noticed that {his} {object} was missing.",
            ),
            (
                '{He} asked {other} the {friend} for help. "[Let us look together|I will help you]", said {other}.',
                '"Have you seen my {object}?" {name} asked {other} the {friend}. "No," said {other}, "but I will help you."',
                '{Other} the {friend} came by and saw that {name} was {sad}. "We will find it," {other} said.',
            ),
            (
                "They searched in the {place2} and along the road. They asked {a:animal3}, but nobody had seen it.",
                "Together they went to the {place2}. They looked behind every stone and under every leaf.",
                "First they looked in the {room}, then they walked all the way to the {place2}.",
            ),
            (
                "At last {other} found the {object} under a {treekind} tree. {Name} jumped with joy.",
                "Just when they wanted to give up, {name} saw something {colour2} in the grass. It was the {object}!",
                "In the end {a:animal3} showed them the {object}. It had been in the {place2} all the time.",
            ),
        ),
    ),
    Plot(
        "a storm",
        "courage",
        (
            (
                "One {time} dark clouds came over the {place}. The wind grew strong and the rain began to fall.",
                "Then a great storm came. The trees bent low and the {place} turned dark.",
                "Suddenly there was thunder, and a storm came down from the mountains.",
            ),
            (
                "{Name} heard a small voice. It was {other} the {friend}, who was alone and {sad}.",
                "{Other} the {friend} was caught outside and could not find the way home.",
                'A branch fell, and {other} the {friend} could not get out. "Help!" {other} called.',
            ),
            (
                "{Name} was afraid too, but {he} took a lamp and a rope and went out into the rain.",
                '"I am coming!" called {name}. {He} held on to the fence and walked step by step.',
                "{Name} took a deep breath. {He} knew that being brave does not mean having no fear.",
            ),
            (
                "{He} found {other} and brought {pron_other} home. They sat by the fire and ate warm {food2}.",
                "When the storm was over, the two friends came out and saw a rainbow above the {place}.",
                "They waited in {a:room} until the sky was clear again, and then they shared some {food2}.",
            ),
        ),
    ),
    Plot(
        "a long journey",
        "curiosity",
        (
            (
                "One day {name} found an old map. It showed the way to a hidden {place2}.",
                '{Name} had always wanted to see the {place2}. "Today I will go," {he} said.',
                "{Other} the {friend} told {name} about a {place2} where everything was {colour2}. {Name} wanted to see it.",
            ),
            (
                "{He} packed some {food2}, a blanket and {a:object2}, and {he} set off before the sun was up.",
                "{He} put some {food2} into a bag, closed the door and started to walk.",
                "{Name} said goodbye to {his} friends and took the road to the {place2}.",
            ),
            (
                'On the way {he} met {a:animal3}. "Where are you going?" asked the {animal3}. "To the {place2}," said {name}.',
                "The road was long. {He} crossed a river, climbed a hill and slept under the stars.",
                "After two days {he} came to a wide river. {A:animal3} showed {him} where to cross.",
            ),
            (
                "At last {name} reached the {place2}. It was more beautiful than {he} had ever thought.",
                "When {he} arrived, {he} sat down and looked for a long time. Then {he} went home and told everyone about it.",
                "In the {place2} {he} found no gold, but {he} found many new friends.",
            ),
        ),
    ),
    Plot(
        "a garden",
        "patience",
        (
            (
                "One {time} {name} planted a small seed in the garden and gave it some water.",
                '{Other} the {friend} gave {name} a seed. "Plant it and wait," {other} said.',
                "{Name} found a seed on the path. {He} put it into the ground behind the house.",
            ),
            (
                "{He} looked at it every day, but nothing happened. {Name} was {sad}.",
                "The first day nothing grew. The second day nothing grew. {Name} wanted to dig it up again.",
                '"Why does it not grow?" {he} asked. "Good things need time," said {other} the {friend}.',
            ),
            (
                "So {name} waited. {He} gave it water in the morning and sang to it in the evening.",
                "The rain came, and then the sun came. {Name} waited and took care of the little seed.",
                "Many days went by. {Name} learned to wait, and {he} read a book beside the garden.",
            ),
            (
                "In {season2} a small green leaf came out, and later a {colour2} flower opened.",
                "Then one morning there was a tall plant with {colour2} flowers. Everyone came to see it.",
                "At last it grew into a {treekind} tree, and all the birds of the {place} came to sing in it.",
            ),
        ),
    ),
    Plot(
        "a race",
        "hard work",
        (
            (
                "One day there was a race in the {place}. {Other} the {friend} was the fastest of all.",
                "Every {season2} there was a big race around the {place}, and {name} wanted to take part.",
                '"I am faster than you," said {other} the {friend}. "Then let us have a race," said {name}.',
            ),
            (
                "{Name} was slow, so {he} practised every {time2}. {He} ran up the hill and down again.",
                "Everyone laughed, but {name} did not mind. {He} practised day after day.",
                "{He} got up early each day to run. At first {he} was tired, but soon {he} grew strong.",
            ),
            (
                "When the race began, {other} ran ahead and then stopped to eat some {food2}.",
                "The race started. {Other} was in front, and {name} came behind, step by step.",
                '"Ready, steady, go!" called the {animal3}. {Name} ran as well as {he} could.',
            ),
            (
                "{Name} did not stop, and in the end {he} won. {Other} shook {his} hand and smiled.",
                "{Name} came second, but {he} had never been so fast before. {Other} was proud of {him}.",
                "They reached the finish at the same moment. Both laughed and shared the prize, a basket of {food2}.",
            ),
        ),
    ),
    Plot(
        "sharing",
        "sharing",
        (
            (
                "It was a hard {season2}, and there was little to eat. {Name} had one basket of {food2}.",
                '{Name} found a big basket full of {food2}. "All of this is mine," {he} said.',
                "One {time} {name} baked the best {food2} in the whole {place}.",
            ),
            (
                "Then {other} the {friend} knocked at the door. {Other} was hungry and cold.",
                "On the way home {he} met {other} the {friend}, who had nothing to eat.",
                '{Other} the {friend} smelled it and came to the window. "May I have a little?" asked {other}.',
            ),
            (
                "{Name} thought for a while. Then {he} cut everything in two equal parts.",
                "At first {name} wanted to say no. But {he} saw that {other} was {sad}, and {he} opened the door.",
                '"There is enough for both of us," said {name}, and {he} gave the bigger half to {other}.',
            ),
            (
                "From that day on {other} came every week and brought something too, and they were never hungry.",
                "They ate together and told stories until late. The food had never tasted so good.",
                "Later, when {name} had nothing, {other} came and shared a pot of {food3}.",
            ),
        ),
    ),
    Plot(
        "a new friend",
        "kindness",
        (
            (
                "One day a stranger came to the {place}. It was {a:friend} called {other}, and nobody talked to {pron_other}.",
                "{Name} was often alone. One {time} {he} saw {a:friend} sitting by the road.",
                "A new family moved into the {place}. Their youngest was {a:friend} named {other}.",
            ),
            (
                '"Hello," said {name}. "My name is {name}. What is your name?" "I am {other}," said the {friend}.',
                '{Name} went over and said, "Do you want to play with me?" {Other} looked up and smiled.',
                '{Name} brought some {food2} and said, "Welcome! I am {name}."',
            ),
            (
                "They played near the {place2} all day. {Other} knew many games that {name} had never heard of.",
                "They built a little boat and let it swim on the water.",
                "{Other} told about the far {place2}, and {name} showed {pron_other} the best place to find {food2}.",
            ),
            (
                "In the evening they were best friends, and they stayed best friends for ever.",
                "After that, {name} was never lonely again.",
                "The next day everyone wanted to meet {other}, and soon the whole {place} was one big family.",
            ),
        ),
    ),
    Plot(
        "a secret door",
        "trust",
        (
            (
                "In the {room} of the old house {name} found a small {colour2} door that {he} had never seen before.",
                "One {time} {name} found a {colour2} key, and it fitted a tiny door in the {room}.",
                "Behind the {room} there was a door. It was so small that {name} had to bend down.",
            ),
            (
                '"Should I open it?" {he} asked. {Other} the {friend} said, "I will go with you."',
                "{He} called {other} the {friend}, and the two of them opened it together.",
                '{Name} was {sad}, but {other} the {friend} held {his} hand. "Trust me," said {other}.',
            ),
            (
                "Behind the door was a {place2} full of {colour} light. {A:animal3} was waiting for them.",
                "They came into a long hall. On the walls were pictures of {a:animal3} and of the {place2}.",
                "There were stairs that went down and down, and at the end they saw a {place2} under the ground.",
            ),
            (
                'The {animal3} gave them {a:object2} and said, "Come back whenever you like." They often did.',
                "They stayed until evening and then went home. The door was gone the next day, but they never forgot it.",
                "They kept the door a secret, and each {season2} they went through it again.",
            ),
        ),
    ),
    Plot(
        "a broken {object}",
        "honesty",
        (
            (
                "One {time} {name} played in the {room} and broke the {object} of {other} the {friend}.",
                "{Name} borrowed {a:object} from {other} the {friend}. On the way home it fell and broke.",
                "By accident {name} broke the {object} that belonged to {other} the {friend}.",
            ),
            (
                '{He} was {sad} and hid the pieces under the bed. "Nobody will know," {he} thought.',
                "At first {he} wanted to say that the wind had done it.",
                "That night {name} could not sleep. {He} thought about it again and again.",
            ),
            (
                'In the morning {he} went to {other} and said, "I am sorry. I broke your {object}."',
                "Then {he} took all {his} courage and told {other} the truth.",
                '"I have to tell you something," said {name}. "It was me who broke the {object}."',
            ),
            (
                '{Other} was quiet for a moment and then said, "Thank you for telling me. We can repair it together."',
                '{Other} smiled. "A friend who tells the truth is worth more than {a:object}," {other} said.',
                "They fixed it with a little glue, and it was nearly as good as before.",
            ),
        ),
    ),
    Plot(
        "a song",
        "hope",
        (
            (
                "In the {place} nobody sang any more, for it had been a long and cold winter.",
                "{Name} loved to sing, but {he} was shy and only sang when nobody was there.",
                "One {time} {name} heard a beautiful song, and {he} wanted to know where it came from.",
            ),
            (
                "{He} walked to the {place2} and listened. There sat {other} the {friend} with a flute.",
                'One day {other} the {friend} heard {him}. "Please sing for all of us," said {other}.',
                '"I know an old song," said {other} the {friend}. "Shall I teach it to you?"',
            ),
            (
                "They practised every {time2}, first slowly, then a little faster.",
                "{Name} learned the song line by line. It told of {season2}, of {food2} and of the wide sky.",
                "At first {his} voice was very small, but with every day it grew stronger.",
            ),
            (
                "When {name} sang in the {place}, everybody came out to listen, and some began to dance.",
                "On the day of the feast they played together, and people remembered it for many years.",
                "The snow melted, the birds came back, and the song went from house to house.",
            ),
        ),
    ),
    Plot(
        "the stars",
        "curiosity",
        (
            (
                'Every {time} {name} looked at the sky and asked, "How many stars are there?"',
                "One clear night a star fell from the sky and landed near the {place}.",
                "{Name} wanted to touch the moon. {He} climbed the highest hill, but it was still too far away.",
            ),
            (
                '{Other} the {friend}, who was very old and wise, said, "Count them, and you will see."',
                "{He} ran to {other} the {friend} and told {pron_other} about it.",
                '"You need a longer ladder," said {other} the {friend}, and they began to build one.',
            ),
            (
                "So they sat on the roof of the {room} and counted: one, two, three, four, and so on.",
                "They worked all night. {A:animal3} came along and helped them.",
                "They took {a:object2} and some {food2}, and they stayed awake until the morning.",
            ),
            (
                "They never finished, but {name} learned that some questions are beautiful without an answer.",
                "In the end {name} fell asleep and dreamed of a {colour2} star that knew {his} name.",
                'When the sun came up, {name} said, "Tomorrow we will try again," and {other} agreed.',
            ),
        ),
    ),
    Plot(
        "a bridge",
        "helping others",
        (
            (
                "The old bridge to the {place2} was broken, and nobody could cross the river.",
                "After the rain the bridge was gone, and {other} the {friend} lived on the other side.",
                "Everyone in the {place} talked about building a bridge, but nobody began.",
            ),
            (
                '"I am too small to build a bridge," thought {name}. But {he} picked up one stone and put it down.',
                "{Name} carried one stone to the river, and then another one.",
                '"What are you doing?" asked {other} the {friend}. "I am building a bridge," said {name}.',
            ),
            (
                "{Other} saw it and brought a stone too. Then {a:animal3} came, and soon everyone helped.",
                "On the second day {other} helped. On the third day {a:animal3} came with a rope and some wood.",
                "They worked together from morning until night, and at noon they ate {food2}.",
            ),
            (
                "After one week the bridge was ready. It was not straight, but it was strong.",
                "When it was done, {name} walked across first, and all the others followed.",
                "They painted it {colour2}, and it is still there today.",
            ),
        ),
    ),
)

ENDINGS = (
    "From that day on, {name} knew that {virtue} is worth more than gold.",
    "And so {name} learned how important {virtue} is.",
    "That night {name} felt {feeling}. {He} closed {his} eyes and slept well.",
    "\"Thank you, {other},\" said {name}. \"You are a good friend.\" And they lived happily ever after.",
    "And if you walk through the {place} today, you can still hear them laugh.",
    "{Name} went home, ate some {food}, and felt {feeling}.",
    "They told this story many times, and each time it became a little longer. The end.",
)  # fmt: skip
MIDDLES = (
    "A few days later something new happened.",
    "But that was not the end of the story.",
    "The next {season2} brought a new adventure.",
    "Some time later, the two friends set out once more.",
)


@dataclass(frozen=True, slots=True)
class Story:
    """The text, and what later turns of a dialogue may ask about."""

    text: str
    hero: str
    name: str
    friend: str
    other: str
    place: str
    topic: str
    virtue: str


def pick_hero(rng: Random) -> str:
    """Animals most often, as people ask for them most often."""
    return rng.choice(rng.choices((ANIMALS, PEOPLE, THINGS), weights=(6, 3, 2))[0])


def gender_of(rng: Random, name: str | None) -> str:
    """The pronoun a listed name asks for; an invented name may take either."""
    if name in LISTS["name_he"]:
        return "he"
    return "she" if name in LISTS["name_she"] else rng.choice(("he", "she"))


def story_writer(rng: Random, hero: str, name: str | None) -> Writer:
    """A writer with the cast bound: who the hero and the friend are, and their pronouns."""
    gender = GENDERED.get(hero) or gender_of(rng, name)
    he, him, his = PRONOUNS[gender]
    common = rng.choice(LISTS[f"name_{gender}"])
    chosen = name or (invented_name(rng) if rng.random() < 0.25 else common)
    other = rng.choice([n for n in LISTS["name"] if n != chosen])
    cast = {
        "hero": hero, "name": chosen, "he": he, "him": him, "his": his, "other": other,
        "pron_other": PRONOUNS[gender_of(rng, other)][1],
        "friend": rng.choice([animal for animal in ANIMALS if animal != hero]),
    }  # fmt: skip
    return Writer(rng=rng, lists=LISTS, bound=cast)


def tell(rng: Random, *, hero: str | None = None, name: str | None = None, plots: int = 1) -> Story:
    """One story; `plots` above one strings several adventures of the same cast together."""
    hero = hero or pick_hero(rng)
    writer = story_writer(rng, hero, name)
    chosen = rng.sample(PLOTS, plots)
    writer.bound["virtue"] = chosen[-1].virtue
    opening = " ".join([writer.one_of(OPENINGS), *map(writer.write, rng.sample(SCENES, rng.randint(0, 2)))])
    paragraphs = [opening]
    for number, plot in enumerate(chosen):
        beats = [writer.one_of(beat) for beat in plot.beats]
        if number:
            beats.insert(0, writer.one_of(MIDDLES))
        paragraphs += [" ".join(beats[:2]), " ".join(beats[2:])]
    paragraphs.append(writer.one_of(ENDINGS))
    topic = writer.write(chosen[0].topic)
    return Story("\n\n".join(paragraphs), hero, writer.bound["name"], writer.bound["friend"], writer.bound["other"],
                 writer.bound.get("place", "village"), topic, chosen[-1].virtue)  # fmt: skip
