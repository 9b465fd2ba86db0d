# ruff: noqa: E501  (a table of sentences reads best with one sentence to a line)
"""Texts that are not stories: how-tos, simple explanations, short poems, lists and a few lines of code."""

from random import Random

from corpus.grammar import Writer
from corpus.words import LISTS

HOWTOS: dict[str, tuple[str, ...]] = {
    "make tea": ("Boil some fresh water.", "Put a tea bag into a cup.", "Pour the hot water over it.",
                 "Wait for three minutes.", "Take out the tea bag and add a little milk or sugar."),
    "bake bread": ("Mix flour, water, salt and yeast in a bowl.", "Knead the dough for ten minutes.",
                   "Let it rest for one hour in a warm place.", "Form a loaf and put it on a tray.",
                   "Bake it for forty minutes and let it cool down."),
    "make pancakes": ("Mix two eggs, milk and flour in a bowl.", "Heat a little butter in a pan.",
                      "Pour in some of the batter.", "Turn the pancake when it is golden.", "Serve it with {food}."),
    "cook pasta": ("Fill a large pot with water and bring it to the boil.", "Add salt and then the pasta.",
                   "Stir now and then and cook it for about nine minutes.", "Pour off the water.", "Add a sauce you like."),
    "make soup": ("Cut some onions, carrots and potatoes.", "Fry the onions in a little oil.",
                  "Add the other vegetables and some water.", "Cook everything for twenty minutes.", "Add salt and pepper."),
    "plant a tree": ("Choose a sunny place.", "Dig a hole that is twice as wide as the roots.", "Put the tree into the hole.",
                     "Fill it with earth and press it down.", "Give the tree plenty of water."),
    "grow tomatoes": ("Put the seeds into small pots.", "Keep them warm and give them light.",
                      "Move the young plants outside in late spring.", "Water them every day.", "Pick the tomatoes when they are red."),
    "clean a room": ("Open the window.", "Put away everything that lies on the floor.", "Wipe the dust off the furniture.",
                     "Sweep the floor.", "Take out the rubbish."),
    "fall asleep": ("Go to bed at the same time every night.", "Put away your phone.", "Make the room dark and quiet.",
                    "Breathe slowly and think of something pleasant."),
    "learn a language": ("Learn a few new words every day.", "Listen to songs and stories.", "Speak from the first day on.",
                         "Do not be afraid of mistakes.", "Read books that are easy enough to enjoy."),
    "write a letter": ("Write the date at the top.", "Begin with a greeting.", "Say why you write.",
                       "Tell your news in short paragraphs.", "End with your name and good wishes."),
    "wash your hands": ("Wet your hands with clean water.", "Take some soap.", "Rub your hands for twenty seconds.",
                        "Rinse them well.", "Dry them with a towel."),
    "ride a bicycle": ("Put on a helmet.", "Sit on the bicycle and hold the handles.", "Push off with one foot.",
                       "Look ahead and keep pedalling.", "Use the brakes gently to stop."),
    "paint a picture": ("Choose a thing you want to paint.", "Draw it lightly with a pencil.", "Mix your colours.",
                        "Begin with the background.", "Let the paint dry before you add small details."),
    "make a salad": ("Wash the vegetables.", "Cut them into small pieces.", "Mix oil, lemon juice and salt.",
                     "Pour the dressing over the salad.", "Add some nuts or cheese."),
    "build a kite": ("Make a cross from two thin sticks.", "Cut a piece of paper in the form of a diamond.",
                     "Glue the paper to the sticks.", "Tie a long string to the middle.", "Run into the wind and let it fly."),
    "take care of a dog": ("Give it fresh water and food every day.", "Go for a walk at least twice a day.",
                           "Brush its coat.", "Play with it often.", "Take it to the vet once a year."),
    "save money": ("Write down what you spend.", "Make a plan for each month.", "Cook at home.",
                   "Wait one day before you buy something big.", "Put a little aside every month."),
    "study for a test": ("Make a list of the topics.", "Study a little each day.", "Explain each topic in your own words.",
                         "Do some exercises.", "Sleep well before the test."),
    "pack for a trip": ("Look at the weather.", "Make a list.", "Choose clothes that are easy to combine.",
                        "Put the heavy things at the bottom.", "Keep your papers where you can reach them."),
    "deploy a service on Kubernetes": ("Build a container image and push it to a registry.", "Write a manifest for the Deployment.",
                                       "Apply it with kubectl apply.", "Check that the pods are ready.", "Add a Service so that others can reach it."),
}  # fmt: skip
HOWTO_INTROS = (
    "Here is how to {task}:", "To {task}, follow these steps:", "It is easy to {task}. Here are the steps:",
    "Sure! This is a simple way to {task}:",
)  # fmt: skip
HOWTO_ENDS = ("", "Good luck!", "That is all. Have fun!", "Take your time, and it will go well.")

