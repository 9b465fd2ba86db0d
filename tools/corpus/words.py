# ruff: noqa: E501  (word lists)
"""Word lists. The keys of LISTS are slot names of the templates."""

from random import Random


def split(text: str, sep: str = ",") -> tuple[str, ...]:
    """Lists are written as prose, several to a line."""
    return tuple(part.strip() for part in text.split(sep) if part.strip())


ANIMALS = split("""fox, owl, rabbit, bear, mouse, cat, dog, turtle, hedgehog, squirrel, frog, duck, goat, horse,
    penguin, elephant, lion, tiger, monkey, crow, sparrow, badger, otter, beaver, deer, wolf, snail, bee, ant,
    butterfly, whale, dolphin, crab, seal, donkey, sheep, pig, hen, goose, parrot, camel, giraffe, koala, panda,
    lizard, mole, swan, kitten, puppy, pony, spider, octopus, fish, dragon""")
PEOPLE = split("""girl, boy, farmer, baker, sailor, teacher, painter, gardener, fisherman, shepherd, tailor, doctor,
    king, queen, prince, princess, knight, clockmaker, carpenter, musician, cook, postman, wizard, lighthouse keeper,
    miller, potter, blacksmith, librarian, pilot, scientist, child, student, grandmother, grandfather""")
THINGS = split("""robot, kite, lantern, cloud, star, snowman, train, teapot, boat, clock, balloon, candle, puppet,
    toy soldier, pencil, tree, snowflake, raindrop, umbrella, computer""")
NAMES_HE = split("""Pip, Tom, Sam, Ben, Max, Leo, Finn, Oscar, Hugo, Noah, Jack, Otto, Theo, Felix, Milo, Emil, Luca,
    Adam, David, Peter, Paul, Omar, Ravi, Kenji, Bruno, Arthur, Henry, Daniel, Ivan, Mateo, Ali, Carlos, Erik, James,
    John, Bob, George, Mark, Simon, Victor""")
NAMES_SHE = split("""Lily, Mia, Ruby, Nora, Ella, Anna, Clara, Rosa, Zoe, Ivy, Alice, Emma, Lucy, Maya, Nina, Olivia,
    Sara, Tessa, Wendy, Hazel, Ada, Grace, Eva, Julia, Laura, Maria, Sofia, Yuki, Amina, Leila, Priya, Ingrid, Jane,
    Kate, Linda, Mary, Rita, Susan, Vera, Willa""")
COLOURS = split("red, blue, green, yellow, orange, purple, pink, brown, black, white, grey, silver, gold, turquoise")
PLACES = split("""forest, village, garden, mountain, river, lake, meadow, harbour, island, valley, farm, town, castle,
    desert, beach, hill, library, market, school, lighthouse, cave, orchard, mill, railway station, park, old city""")
ROOMS = split("kitchen, attic, cellar, workshop, barn, tower, bedroom, hall, shed, greenhouse")
FOODS = split("""apples, bread, honey, soup, cheese, berries, pancakes, carrots, nuts, pears, cake, rice, noodles,
    potatoes, plums, cookies, porridge, tomatoes, mushrooms, cherries, pizza, salad, chocolate, pasta, strawberries""")
OBJECTS = split("""key, map, bell, book, coin, ring, shell, feather, basket, rope, lamp, box, letter, drum, flute, spoon,
    hat, coat, blanket, mirror, stone, seed, wheel, compass, ball, button, scarf, whistle, hammer, paintbrush""")
TRAITS = split("""brave, kind, curious, clever, shy, patient, cheerful, quiet, proud, gentle, lonely, honest, careful,
    stubborn, lazy, busy, hopeful, forgetful, generous, small, restless, sleepy""")
