# ruff: noqa: E501  (a table of sentences reads best with one sentence to a line)
"""Small tables of true statements the chats ask about."""

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Scotland": "Edinburgh", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna", "Greece": "Athens",
    "Hungary": "Budapest", "Belgium": "Brussels", "Iceland": "Reykjavik", "Switzerland": "Bern", "Turkey": "Ankara",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Morocco": "Rabat", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi",
    "South Korea": "Seoul", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Australia": "Canberra", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima",
    "Cuba": "Havana", "Russia": "Moscow", "Ukraine": "Kyiv", "Romania": "Bucharest", "Croatia": "Zagreb",
    "the United States": "Washington, D.C.", "the Netherlands": "Amsterdam", "the United Kingdom": "London",
}  # fmt: skip
CONTINENTS = {
    "France": "Europe", "Germany": "Europe", "Italy": "Europe", "Spain": "Europe", "Norway": "Europe",
    "Egypt": "Africa", "Kenya": "Africa", "Morocco": "Africa", "Japan": "Asia", "China": "Asia", "India": "Asia",
    "Canada": "North America", "Mexico": "North America", "Brazil": "South America", "Peru": "South America",
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink", "horse": "neigh",
    "frog": "ribbit", "owl": "hoot", "bee": "buzz", "lion": "roar", "mouse": "squeak", "snake": "hiss", "crow": "caw",
    "hen": "cluck", "goose": "honk", "wolf": "howl", "bird": "tweet",
}  # fmt: skip
HABITATS = {
    "whale": "in the sea", "dolphin": "in the sea", "camel": "in the desert", "penguin": "on cold coasts",
    "bear": "in the forest", "fox": "in the forest", "frog": "near ponds", "lion": "on the savanna",
    "giraffe": "on the savanna", "owl": "in trees", "cow": "on a farm", "pig": "on a farm", "fish": "in the water",
    "bee": "in a hive", "mole": "under the ground", "polar bear": "in the Arctic", "monkey": "in the jungle",
}  # fmt: skip
LEGS = {
    "dog": "four", "cat": "four", "horse": "four", "cow": "four", "bird": "two", "duck": "two", "hen": "two",
    "spider": "eight", "ant": "six", "bee": "six", "butterfly": "six", "snake": "no", "fish": "no", "human": "two",
}  # fmt: skip
YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb", "duck": "duckling",
    "hen": "chick", "goat": "kid", "frog": "tadpole", "bear": "cub", "lion": "cub", "pig": "piglet",
}  # fmt: skip
COLOURS_OF = {
    "the sky on a clear day": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a ripe tomato": "red",
    "a carrot": "orange", "coal": "black", "the sun": "yellow", "chocolate": "brown", "a lemon": "yellow",
    "milk": "white", "a fire engine": "red", "a crow": "black", "an elephant": "grey", "a leaf in summer": "green",
    "a strawberry": "red", "the sea": "blue", "a frog": "green",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "old": "young", "light": "dark", "high": "low", "happy": "sad",
    "open": "closed", "full": "empty", "long": "short", "wet": "dry", "up": "down", "good": "bad", "near": "far",
    "early": "late", "hard": "soft", "rich": "poor", "strong": "weak", "loud": "quiet", "day": "night",
}  # fmt: skip
PLURALS = {
    "mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth", "goose": "geese", "leaf": "leaves",
    "man": "men", "woman": "women", "wolf": "wolves", "sheep": "sheep", "box": "boxes", "city": "cities",
    "cat": "cats", "book": "books", "fish": "fish", "knife": "knives",
}  # fmt: skip
HELLOS = {
    "French": "Bonjour", "Spanish": "Hola", "German": "Hallo", "Italian": "Ciao", "Portuguese": "Olá",
    "Japanese": "Konnichiwa", "Dutch": "Hallo", "Swedish": "Hej", "Swahili": "Jambo", "Hawaiian": "Aloha",
}  # fmt: skip
THANKS = {
    "French": "Merci", "Spanish": "Gracias", "German": "Danke", "Italian": "Grazie", "Portuguese": "Obrigado",
    "Japanese": "Arigato", "Dutch": "Dank je", "Swedish": "Tack",
}  # fmt: skip
SIDES = {"triangle": "three", "square": "four", "rectangle": "four", "pentagon": "five", "hexagon": "six"}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December")  # fmt: skip
NUMBERS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
AMOUNTS = {
    "days are in a week": "There are seven days in a week.", "months are in a year": "There are twelve months in a year.",
    "hours are in a day": "There are twenty-four hours in a day.",
    "minutes are in an hour": "There are sixty minutes in an hour.",
    "seconds are in a minute": "There are sixty seconds in a minute.",
    "days are in a year": "There are 365 days in a year, and 366 in a leap year.",
    "seasons are there": "There are four seasons: spring, summer, autumn and winter.",
    "letters are in the English alphabet": "There are 26 letters in the English alphabet.",
    "continents are there": "There are seven continents.", "fingers are on one hand": "There are five fingers on one hand.",
    "wheels does a bicycle have": "A bicycle has two wheels.", "wheels does a car have": "A car has four wheels.",
    "planets are in the solar system": "There are eight planets in the solar system.",
}  # fmt: skip
PLAIN = {
    "What is the largest planet?": "Jupiter is the largest planet in the solar system.",
    "What is the largest ocean?": "The Pacific Ocean is the largest ocean.",
    "What is the highest mountain?": "Mount Everest is the highest mountain in the world.",
    "What is the largest animal?": "The blue whale is the largest animal in the world.",
    "What is the tallest animal?": "The giraffe is the tallest animal.",
    "What is the fastest land animal?": "The cheetah is the fastest land animal.",
    "What do bees make?": "Bees make honey.", "What do cows give?": "Cows give milk.",
    "What do plants need?": "Plants need water, light and air.", "What is ice made of?": "Ice is frozen water.",
    "Where does the sun rise?": "The sun rises in the east.", "Where does the sun set?": "The sun sets in the west.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "Which planet do we live on?": "We live on the planet Earth.",
    "What is the chemical formula of water?": "The chemical formula of water is H2O.",
    "Who wrote Romeo and Juliet?": "William Shakespeare wrote Romeo and Juliet.",
    "Who painted the Mona Lisa?": "Leonardo da Vinci painted the Mona Lisa.",
    "What comes after winter?": "Spring comes after winter.", "What comes after summer?": "Autumn comes after summer.",
    "Is the sun a star?": "Yes, the sun is a star.", "Can fish fly?": "No, most fish cannot fly. They swim.",
    "Can birds fly?": "Yes, most birds can fly.", "Is water wet?": "Yes, water is wet.",
    "Is fire cold?": "No, fire is hot.", "Do cats bark?": "No, cats do not bark. They meow.",
}  # fmt: skip