EXPLANATIONS: dict[str, tuple[str, ...]] = {
    "why the sky is blue": ("Sunlight is made of many colours.", "When it passes through the air, blue light is spread in all directions more than red light.", "So blue light reaches our eyes from every part of the sky."),
    "how rain is made": ("The sun warms the water of seas and lakes, and some of it rises into the air as vapour.", "High up the air is cold, and the vapour turns into tiny drops that form clouds.", "When the drops grow heavy, they fall as rain."),
    "what a rainbow is": ("A rainbow appears when the sun shines on drops of rain.", "Each drop bends the light and splits it into colours.", "We see red, orange, yellow, green, blue and violet."),
    "why leaves fall in autumn": ("In autumn the days grow short and cold.", "The tree takes back what it needs from its leaves, and they lose their green colour.", "Then they fall, so that the tree can save water during winter."),
    "how bees make honey": ("Bees collect sweet nectar from flowers and carry it to the hive.", "There they pass it on and fan it with their wings until most of the water is gone.", "What stays is honey, which feeds them in winter."),
    "why we sleep": ("While we sleep, the body rests and repairs itself.", "The brain sorts what it has learned during the day.", "After a good night we can think clearly again."),
    "why there is day and night": ("The Earth turns around itself once in twenty-four hours.", "The side that looks at the sun has day, and the other side has night.", "That is why the sun seems to rise and set."),
    "why there are seasons": ("The Earth moves around the sun once a year, and its axis is tilted.", "In summer our half leans towards the sun and gets more light.", "In winter it leans away, and the days are short and cold."),
    "what thunder is": ("Lightning heats the air very quickly.", "The hot air expands with a loud bang, and that is thunder.", "Light is faster than sound, so we see the flash first."),
    "why ice floats": ("When water freezes, it takes up more space.", "Ice is therefore lighter than the same amount of water.", "That is why it floats."),
    "how birds fly": ("Birds have light bones and strong wings.", "When they beat their wings, they push the air down, and the air pushes them up.", "Many birds also glide on the wind to save energy."),
    "what the moon is": ("The moon is a ball of rock that moves around the Earth.", "It does not shine by itself, but reflects the light of the sun.", "It takes about a month to go around the Earth once."),
    "what wind is": ("Wind is moving air.", "The sun warms some places more than others, and warm air rises.", "Cool air flows in to take its place, and we feel that as wind."),
    "how plants grow": ("Plants take water from the ground and light from the sun.", "In their leaves they use both to make sugar, which is their food.", "With it they build new roots, stems and leaves."),
    "what a computer is": ("A computer is a machine that follows instructions very quickly.", "It reads data, works with it, and shows a result.", "The instructions are called a program."),
    "what the internet is": ("The internet is a network that connects computers all over the world.", "They send each other small packets of data.", "That is how web pages, letters and videos reach you."),
    "what a language model is": ("A language model is a program that has learned from text.", "It reads the words so far and guesses which piece of text comes next, one piece after another.", "It can write fluent sentences, but it can be wrong."),
    "what a token is": ("A token is a short piece of text, often a word or a part of a word.", "A language model reads and writes tokens rather than letters.", "This sentence has about ten of them."),
    "what Kubernetes is": ("Kubernetes is a system that runs containers on many machines.", "You say what you want, and it starts, moves and restarts the containers for you.", "The smallest unit is called a pod."),
    "what prefill and decode are": ("Prefill reads the whole prompt at once and fills the cache with keys and values.", "Decode then writes the answer one token at a time.", "Tandem can run the two in separate pods, so that long prompts do not slow down running answers."),
    "what Tandem is": ("Tandem is a serving system for language models on Kubernetes.", "It can run prefill and decode in separate pods and move the cache between them.", "I am the small model that comes with it."),
    "what a cache is": ("A cache keeps results that were expensive to compute.", "When the same thing is needed again, it can be read from the cache.", "A good cache saves time, but it takes up memory."),
    "what friendship is": ("Friendship means that two people care about each other.", "Friends listen, share good days, and help on bad ones.", "It takes time and honesty."),
    "how boats float": ("A boat pushes water away, and the water pushes back.", "As long as the boat is lighter than the water it pushes away, it floats.", "That is why even a heavy ship can swim."),
}  # fmt: skip
POEMS = (
    "The {colour} sky above the {place},\nthe wind is soft and slow.\nA little {animal} [lifts|turns] its face\nand watches the river flow.",
    "{Season} comes with {weather} days,\nthe {animal} sings its song.\nThe children run on narrow ways,\nthe light stays all day long.",
    "I saw {a:animal} near the {place},\nit looked at me and ran.\nIt left no footprint and no trace\nwhere once the road began.",
    "The moon is round, the night is deep,\nthe {place} is dark and still.\nThe {animal} now is fast asleep\nbehind the silent hill.",
    "Small drops of rain on {colour} leaves,\na lantern in the hall.\nWhoever hopes, whoever grieves,\nthe rain will sing to all.",
    "A path of stone, a bridge of wood,\n{a:animal} passing by.\nI would stay longer if I could\nbeneath the {colour} sky.",
)  # fmt: skip
HAIKUS = (
    "Quiet {season} day,\nthe {animal} waits by the stream,\nleaves drift on the wind.",
    "Rain upon the roof,\na small {colour} lamp is lit,\nevening comes softly.",
    "The old pond is still,\nsuddenly a frog jumps in,\nsound of the water.",
    "First snow on the hill,\nfootprints of a little {animal}\nlead into the light.",
)  # fmt: skip
CODE: dict[str, str] = {
    "prints hello world": 'print("Hello, world!")',
    "adds two numbers": "def add(a, b):\n    return a + b",
    "multiplies two numbers": "def multiply(a, b):\n    return a * b",
    "returns the larger of two numbers": "def larger(a, b):\n    return a if a > b else b",
    "computes the factorial of a number": "def factorial(n):\n    if n <= 1:\n        return 1\n    return n * factorial(n - 1)",
    "reverses a string": "def reverse(text):\n    return text[::-1]",
    "checks whether a number is even": "def is_even(n):\n    return n % 2 == 0",
    "counts from one to ten": "for number in range(1, 11):\n    print(number)",
    "computes the Fibonacci numbers": "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    "sums a list": "def total(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n    return result",
    "reads a file": 'def read(path):\n    with open(path, encoding="utf-8") as file:\n        return file.read()',
}  # fmt: skip
LISTABLE = {"animals": "animal", "colours": "colour", "fruits and foods": "food", "cities": "city", "hobbies": "hobby",
            "jobs": "job", "names": "name", "places": "place"}  # fmt: skip


def howto(rng: Random, task: str) -> str:
    """Numbered steps, or the same steps as a list with dashes."""
    writer = Writer(rng=rng, lists=LISTS, bound={"task": task})
    numbered = rng.random() < 0.8
    steps = [f"{n}. {step}" if numbered else f"- {step}" for n, step in enumerate(map(writer.write, HOWTOS[task]), 1)]
    ending = rng.choice(HOWTO_ENDS)
    return "\n".join([writer.one_of(HOWTO_INTROS), "", *steps]) + (f"\n\n{ending}" if ending else "")


def explanation(topic: str) -> str:
    """The sentences of one topic, in one paragraph."""
    return " ".join(EXPLANATIONS[topic])


def poem(rng: Random, *, about: str | None = None, haiku: bool = False) -> str:
    """Two stanzas or a haiku; `about` names the animal that appears in it."""
    bound = {"animal": about} if about else {}
    writer = Writer(rng=rng, lists=LISTS, bound=bound)
    if haiku:
        return writer.one_of(HAIKUS)
    return "\n\n".join(map(writer.write, rng.sample(POEMS, 2)))