FEELINGS = split("happy, glad, proud, calm, warm inside, thankful, full of hope, at peace")
SAD = split("sad, worried, afraid, lonely, tired, unhappy, upset, nervous")
WEATHER = split("""sunny, rainy, windy, cloudy, snowy, foggy, stormy, warm, cold, mild""")
SEASONS = split("spring, summer, autumn, winter")
TIMES = split("morning, afternoon, evening, night")
HOBBIES = split("""reading, painting, swimming, singing, cooking, running, gardening, fishing, dancing, cycling, hiking,
    drawing, chess, football, music, photography, sewing, climbing, knitting, astronomy, baking, tennis""")
JOBS = split("""teacher, nurse, farmer, baker, driver, doctor, painter, engineer, cook, writer, pilot, student, gardener,
    musician, carpenter, librarian, programmer, scientist, designer, lawyer""")
CITIES = split("""Paris, London, Rome, Madrid, Berlin, Tokyo, Oslo, Lisbon, Vienna, Dublin, Athens, Cairo, Prague, Warsaw,
    Helsinki, Boston, Chicago, Sydney, Toronto, Lima, Seoul, Beijing, Delhi, Nairobi, Zurich, Munich, Hamburg, Lyon""")
TREES = split("oak, pine, willow, apple, birch, chestnut, maple, cherry")
VIRTUES = split("""friendship, patience, kindness, courage, honesty, sharing, hard work, trust, hope, listening,
    curiosity, helping others""")
# Subjects the model knows nothing of: it learns to say so, whatever the word.
SUBJECTS = split("""quantum physics, the stock market, ancient history, tax law, politics, football results, philosophy,
    medicine, chemistry, algebra, opera, architecture, economics, car engines, cryptography, space travel, genetics,
    the latest news, volcanoes, dinosaurs, electricity, democracy, grammar, biology, jazz, fashion, real estate,
    video games, movies, physics, mathematics, geography, psychology, religion, statistics, machine learning,
    compilers, databases, operating systems, networks, the Roman Empire, the French Revolution, black holes,
    photosynthesis, gravity, inflation, blockchain, insurance, nuclear energy, climate change, vaccines, sculpture,
    poetry of the last century, the history of chess, steam engines, submarines, telescopes, magnets, batteries,
    airplanes, bridges, coffee, tea, wine, perfume, diamonds, earthquakes, hurricanes, bacteria, proteins, the brain,
    the heart, logic, set theory, calculus, geometry, probability, the Olympics, basketball, cricket, sailing""")
SURNAMES = split("Stone, Brook, Hill, Wood, Field, Marsh, Lake, Baker, Miller, Smith, Green, White, Fisher, Moore")

LISTS: dict[str, tuple[str, ...]] = {
    "animal": ANIMALS, "person": PEOPLE, "thing": THINGS, "name": NAMES_HE + NAMES_SHE, "name_he": NAMES_HE,
    "name_she": NAMES_SHE, "colour": COLOURS, "place": PLACES, "room": ROOMS, "food": FOODS, "object": OBJECTS,
    "trait": TRAITS, "feeling": FEELINGS, "sad": SAD, "weather": WEATHER, "season": SEASONS, "time": TIMES,
    "hobby": HOBBIES, "job": JOBS, "city": CITIES, "treekind": TREES, "virtue": VIRTUES, "subject": SUBJECTS,
    "surname": SURNAMES,
}  # fmt: skip

ONSETS = split("b, br, c, d, dr, f, g, h, j, k, l, m, n, p, r, s, st, t, tr, v, w, z, sh, ch")
VOWELS = split("a, e, i, o, u, ai, ee, oa")
CODAS = split("n, l, r, s, m, x, k, d, th")


def invented_name(rng: Random) -> str:
    """A name no list holds, so that the model must copy it from the context rather than know it."""
    syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 2))]
    return ("".join(syllables) + rng.choice(CODAS)).capitalize()


def any_name(rng: Random) -> str:
    """Mostly a common name, now and then an invented one."""
    return invented_name(rng) if rng.random() < 0.35 else rng.choice(LISTS["name"])
